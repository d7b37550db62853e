"""Formats counts, and formats and parses sizes in bytes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from .arguments import check_number
from .errors import ConfigurationError


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``"1 process"``, ``"1,024 processes"``, ``"0 files"``."""
    if count != 1:
        noun += "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}"


def convert_bytes(size: float) -> str:
    """Format a size with the largest unit that gives at least 1: ``"1.21 GiB"``, where 1 KiB is 1024 bytes.

    Args:
        size: bytes; may be negative (a difference).
    """
    check_number("size", size, infinite=True)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PiB"


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(i?)(B|b)\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def convert_file_size_to_int(size: float | str) -> int:
    """Parse a size to bytes.

    Args:
        size: bytes (a fraction is dropped), or text such as "5GB" (5 * 10**9 bytes), "5GiB" (5 * 2**30 bytes) or
            "5Gb" (5 * 10**9 bits).

    Raises:
        ConfigurationError: it is not a size.
    """
    if not isinstance(size, str):
        return int(check_number("size", size, at_least=0))
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ConfigurationError(
            f"{size!r} is not a size. Give a number of bytes, or a number with a unit: '500MB', '5GB', '5GiB'."
        )
    number, prefix, binary, unit = match.groups()
    factor = (1024 if binary else 1000) ** _POWERS[prefix.upper()]
    bytes_ = int(float(number) * factor)
    return bytes_ // 8 if unit == "b" else bytes_


def closest(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with the known name that is most similar, or an empty text."""
    similar = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {similar[0]!r}?" if similar else ""
