"""Hostfiles of mpirun and DeepSpeed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from accel_state.errors import ConfigurationError

from .ports import is_local


@dataclass(frozen=True)
class Host:
    """A machine of a hostfile: name or address, and the number of processes it takes, if the file gives it."""

    name: str
    slots: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return is_local(self.name)


# "host", "host:4" (Hydra), "host slots=4 max_slots=8" (Open MPI, DeepSpeed).
_LINE = re.compile(r"(?P<name>\[[0-9a-fA-F:]+\]|[^\s:#=]+)(?::(?P<colon>\d+))?(?P<further>(?:\s+\w+=\S+)*)")
_SLOTS = re.compile(r"\sslots=(\d+)(?!\S)")


def read_hostfile(path: str, where: str) -> tuple[Host, ...]:
    """The machines of a file, in order; the slots of a machine that is listed several times are added."""
    file = Path(path).expanduser()
    hosts: dict[str, int | None] = {}
    for number, line in enumerate(read_lines(file, f"{where}: the hostfile"), 1):
        text = re.sub(r"\s*=\s*", "=", line.partition("#")[0].strip())
        if not text:
            continue
        match = _LINE.fullmatch(text)
        slots_match = _SLOTS.search(text)
        if match is None or (" slots=" in text and slots_match is None):
            raise ConfigurationError(
                f"{file}, line {number}: {text!r} is not a machine. Allowed: HOST, HOST:SLOTS, HOST slots=SLOTS."
            )
        name, slots = match["name"], match["colon"] or (slots_match[1] if slots_match else None)
        if name in hosts:
            hosts[name] = (hosts[name] or 1) + int(slots or 1)
        else:
            hosts[name] = int(slots) if slots else None
    if not hosts:
        raise ConfigurationError(f"{where}: the hostfile lists no machine. Write one on each line.")
    return tuple(Host(name, slots) for name, slots in hosts.items())


def read_lines(file: Path, subject: str) -> list[str]:
    """The lines of a text file."""
    try:
        return file.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigurationError(f"{subject} cannot be read: {reason}.") from None
