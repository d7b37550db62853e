"""The URL of a directory in object storage, with the few methods of a path that checkpoints need."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

# Two letters at least: `C:/x` is a path of Windows. Chained protocols (a::b://x) are URLs too, which are refused.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]+)://(.*)", re.DOTALL)


def _hidden(url: str) -> str:
    from ..secrets import hide_in_text  # only for URLs: telling that a path is not one needs no argparse

    return hide_in_text(url)


class RemotePath(os.PathLike[str]):
    """A directory in a store.

    Args:
        url: of any protocol that fsspec knows, such as ``s3://bucket/run``.

    Raises:
        ConfigurationError: it names no place in a store, or has a query.
    """

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        if match is None:
            raise ConfigurationError(f"{url!r} is not a URL such as s3://bucket/run.")
        place = match[2].rstrip("/")
        parts = [part for part in place.split("/") if part]
        shown = _hidden(url)
        if not parts or "\0" in url or {"..", "."} & set(parts):
            raise ConfigurationError(f"{shown!r} names no directory of a store. Give one such as s3://bucket/run.")
        if "?" in url or "#" in url or "::" in url:
            raise ConfigurationError(
                f"{shown!r} has a query, a fragment or a chained protocol. Give the plain URL of a directory; options "
                "and credentials come from the environment, as the store's library reads them."
            )
        self.protocol: str | Any = match[1].lower()
        self.url: str = f"{self.protocol}://{place}"

    @property
    def name(self) -> str:
        """The last part."""
        return posixpath.basename(self.url)

    @property
    def parent(self) -> RemotePath:
        """The directory that it is in."""
        place = self.url.partition("://")[2].strip("/")
        return RemotePath(posixpath.dirname(self.url)) if "/" in place else self

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return _hidden(self.url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __fspath__(self) -> str:
        return self.url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)


Location = Path | RemotePath
"""Where checkpoints are: a directory, or a place in a store."""


def is_url(value: Any) -> bool:
    """Return True if a path is a URL of a store."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    return isinstance(text, str) and _URL.fullmatch(text) is not None
