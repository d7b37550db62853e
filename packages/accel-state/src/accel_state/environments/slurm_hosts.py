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

# One host expression: what stands between commas that are outside brackets.
_EXPRESSION = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PARTS = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def expand_hosts(text: str) -> tuple[str, ...]:
    """All hosts of a list, in its order, as ``scontrol show hostnames`` prints them: gpu07, gpu08, gpu09, gpu12, big1.

    Raises:
        ConfigurationError: the text is not such a list.
    """
    expressions = _EXPRESSION.findall(text)
    if not expressions or ",".join(expressions) != text:
        raise _malformed(text)
    return tuple(host for expression in expressions for host in _expand(expression, text))


@functools.cache
def find_address(node: str) -> str:
    """An address for the name of a node: the name itself where it can be resolved, else the NodeAddr that SLURM knows
    it by.

    The name comes back as it is where neither helps; whoever connects to it then says so.
    """
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        return _ask_slurm(node) or node
    return node


def _ask_slurm(node: str) -> str | None:
    program = shutil.which("scontrol")
    if program is None:
        return None
    words = [program, "show", "node", "--oneliner", node]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bNodeAddr=(\S+)", answer)
    return match[1] if match else None


def _expand(expression: str, text: str) -> list[str]:
    parts = [
        _numbers(numbers, text) if numbers or not literal else [literal]
        for numbers, literal in _PARTS.findall(expression)
    ]
    return ["".join(words) for words in itertools.product(*parts)]


def _numbers(ranges: str, text: str) -> list[str]:
    """``07-09,12`` is 07, 08, 09, 12: the first number's zeros are kept."""
    found: list[str] = []
    for entry in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", entry)
        if match is None:
            raise _malformed(text)
        first, last = match[1], match[2] or match[1]
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _malformed(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"{text!r} is not a host list of SLURM, such as 'gpu[07-09,12],big1'. SLURM sets these variables: leave them."
    )
