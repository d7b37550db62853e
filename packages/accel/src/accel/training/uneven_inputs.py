"""Loops that end at different times on different ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ..contract.strategy import Strategy


@contextmanager
def join_uneven_inputs(
    strategy: Strategy, loaders: list[Any], joinables: list[Any], even_batches: bool | None = None
) -> Iterator[None]:
    """Let ranks run out of data at different times; see the Accelerator's method."""
    if even_batches is not None and not strategy.state.use_distributed:
        even_batches = None
    with _override_even_batches(loaders, even_batches):
        join = strategy.join(joinables)
        if join is None and strategy.state.use_distributed:
            warnings.warn(
                f"{type(strategy).__name__} cannot join uneven inputs: give every rank as many batches.",
                stacklevel=4,
            )
        with join or nullcontext():
            yield


@contextmanager
def _override_even_batches(loaders: list[Any], even_batches: bool | None) -> Iterator[None]:
    if even_batches is None:
        yield
        return
    samplers: list[Any] = [getattr(loader, "batch_sampler", None) for loader in loaders]
    shards = [sampler for sampler in samplers if hasattr(sampler, "even_batches")]
    if len(shards) < len(loaders):
        warnings.warn(
            f"even_batches={even_batches} has no effect on {len(loaders) - len(shards)} of {len(loaders)} loaders: it "
            "applies to map-style data that each process reads for itself.",
            stacklevel=5,
        )
    before = [shard.even_batches for shard in shards]
    for shard in shards:
        shard.even_batches = even_batches
    try:
        yield
    finally:
        for shard, value in zip(shards, before, strict=True):
            shard.even_batches = value
