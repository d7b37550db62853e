"""Files that list machines, as mpirun and DeepSpeed read them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from accel_state.errors import ConfigurationError

from .ports import is_local


@dataclass(frozen=True)
class Host:
    """A machine of a file.

    Attributes:
        name: name or address.
        slots: how many processes it takes, where the file says so.
    """

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
    """The machines of a file, each once, in their order; one that comes on several lines has the slots of all of them.

    Args:
        path: of the file; ``~`` is the home folder.
        where: what named it, for messages.

    Raises:
        ConfigurationError: the file cannot be read, lists nothing, or a line is not understood; the message says which.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{where}: the hostfile cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}."
        ) from None
    hosts: dict[str, int | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0].strip())
        if not words:
            continue
        match = _LINE.fullmatch(words)
        slots_word = _SLOTS.search(words)
        if match is None or (" slots=" in words and slots_word is None):
            raise ConfigurationError(
                f"{file}, line {number}: {words!r} is not a machine. Allowed: HOST, HOST:SLOTS, HOST slots=SLOTS."
            )
        name, slots = match["name"], match["colon"] or (slots_word[1] if slots_word else None)
        known = hosts.get(name) or (1 if name in hosts else 0)
        hosts[name] = known + int(slots or 1) if name in hosts or slots else None
    if not hosts:
        raise ConfigurationError(f"{where}: the hostfile lists no machine. Give one on each line.")
    return tuple(Host(name, slots) for name, slots in hosts.items())
