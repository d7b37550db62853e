"""Agreement of all ranks on whether a block succeeded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from accel_state import PartialState
from accel_state.collectives.single import Collectives
from accel_state.errors import AccelError, CollectiveTimeoutError, ConfigurationError

from ._torch_compat import get_backend
from .names import CheckpointError


class LostRanksError(CheckpointError):
    """This rank cannot learn whether the others succeeded, and they do not answer any more."""


class Report(NamedTuple):
    """What a rank tells the others when they meet."""

    joins: bool  # whether this rank waits for the main process to begin, which not every rank has to
    error: str | None
    value: Any = None


@dataclass
class Outcome:
    """What ranks share at the end of a block of :func:`on_all_ranks`."""

    value: Any = None  # of this rank, set in the block
    reports: list[Report] = field(default_factory=list)  # of all ranks, after the block


def described(error: Exception) -> str:
    """Return an error as ranks report it to each other."""
    return f"{type(error).__name__}: {error}"


def exchange(collectives: Collectives, own: Report) -> list[Report]:
    """Return the reports of all ranks. Every rank must call it.

    A rank that joins does so in an exchange of its own, in which ranks that need not join take part by sending the
    report that they have anyway.
    """
    while True:
        reports = [Report(*report) for report in collectives.all_gather_object(tuple(own))]
        if own.joins or not any(report.joins for report in reports):
            return reports


@contextmanager
def on_all_ranks(collectives: Collectives, what: str, joins: bool = False) -> Iterator[Outcome]:
    """Fail the block on every rank if it fails on one. Every rank must enter it, unless it joins."""
    error: Exception | None = None
    outcome = Outcome()
    try:
        yield outcome
    except Exception as raised:
        error = raised
    reports = [Report(joins, None if error is None else described(error), outcome.value)]
    if isinstance(error, LostRanksError):
        raise error
    if collectives.world_size > 1:
        try:
            if isinstance(error, CollectiveTimeoutError):
                raise error
            reports = exchange(collectives, reports[0])
        except RuntimeError as lost:
            raise LostRanksError(
                f"{what}: rank {collectives.rank} cannot learn whether the other ranks succeeded: {lost}"
            ) from error or lost
    outcome.reports = reports
    if isinstance(error, AccelError):
        raise error
    failed = []
    for rank, report in enumerate(reports):
        if report.error is not None:
            failed.append(f"rank {rank}: {report.error}")
    if failed:
        raise CheckpointError(f"{what} failed on {len(failed)} of {len(reports)} ranks. {'; '.join(failed)}") from error


class BackgroundCollectives:
    """Collectives for a thread next to the training loop: a process group of its own, made when first needed."""

    def __init__(self, process: PartialState) -> None:
        self._process = process
        self._made: Collectives | None = None
        self._group: Any = None

    def __call__(self) -> Collectives:
        """Return the collectives; every rank must make the first call."""
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
            # The last reference ends gloo's threads; in PyTorch 2.6 one to the group keeps the GIL, for which
            # such a thread may wait forever.
            backend = [get_backend(group)]
            del group
            backend.clear()
