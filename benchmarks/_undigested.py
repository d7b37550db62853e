"""Saving and loading as they are, but for digests and fsync: what these cost is the difference."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from accel_checkpoint import checkpoint_reader, writer


class NoDigest:
    """What a digest costs nothing with."""

    def update(self, data: Any) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Nothing."""

    def hexdigest(self) -> str:
        return "0" * 32


def _nothing(*_: Any) -> None:
    """Instead of a mock, whose calls would cost more than what they replace."""


def _no_blocks(*_: Any) -> dict[Any, str]:
    return {}


@contextmanager
def _replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    with ExitStack() as undo:
        for owner, name, value in replacements:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextmanager
def saving() -> Iterator[None]:
    """The same writing without digests and fsync."""
    with _replaced((os, "fsync", _nothing), (writer, "xxhash", SimpleNamespace(xxh3_128=NoDigest))):
        yield


@contextmanager
def loading() -> Iterator[None]:
    """The same loading without comparing digests."""
    with _replaced((checkpoint_reader, "expected_digests", _no_blocks)):
        yield
