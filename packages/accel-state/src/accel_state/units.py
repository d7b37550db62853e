"""Numbers for people."""

from __future__ import annotations


def convert_bytes(size: float) -> str:
    """A number of bytes in the largest unit that leaves at least one before the point: ``"1.21 GB"``; 1 KB is 1024 bytes.

    Args:
        size: bytes; may be negative (a difference).
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if abs(size) < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"
