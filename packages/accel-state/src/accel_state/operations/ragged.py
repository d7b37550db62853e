"""Gathers tensors whose first dimension differs between ranks, in one message where the lengths are not too different.

The lengths and a digest of the call travel with the values, which are padded to the greatest length that the ranks had
in earlier calls of the same kind. If a rank has more rows now, all are sent in a second message. As in other gathers,
some calls exchange a header of a fixed size first, because messages of different sizes end in an error of the backend.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ..collectives.header import Call
from ..collectives.single import Collectives
from ..state import PartialState
from .input_checks import call_of


def gather_ragged(
    operation: str, data: Any, tensors: Sequence[torch.Tensor], collectives: Collectives
) -> list[torch.Tensor]:
    """Gather the rows of tensors whose numbers of rows differ between ranks.

    Args:
        operation: name of the caller, for the error.
        data: the nested data of the caller, for the error.
        tensors: its tensors; rows may have been removed from them. Of those without dimensions each rank's is returned.
        collectives: those of the participating ranks.

    Returns:
        For each tensor the rows of all ranks, in their order.

    Raises:
        DistributedOperationException: something other than the numbers of rows differs.
    """
    call = call_of(operation, data, ignored_dim=0)
    lengths = [tensor.shape[0] if tensor.ndim else 0 for tensor in tensors]
    schedule = collectives.schedule
    # Always counted: the ranks agree on the number of calls.
    due = schedule is None or schedule.is_due()
    known = None if schedule is None else schedule.lengths.get(call.digest)
    if due or known is None or PartialState().debug:
        table = _lengths_in_header(call, lengths, collectives, due)
        longest = [max(column) for column in zip(*table, strict=True)]
        gathered = collectives.all_gather_many(_padded(tensors, longest))
    else:
        table, gathered = _together(call, tensors, lengths, known, collectives)
        longest = [max(column) for column in zip(*table, strict=True)]
        if any(length > fits for length, fits in zip(longest, known, strict=True)):
            gathered = collectives.all_gather_many(_padded(tensors, longest))
    if schedule is not None:
        schedule.lengths[call.digest] = longest if known is None else list(map(_next_length, longest, known))
    return [
        torch.cat([rows[: row[i]] for rows, row in zip(values, table, strict=True)]) if tensors[i].ndim else values
        for i, values in enumerate(gathered)
    ]


def _lengths_in_header(call: Call, lengths: list[int], collectives: Collectives, due: bool) -> list[list[int]]:
    """Return the lengths of every rank, from a message of their own."""
    schedule = collectives.schedule
    if schedule is None or not due:
        return collectives.exchange_header(call, lengths)
    begin = time.perf_counter()
    rows = collectives.exchange_header(call, [*schedule.measurements(), *lengths])
    schedule.plan([row[:2] for row in rows], time.perf_counter() - begin)
    return [row[2:] for row in rows]


def _together(
    call: Call, tensors: Sequence[torch.Tensor], lengths: list[int], known: list[int], collectives: Collectives
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Return the lengths of every rank, and what of its tensors fits into the lengths that are known."""
    header = torch.tensor([call.digest, *lengths], dtype=torch.int64)
    fitting = [tensor[:fits] if tensor.ndim else tensor for tensor, fits in zip(tensors, known, strict=True)]
    headers, *gathered = collectives.all_gather_many([header, *_padded(fitting, known)])
    rows: list[list[int]] = headers.tolist()
    collectives.compare_calls(call, [row[0] for row in rows])
    return [row[1:] for row in rows], gathered


def _next_length(longest: int, known: int) -> int:
    """Return the length to make room for: enough for the latest calls, and at most twice what this one needed."""
    return max(longest, known) if known <= 2 * longest else longest


def _padded(tensors: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensors with zeros up to these lengths."""
    padded = []
    for tensor, length in zip(tensors, lengths, strict=True):
        if tensor.ndim and tensor.shape[0] < length:
            zeros = tensor.new_zeros((length - tensor.shape[0], *tensor.shape[1:]))
            tensor = torch.cat([tensor, zeros])
        padded.append(tensor)
    return padded
