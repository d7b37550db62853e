"""Checks of paths before files are read, written or removed there. Torch-free.

A directory that is written or removed may lie where other users or programs can write too. Following a symbolic link
in it would overwrite or delete files elsewhere, so a link is an error that names it.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from .errors import ArgumentTypeError, ConfigurationError

if TYPE_CHECKING:
    from .storage.url import Location


class LinkError(ConfigurationError):
    """A symbolic link where files are to be written or removed."""


def refuse_link(path: str | os.PathLike[str]) -> None:
    """Raise LinkError if a path is a symbolic link, also one whose target is missing."""
    if os.path.islink(path):
        raise LinkError(
            f"{os.fspath(path)} is a symbolic link to {os.readlink(path)}, which is not followed: files there would be "
            "overwritten or deleted. Remove the link (its target is unchanged), and try again."
        )


def open_for_writing(path: str | os.PathLike[str], append: bool = False) -> int:
    """Open a file to write to, without following a link.

    Args:
        path: the file; it is created if needed.
        append: keep what is in it, and write after its end.

    Returns:
        The descriptor.

    Raises:
        LinkError: the path is a symbolic link.
        OSError: the file cannot be opened.
    """
    refuse_link(path)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
    try:
        # The flag also covers a link that is made after the check.
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise


def make_directory(path: str | os.PathLike[str]) -> None:
    """Make a directory to write into, and its parents. Raises LinkError if the path itself is a link."""
    refuse_link(path)
    os.makedirs(path, exist_ok=True)


def leads_outside(directory: str | os.PathLike[str], name: str) -> bool:
    """Return True if a name in a directory leads outside of it: by ``..``, as an absolute path, or by a link."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    if posix.is_absolute() or windows.drive or windows.root or not posix.parts or "\0" in name:
        return True
    if ".." in (*posix.parts, *windows.parts):
        return True
    if len(posix.parts) == 1 and not os.path.islink(os.path.join(directory, name)):
        return False
    try:
        return not Path(directory, name).resolve().is_relative_to(Path(directory).resolve())
    except (OSError, RuntimeError):  # a link to itself
        return True


# Two letters at least: `C:/x` is a path of Windows. A URL that went through pathlib has one slash.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def as_path(name: str, value: Any) -> Path:
    """Return the path in an argument.

    Args:
        name: the argument, for messages.
        value: text or a path object.

    Raises:
        ArgumentTypeError: it is neither.
        ConfigurationError: it is empty, has a null byte, or is a URL.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(text, str):
        raise ArgumentTypeError(f"{name}={value!r}, a {type(value).__name__}, is not a path. Give a str or a Path.")
    if not text:
        raise ConfigurationError(f"{name}={value!r} is empty. Give a path, or '.' for the working directory.")
    if "\0" in text:
        raise ConfigurationError(f"{name}={value!r} has a null byte, which no path can have.")
    url = _URL.match(text)
    if url is not None:
        advice = (
            f"Give the path {text.partition('://')[2]!r}."
            if url[1].lower() == "file"
            else ("Give a directory of a file system, and copy it afterwards; object storage can also be mounted.")
        )
        raise ConfigurationError(f"{name}={text!r} is a URL, and only paths are written to and read. {advice}")
    return Path(value)


def as_location(name: str, value: Any) -> Location:
    """Return the path or URL in an argument.

    Args:
        name: the argument, for messages.
        value: text or a path object; ``file:///x`` is the path ``/x``.

    Raises:
        ArgumentTypeError: it is neither text nor a path.
        ConfigurationError: it is empty, or is a URL that names no directory of a store.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else ""
    if not isinstance(text, str) or "://" not in text:
        return as_path(name, value)
    if text.lower().startswith("file://"):
        return as_path(name, text[len("file://") :])
    from .storage.url import RemotePath

    try:
        return RemotePath(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None
