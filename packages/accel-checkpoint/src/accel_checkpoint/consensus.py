"""Agreement of all ranks on whether a block succeeded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from accel_state import PartialState
from accel_state.collectives.single import Collectives
from accel_state.errors import AccelError, ConfigurationError

from .names import CheckpointError


@contextmanager
def on_all_ranks(collectives: Collectives, what: str) -> Iterator[None]:
    """A block that fails on every rank if it fails on one. Every rank must enter it."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    outcomes = [None if error is None else f"{type(error).__name__}: {error}"]
    if collectives.world_size > 1:
        try:
            outcomes = collectives.all_gather_object(outcomes[0])
        except RuntimeError as lost:
            raise CheckpointError(
                f"{what}: rank {collectives.rank} cannot learn whether the other ranks succeeded: {lost}"
            ) from error or lost
    if isinstance(error, AccelError):
        raise error
    if outcomes.count(None) < len(outcomes):
        failed = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if outcome is not None]
        raise CheckpointError(
            f"{what} failed on {len(failed)} of {len(outcomes)} ranks. {'; '.join(failed)}"
        ) from error


class BackgroundCollectives:
    """Collectives for a thread next to the training loop: a process group of its own, made when first needed."""

    def __init__(self, process: PartialState) -> None:
        self._process = process
        self._made: Collectives | None = None
        self._group: Any = None

    def __call__(self) -> Collectives:
        """The collectives; every rank must make the first call."""
        if self._process.num_processes == 1:
            return self._process.collectives
        if self._made is None:
            import torch.distributed as dist

            if not dist.is_available() or not dist.is_initialized():
                raise ConfigurationError(
                    "blocking=False needs torch.distributed with more than one process. Save with blocking=True."
                )
            from accel_state.collectives.torch import TorchCollectives

            self._group = dist.new_group(backend="gloo")
            self._made = TorchCollectives(torch.device("cpu"), self._group)
        return self._made

    def forget(self) -> None:
        """Destroy the process group; a later call makes another one."""
        group, self._group, self._made = self._group, None, None
        if group is not None:
            import torch.distributed as dist

            # Destroyed with all others, it is not known any more.
            with suppress(ValueError):
                if dist.is_initialized():
                    dist.destroy_process_group(group)
