"""Splitting the batches that rank 0 reads among all ranks, and sending them."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import torch

from accel_state.collectives.packing import ByteLayout
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError
from accel_state.operations import get_data_structure, is_tensor_information, recursively_apply
from accel_state.operations.nested import leaves, replace_leaves

from .batch_ops import array_lengths, concat_batches, count_samples, have_equal_values, members, slice_batch
from .lookahead import Step
from .rng_state import RngStates
from .shard_math import balanced_range


@dataclass
class GlobalStep:
    """The batches of all ranks in one step."""

    parts: list[Any] = field(default_factory=list)  # a batch for each rank; only the structure while it is sent
    real: list[int | None] = field(default_factory=list)  # samples that are not padding, by rank; None for all
    last: bool = False  # whether it is the last step
    remainder: int = -1  # samples of all ranks that are not padding; -1 if a gather has nothing to drop
    ragged: bool = False  # whether the ranks' batches differ in size
    position: int = 0  # position in the stream after this step
    message_bytes: int = 0  # length of the message that each rank's tensors are sent in
    rng: RngStates | None = None  # generators of rank 0 after reading, for ranks that share its batches


@dataclass
class BatchSplitter:
    """Builds global steps from the batches of a torch loader."""

    num_processes: int  # ranks that get different data
    split_batches: bool = False  # read and slice one batch per step; otherwise read one for each rank
    batch_size: int | None = None  # samples in a batch as it is read; None if batches have no fixed size
    drop_last: bool = False  # drop an incomplete last step
    even_batches: bool = True  # complete it from the start of the epoch to a multiple of the number of ranks
    slice_fn: Callable[..., Any] | None = None  # see DataLoaderDispatcher

    @property
    def batches_per_step(self) -> int:
        """Batches that are read per step."""
        return 1 if self.split_batches else self.num_processes

    def group(self, steps: Iterator[Step]) -> Iterator[tuple[list[Any], int, bool]]:
        """Yield the batches of each global step, the padding samples at their end, and whether it is the last step."""
        current = list(islice(steps, self.batches_per_step))
        while current:
            *_, (final, last, real, _) = current
            following: list[Step] = []
            if self.drop_last and not last:
                # The step is the last one if the next one is incomplete.
                following = list(islice(steps, self.batches_per_step))
                last = len(following) < self.batches_per_step
            if self.drop_last and len(current) < self.batches_per_step:
                return
            yield [step[0] for step in current], 0 if real is None else (count_samples(final) or 0) - real, last
            if last:
                # Exhaust the loader, so that the sampler and the workers finish their epoch.
                for _ in steps:
                    pass
                return
            current = following or list(islice(steps, self.batches_per_step))

    def split(self, batches: list[Any], padding: int, first_batch: Any) -> GlobalStep:
        """Give every rank a batch; the last ``padding`` samples are padding, missing ones come from ``first_batch``."""
        sizes = [count_samples(batch) for batch in batches]
        full = len(batches) == self.batches_per_step and not padding
        full = full and (self.batch_size is None or all(size == self.batch_size for size in sizes))
        if self.slice_fn is None and self.num_processes == 1:
            size = sizes[0] if self.even_batches and self.batch_size is not None and not full else None
            return GlobalStep(batches, [None], remainder=-1 if size is None else size)
        if not self.split_batches and self.slice_fn is None and (full or None in sizes):
            return self._whole_batches(batches, sizes, padding)
        if not self.split_batches and self.num_processes > 1 and not have_equal_values([first_batch, *batches]):
            # Counts, names, weights, ... of a batch describe its own samples only.
            return self._whole_batches(batches, sizes, padding)
        try:
            joined = concat_batches(batches)
        except ValueError:
            # Batches padded to different lengths cannot be joined.
            return self._whole_batches(batches, sizes, padding)
        size = count_samples(joined)
        if size is None:
            return self._whole_batches(batches, sizes, padding)
        if (padding or full) and size % self.num_processes == 0:
            return self._equal_slices(joined, size, size - padding if padding else -1)
        if self.even_batches and self.batch_size is not None:
            return self._completed_slices(joined, size, first_batch)
        return self._balanced_slices(joined, size)

    def _whole_batches(self, batches: list[Any], sizes: Sequence[int | None], padding: int) -> GlobalStep:
        """Whole batches; ranks without one get the first as padding."""
        missing = self.num_processes - len(batches)
        real: list[int | None] = [None] * len(batches) + [0] * missing
        if padding:
            real[len(batches) - 1] = (sizes[-1] or 0) - padding
        # Not sizes: the first array of a batch, which is counted, need not have one entry per sample.
        ragged = missing > 0 or padding > 0 or None in sizes or len({array_lengths(batch) for batch in batches}) > 1
        return GlobalStep(batches + [batches[0]] * missing, real, ragged=ragged and self.num_processes > 1)

    def _completed_slices(self, joined: Any, size: int, first_batch: Any) -> GlobalStep:
        missing = -size % self.num_processes
        available = count_samples(first_batch) or size
        padding = [slice_batch(first_batch, i % available, i % available + 1) for i in range(missing)]
        try:
            return self._equal_slices(concat_batches([joined, *padding]), size + missing, remainder=size)
        except ValueError:
            return self._balanced_slices(joined, size)

    def _equal_slices(self, joined: Any, size: int, remainder: int) -> GlobalStep:
        local = size // self.num_processes
        real: list[int | None] = [None] * self.num_processes
        if remainder >= 0:
            real = [None if local * (r + 1) <= remainder else max(0, remainder - local * r) for r in self._ranks]
        parts = [self._slice(joined, range(rank * local, (rank + 1) * local), rank) for rank in self._ranks]
        return GlobalStep(parts, real, remainder=remainder)

    def _balanced_slices(self, joined: Any, size: int) -> GlobalStep:
        pieces = [balanced_range(size, self.num_processes, rank) for rank in self._ranks]
        # A rank without samples gets the first one as padding.
        parts = [self._slice(joined, piece or range(1), rank) for rank, piece in enumerate(pieces)]
        return GlobalStep(parts, [None if piece else 0 for piece in pieces], ragged=size % self.num_processes != 0)

    @property
    def _ranks(self) -> range:
        return range(self.num_processes)

    def _slice(self, joined: Any, piece: range, rank: int) -> Any:
        if self.slice_fn is not None:
            return self.slice_fn(
                joined, slice(piece.start, piece.stop), process_index=rank, num_processes=self.num_processes
            )
        return slice_batch(joined, piece.start, piece.stop)


class ReadError(RuntimeError):
    """Rank 0 failed to read the data; the message contains its traceback."""


class UnsendableError(ConfigurationError):
    """A batch contains a value that rank 0 cannot send to the other ranks."""


def send_step(collectives: Collectives, step: GlobalStep | None, has_part_per_rank: bool) -> None:
    """Send a step from rank 0 to the other ranks; None marks the end.

    Args:
        collectives: those of all ranks.
        step: the step.
        has_part_per_rank: whether the i-th part is that of rank i, so that each rank gets its own part only. Otherwise,
            where several ranks share a part, all ranks get all parts.

    Raises:
        UnsendableError: a value cannot be pickled. Nothing was sent.
    """
    if step is None:
        collectives.broadcast_object(None)
        return
    parts = [[tensor.detach() for tensor in leaves(part)] for part in step.parts]
    layouts = [ByteLayout(part) for part in parts]
    size = max(layout.total for layout in layouts) if has_part_per_rank else 0
    header = replace(step, parts=get_data_structure(step.parts), message_bytes=size)
    try:
        collectives.broadcast_object(header)
    except Exception as error:
        refuse_unpicklable(header.parts, error)
        raise
    if size:
        packed = [layout.pack(part, size) for layout, part in zip(layouts, parts, strict=True)]
        collectives.scatter(packed[0], packed)
    elif not has_part_per_rank:
        collectives.broadcast_many(list(chain.from_iterable(parts)))


_READ_EVERYWHERE = "With dispatch_batches=False every rank reads its own batches, and nothing is sent."


def check_tensors(batch: Any, name: str = "batch") -> None:
    """Raise UnsendableError if a tensor in a batch cannot be sent: sparse, nested (jagged) or quantized tensors."""
    if not isinstance(batch, torch.Tensor):
        for name_of_member, member in members(batch, name) or ():
            check_tensors(member, name_of_member)
    elif batch.is_nested or batch.is_quantized or batch.layout is not torch.strided:
        kind = "nested" if batch.is_nested else "quantized" if batch.is_quantized else str(batch.layout)
        raise UnsendableError(
            f"{name} is a {kind} tensor, and rank 0 can send only dense ones. Make it dense in the collate function, "
            f"or let every rank read. {_READ_EVERYWHERE}"
        )


def refuse_unpicklable(batches: Sequence[Any], error: BaseException) -> None:
    """Raise UnsendableError for the first value that cannot be pickled, if there is one."""
    for batch in batches:
        name, value = _innermost_unpicklable("batch", batch)
        if name:
            raise UnsendableError(
                f"{name} is a {type(value).__name__}, which cannot be pickled, so rank 0 cannot send it: {error}. "
                f"Leave it out of the batch, or let every rank read. {_READ_EVERYWHERE}"
            ) from error


def _innermost_unpicklable(name: str, value: Any) -> tuple[str, Any]:
    """Return the name and the value of the first member that cannot be pickled; an empty name if all can be."""
    try:
        pickle.dumps(value)
    except Exception:
        found = (_innermost_unpicklable(*member) for member in members(value, name) or ())
        return next((member for member in found if member[0]), (name, value))
    return "", None


def send_error(collectives: Collectives, error: BaseException) -> None:
    """Tell the other ranks, which wait for a step, that rank 0 failed to read the data."""
    collectives.broadcast_object("".join(traceback.format_exception(error)))


def receive_step(collectives: Collectives, device: torch.device | None, has_part_per_rank: bool) -> GlobalStep | None:
    """Receive a step from rank 0 on ``device``, as :func:`send_step` sends it; None marks the end.

    Raises:
        ReadError: rank 0 failed.
    """
    header: Any = collectives.broadcast_object(None)
    if isinstance(header, str):
        raise ReadError(f"rank {collectives.rank} stops because rank 0 failed to read the data:\n{header}")
    if header is None:
        return None
    step: GlobalStep = header
    if not has_part_per_rank:
        step.parts = _empty(step.parts, device)
        collectives.broadcast_many(leaves(step.parts))
        return step
    structure = step.parts[collectives.rank]
    step.parts = [None] * collectives.world_size
    if step.message_bytes:
        part = _empty(structure, torch.device("meta"))
        buffer = collectives.scatter(torch.empty(step.message_bytes, dtype=torch.uint8, device=device), None)
        shapes = leaves(part)
        part = replace_leaves(part, iter(ByteLayout(shapes).unpack(buffer, shapes)))
    else:
        part = _empty(structure, device)
    step.parts[collectives.rank] = part
    return step


def _empty(structure: Any, device: torch.device | None) -> Any:
    """Nested data with a tensor for each description of one."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype, device=device),
        structure,
        test_type=is_tensor_information,
    )
