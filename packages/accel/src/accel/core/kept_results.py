"""Results of collectives that activation checkpointing keeps, with everything that led to them.

The mode "selective" keeps the results of single operators. Where a matrix product is followed by a collective, that
would be the product of one rank, which is larger than what the ranks make of it. Layers compute such results in
:func:`keep`: the recomputation then takes the final result, and neither multiplies nor communicates again. The modes
"sums" and "collectives" keep nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

_current: ContextVar[KeptResults | None] = ContextVar("accel_kept_results", default=None)
_computing: ContextVar[bool] = ContextVar("accel_computing_kept_result", default=False)


@dataclass
class KeptKinds:
    """Which results of collectives the calls of a unit keep.

    Attributes:
        gathers: whether gathered inputs are kept, and not only sums over the ranks.
        last: whether the last result of a call is kept. A recomputation ends before it, unless something after it is
            computed again too (a norm of the output); the first one that gets there finds out.
    """

    gathers: bool = False
    last: bool = False


class KeptResults:
    """The results of one call of a checkpointed unit, in the order in which they are computed."""

    def __init__(self, kinds: KeptKinds) -> None:
        self.kinds = kinds
        self._results: list[tuple[torch.Tensor, int]] = []
        self._next: int | None = None  # None in the forward pass

    @contextmanager
    def recorded(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Keep the results of a forward pass, inside of another context."""
        yield from self._entered(inner, None)
        if not self.kinds.last:
            del self._results[-1:]

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
            out = _computed(compute)
            self._results.append((out.detach(), out._version))
            return out
        if self._next == len(self._results):
            self.kinds.last = True
            return _computed(compute)
        result, version = self._results[self._next]
        self._next += 1
        if result._version != version:
            raise RuntimeError(
                "the output of a row-wise tensor-parallel layer, or a gathered input, was changed in place, and "
                "activation checkpointing keeps it. Change a copy, or set activation_checkpointing_mode='full'."
            )
        return result.detach()


def _computed(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    token = _computing.set(True)
    try:
        return compute()
    finally:
        _computing.reset(token)


def is_keeping(gathers: bool = False) -> bool:
    """Return True while a unit whose results are kept is computed, or computed again.

    Args:
        gathers: whether gathered inputs must be among them.
    """
    results = None if torch.compiler.is_compiling() else _current.get()
    return results is not None and (results.kinds.gathers or not gathers)


def is_computing() -> bool:
    """Return True while a result that is kept is computed. A recomputation skips the operators that run here."""
    return _computing.get()


def keep(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the result of a function that is not differentiated, or the kept one. See :func:`is_keeping`."""
    results = _current.get()
    return compute() if results is None else results.take(compute)
