"""Results that selective activation checkpointing keeps, with everything that led to them.

The mode "selective" keeps the results of single operators. Where a matrix product is followed by a collective, that
would be the product of one rank, which is larger than what the ranks make of it. Layers compute such results in
:func:`keep`: the recomputation then takes the final result, and neither multiplies nor communicates again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_current: ContextVar[KeptResults | None] = ContextVar("accel_kept_results", default=None)
_computing: ContextVar[bool] = ContextVar("accel_computing_kept_result", default=False)


class KeptResults:
    """The results of one call of a checkpointed unit, in the order in which they are computed."""

    def __init__(self) -> None:
        self._results: list[tuple[torch.Tensor, int]] = []
        self._next: int | None = None  # None in the forward pass

    @contextmanager
    def recorded(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Keep the results of a forward pass, inside of another context."""
        yield from self._entered(inner, None)

    @contextmanager
    def reused(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Take the kept results in a recomputation, inside of another context."""
        yield from self._entered(inner, 0)

    def _entered(self, inner: AbstractContextManager[Any], begin: int | None) -> Iterator[None]:
        self._next = begin
        token = _current.set(self)
        try:
            with inner:
                yield
        finally:
            _current.reset(token)

    def take(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the result of a function, or in a recomputation the kept one."""
        if self._next is None:
            token = _computing.set(True)
            try:
                out = compute()
            finally:
                _computing.reset(token)
            self._results.append((out.detach(), out._version))
            return out
        result, version = self._results[self._next]
        self._next += 1
        if result._version != version:
            raise RuntimeError(
                "the output of a row-wise tensor-parallel layer was changed in place, and selective activation "
                "checkpointing keeps it. Change a copy, or set activation_checkpointing_mode='full'."
            )
        return result.detach()


def is_keeping() -> bool:
    """Return True while a unit whose results are kept is computed, or computed again."""
    return not torch.compiler.is_compiling() and _current.get() is not None


def is_computing() -> bool:
    """Return True while a result that is kept is computed. A recomputation skips the operators that run here."""
    return _computing.get()


def keep(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the result of a function that is not differentiated, or the kept one. See :func:`is_keeping`."""
    results = _current.get()
    return compute() if results is None else results.take(compute)
