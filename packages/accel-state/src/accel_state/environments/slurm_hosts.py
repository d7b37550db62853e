"""SLURM's notation for lists of hosts: ``"gpu[07-09,12],big1"``."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import socket
import subprocess

from ..errors import ConfigurationError

_SCONTROL_SECONDS = 20

# A host expression: the text between commas outside brackets.
_EXPRESSION = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PARTS = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand a list of hosts, like ``scontrol show hostnames``: gpu07, gpu08, gpu09, gpu12, big1."""
    expressions = _EXPRESSION.findall(text)
    if not expressions or ",".join(expressions) != text:
        raise _malformed(text)
    return tuple(host for expression in expressions for host in _expand(expression, text))


@functools.cache
def find_address(node: str) -> str:
    """The address of a node: its name if that can be resolved, else SLURM's NodeAddr, else its name."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        return _ask_slurm(node) or node
    return node


def _ask_slurm(node: str) -> str | None:
    program = shutil.which("scontrol")
    if program is None:
        return None
    command = [program, "show", "node", "--oneliner", node]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bNodeAddr=(\S+)", output)
    return match[1] if match else None


def _expand(expression: str, text: str) -> list[str]:
    parts = [
        _numbers(numbers, text) if numbers or not literal else [literal]
        for numbers, literal in _PARTS.findall(expression)
    ]
    return ["".join(pieces) for pieces in itertools.product(*parts)]


def _numbers(ranges: str, text: str) -> list[str]:
    """``07-09,12`` means 07, 08, 09, 12: leading zeros are kept."""
    numbers: list[str] = []
    for entry in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", entry)
        if match is None:
            raise _malformed(text)
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _malformed(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"{text!r} is not a SLURM host list such as 'gpu[07-09,12],big1'. Do not change SLURM's variables."
    )
