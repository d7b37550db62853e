"""Adds up the gradients of a step's shards in the order of the shards, whoever computed them.

The sum has the same bits for any number of replicas. Each replica gets a part of all gradients, adds it up, and sends
the result to the others: as many bytes as a ring all-reduce if there are as many replicas as shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions


def shards_of(rank: int, size: int, num_shards: int) -> range:
    """The shards that one of ``size`` replicas computes."""
    return range(rank, num_shards, size)


def sum_shards(
    group: Any,
    rank: int,
    size: int,
    num_shards: int,
    own: Mapping[int, torch.Tensor],
    notes: Mapping[int, torch.Tensor],
    like: torch.Tensor,
    num_notes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum one vector of each shard.

    Args:
        group: the process group of the replicas; not used if there is only one.
        rank: this replica.
        size: replicas.
        num_shards: shards.
        own: the vectors of this replica's shards; all have the shape, type and device of ``like``.
        notes: numbers in float64 about each of this replica's shards, on the CPU.
        like: an empty-valued vector of the same shape, for a replica without shards.
        num_notes: numbers about each shard.

    Returns:
        The sum, and the numbers about all shards: a tensor of shape ``(num_shards, num_notes)`` on the CPU.
    """
    if size == 1:
        total = own[0].clone()
        for shard in range(1, num_shards):
            total += own[shard]
        return total, torch.stack([notes[shard] for shard in range(num_shards)])
    width = num_notes * 8 // like.element_size()  # the notes travel as they are, among the gradients
    part = max(1, -(-like.numel() // size))
    received = _exchange(group, rank, size, num_shards, own, notes, like, part, width)
    total = received[0][:part].clone()
    for row in received[1:]:
        total += row[:part]
    gathered = total.new_empty(size, part)
    group.allgather([list(gathered.unbind())], [total], AllgatherOptions()).wait()
    about = torch.stack([row[part:].cpu().clone().view(torch.float64) for row in received])
    return gathered.view(-1)[: like.numel()], about


def _exchange(
    group: Any,
    rank: int,
    size: int,
    num_shards: int,
    own: Mapping[int, torch.Tensor],
    notes: Mapping[int, torch.Tensor],
    like: torch.Tensor,
    part: int,
    width: int,
) -> list[torch.Tensor]:
    """This replica's part of every shard, with its notes, in the order of the shards."""
    mine = shards_of(rank, size, num_shards)
    row = part + width
    sent = like.new_zeros(size, len(mine), row)
    for index, shard in enumerate(mine):
        padded = torch.nn.functional.pad(own[shard], (0, size * part - like.numel()))
        sent[:, index, :part] = padded.view(size, part)
        sent[:, index, part:] = notes[shard].view(like.dtype).to(like.device)
    counts = [len(shards_of(other, size, num_shards)) * row for other in range(size)]
    received = like.new_empty(sum(counts))
    group.alltoall_base(received, sent.view(-1), counts, [len(mine) * row] * size, AllToAllOptions()).wait()
    blocks = [block.view(-1, row) for block in received.split(counts)]
    return [blocks[shard % size][shard // size] for shard in range(num_shards)]
