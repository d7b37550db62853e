"""Dealing the batches that one rank has read to all ranks, and carrying them there."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from accel_state.collectives.single import Collectives
from accel_state.operations import get_data_structure, is_tensor_information, recursively_apply
from accel_state.operations.nested import leaves

from .batch_ops import count_rows, join_rows, slice_rows
from .epoch_rng import GlobalRandomState
from .lookahead import Step
from .shard_math import balanced_range


@dataclass
class Round:
    """What the ranks get in one step.

    Attributes:
        parts: a batch for each rank; the batches themselves on the rank that read them, only their structure on its
            way.
        real: for each rank, samples of its batch that are no padding; None where all are.
        last: whether no step follows.
        remainder: samples of all ranks that are no padding; -1 if there is nothing to leave out after a gather.
        ragged: whether the ranks' batches differ in size.
        position: position in the stream after this step.
        random: what reading left the generators at, for ranks that share the reader's batches and must draw the same
            numbers as it does.
    """

    parts: list[Any] = field(default_factory=list)
    real: list[int | None] = field(default_factory=list)
    last: bool = False
    remainder: int = -1
    ragged: bool = False
    position: int = 0
    random: GlobalRandomState | None = None


@dataclass
class Dealer:
    """Makes a round of the batches that were read for it.

    Attributes:
        num_processes: number of ranks that get different data.
        split_batches: one batch is read for a round, and sliced; otherwise one for each rank.
        batch_size: samples in a batch as it is read; None where batches have no fixed size.
        drop_last: leave out a last round that is not full.
        even_batches: complete a last round that is not full with samples from the start of the epoch, up to a multiple
            of the number of ranks, so that all get batches of one size.
        slice_fn: ``slice_fn(batch, slice, process_index=, num_processes=)`` cuts the batch of a rank out of the joined
            batches; None means along the first dimension.
    """

    num_processes: int
    split_batches: bool = False
    batch_size: int | None = None
    drop_last: bool = False
    even_batches: bool = True
    slice_fn: Callable[..., Any] | None = None

    @property
    def batches_a_round(self) -> int:
        """Batches that are read for a round."""
        return 1 if self.split_batches else self.num_processes

    def rounds(self, steps: Iterator[Step]) -> Iterator[tuple[list[Any], int, bool]]:
        """Batches in rounds, each with the number of samples at its end that are padding, and whether it is the last
        one.
        """
        current = list(islice(steps, self.batches_a_round))
        while current:
            *_, (final, last, real, _) = current
            following: list[Step] = []
            if self.drop_last and not last:
                # Whether this is the last round depends on the next one being full.
                following = list(islice(steps, self.batches_a_round))
                last = len(following) < self.batches_a_round
            if self.drop_last and len(current) < self.batches_a_round:
                return
            yield [step[0] for step in current], 0 if real is None else (count_rows(final) or 0) - real, last
            if last:
                # To its end, where the sampler and the workers have their last word.
                for _ in steps:
                    pass
                return
            current = following or list(islice(steps, self.batches_a_round))

    def deal(self, batches: list[Any], padding: int, first_batch: Any) -> Round:
        """Give every rank a batch.

        Args:
            batches: those read for this round.
            padding: samples at the end of the last of them that stand in for missing ones.
            first_batch: the first one of the epoch, which missing samples are taken from.
        """
        sizes = [count_rows(batch) for batch in batches]
        full = len(batches) == self.batches_a_round and not padding
        full = full and (self.batch_size is None or all(size == self.batch_size for size in sizes))
        if not self.split_batches and self.slice_fn is None and (full or None in sizes):
            return self._deal_whole(batches, sizes, padding)
        try:
            joined = join_rows(batches)
        except ValueError:
            # Batches that are padded to lengths of their own cannot be cut anew.
            return self._deal_whole(batches, sizes, padding)
        rows = count_rows(joined)
        if rows is None:
            return self._deal_whole([joined], [None], 0)
        return self._cut_joined(joined, rows, full, padding, first_batch)

    def _cut_joined(self, joined: Any, rows: int, full: bool, padding: int, first_batch: Any) -> Round:
        if padding and rows % self.num_processes == 0:
            return self._cut_evenly(joined, rows, rows - padding)
        if full and rows % self.num_processes == 0:
            return self._cut_evenly(joined, rows, -1)
        if self.even_batches and self.batch_size is not None:
            return self._complete(joined, rows, first_batch)
        return self._cut_balanced(joined, rows)

    def _deal_whole(self, batches: list[Any], sizes: Sequence[int | None], padding: int) -> Round:
        """Whole batches; the ranks beyond them take part with one that does not count."""
        missing = self.num_processes - len(batches)
        real: list[int | None] = [None] * len(batches) + [0] * missing
        if padding:
            real[len(batches) - 1] = (sizes[-1] or 0) - padding
        ragged = missing > 0 or padding > 0 or None in sizes or len(set(sizes)) > 1
        return Round(batches + [batches[0]] * missing, real, ragged=ragged and self.num_processes > 1)

    def _complete(self, joined: Any, rows: int, first_batch: Any) -> Round:
        missing = -rows % self.num_processes
        source_rows = count_rows(first_batch) or rows
        filling = [slice_rows(first_batch, i % source_rows, i % source_rows + 1) for i in range(missing)]
        try:
            return self._cut_evenly(join_rows([joined, *filling]), rows + missing, remainder=rows)
        except ValueError:
            return self._cut_balanced(joined, rows)

    def _cut_evenly(self, joined: Any, rows: int, remainder: int) -> Round:
        size = rows // self.num_processes
        pieces = [range(rank * size, (rank + 1) * size) for rank in range(self.num_processes)]
        real = [
            None if remainder < 0 or piece.stop <= remainder else max(0, remainder - piece.start) for piece in pieces
        ]
        return Round([self._cut(joined, piece, rank) for rank, piece in enumerate(pieces)], real, remainder=remainder)

    def _cut_balanced(self, joined: Any, rows: int) -> Round:
        pieces = [balanced_range(rows, self.num_processes, rank) for rank in range(self.num_processes)]
        # A rank without a sample takes part in the step with one that does not count.
        parts = [self._cut(joined, piece or range(1), rank) for rank, piece in enumerate(pieces)]
        ragged = rows < self.num_processes or rows % self.num_processes != 0
        return Round(parts, [None if piece else 0 for piece in pieces], ragged=ragged)

    def _cut(self, joined: Any, piece: range, rank: int) -> Any:
        if self.slice_fn is not None:
            return self.slice_fn(
                joined, slice(piece.start, piece.stop), process_index=rank, num_processes=self.num_processes
            )
        return slice_rows(joined, piece.start, piece.stop)


class ReadError(RuntimeError):
    """The rank that reads the data failed; the message holds its traceback."""


def send_round(collectives: Collectives, round_: Round | None) -> None:
    """Give a round to the other ranks, or None for the end. Called by the rank that read it, rank 0."""
    if round_ is None:
        collectives.broadcast_object(None)
        return
    header = Round(**{**vars(round_), "parts": get_data_structure(round_.parts)})
    collectives.broadcast_object(header)
    collectives.broadcast_many([tensor.detach() for tensor in leaves(round_.parts)])


def send_error(collectives: Collectives, error: BaseException) -> None:
    """Tell the other ranks, who wait for a round, that reading failed."""
    collectives.broadcast_object("".join(traceback.format_exception(error)))


def receive_round(collectives: Collectives, device: torch.device | None) -> Round | None:
    """The round that rank 0 sends, or None at the end.

    Args:
        collectives: those of the run.
        device: where its tensors are put; None means the CPU.

    Raises:
        ReadError: reading failed on rank 0.
    """
    header: Any = collectives.broadcast_object(None)
    if isinstance(header, str):
        raise ReadError(
            f"rank {collectives.rank} stops iterating, because reading the data failed on rank 0:\n{header}"
        )
    if header is None:
        return None
    header.parts = recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype, device=device),
        header.parts,
        test_type=is_tensor_information,
    )
    collectives.broadcast_many(leaves(header.parts))
    received: Round = header
    return received
