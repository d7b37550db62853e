"""Adds up the gradients of a step's shards in the order of the shards, whichever replica computed them.

The sum has the same bits for any number of replicas. Each replica gets a part of all gradients, adds it up, and sends
the result to the others: as many bytes as a ring all-reduce if there are as many replicas as shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions


def shards_of(rank: int, size: int, num_shards: int) -> range:
    """The shards that one of ``size`` replicas computes."""
    return range(rank, num_shards, size)


class Sum(NamedTuple):
    """What all replicas know after a reduction.

    Attributes:
        total: the sum of the shards' vectors.
        notes: the numbers about each shard: a tensor of shape ``(num_shards, num_notes)`` on the CPU.
        flagged: the ranks of the replicas that set their flag.
    """

    total: torch.Tensor
    notes: torch.Tensor
    flagged: list[int]


@dataclass(frozen=True)
class SumOverReplicas:
    """The reduction of one step.

    Args:
        rank: this replica.
        size: replicas.
        num_shards: shards.
        numel: numbers in the vector of a shard.
        num_notes: float64 numbers about each shard, which travel among those of its vector.
        dtype: type of the vectors.
        device: where they are.
    """

    rank: int
    size: int
    num_shards: int
    numel: int
    num_notes: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def _part(self) -> int:
        """Numbers of a vector that one replica adds up."""
        return max(1, -(-self.numel // self.size))

    @cached_property
    def _row(self) -> int:
        """Numbers that one replica gets of a shard: its part, the notes, and the flag of the sender."""
        return self._part + self.num_notes * 8 // self.dtype.itemsize + 1

    def pack(self, pieces: Sequence[torch.Tensor], notes: torch.Tensor) -> torch.Tensor:
        """Copy the vector of a shard, given in pieces, into the rows that the replicas get; a plain vector for one.

        Args:
            pieces: tensors, which together have ``numel`` numbers.
            notes: float64 numbers about the shard, on the CPU.
        """
        flat = [piece.reshape(-1).to(self.device, self.dtype) for piece in pieces]
        if self.size == 1:
            return torch.cat(flat)
        rows = torch.empty(self.size, self._row, dtype=self.dtype, device=self.device)
        ends = notes.view(self.dtype).to(self.device), rows.new_zeros(1)
        flat.append(rows.new_zeros(self.size * self._part - self.numel))
        torch.cat([item for part in self._split(flat) for item in (*part, *ends)], out=rows.view(-1))
        return rows

    def _split(self, flat: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The pieces of each part."""
        part: list[torch.Tensor] = []
        room = self._part
        for piece in flat:
            while piece.numel() >= room:
                yield [*part, piece[:room]]
                piece, part, room = piece[room:], [], self._part
            if piece.numel():
                part.append(piece)
                room -= piece.numel()

    def sum(
        self,
        group: Any,
        own: Mapping[int, torch.Tensor],
        notes: Mapping[int, torch.Tensor],
        flag: bool,
    ) -> Sum:
        """Sum one vector of each shard.

        Args:
            group: the process group of the replicas; not used if there is only one.
            own: what :meth:`pack` has made of the vectors of this replica's shards. It is overwritten.
            notes: the numbers about each of these shards.
            flag: what the others are told of this replica.
        """
        if self.size == 1:
            total = own[0]
            for shard in range(1, self.num_shards):
                total += own[shard]
            return Sum(total, torch.stack([notes[shard] for shard in range(self.num_shards)]), [0] if flag else [])
        blocks = self._exchange(group, own, flag)
        rows = [blocks[shard % self.size].view(-1, self._row)[shard // self.size] for shard in range(self.num_shards)]
        told = torch.stack([block[-1] for block in blocks]).tolist()
        about = torch.stack([row[self._part : -1] for row in rows]).cpu().view(torch.float64)
        total = rows[0][: self._part]
        for row in rows[1:]:
            total += row[: self._part]
        gathered = total.new_empty(self.size, self._part)
        group.allgather([list(gathered.unbind())], [total], AllgatherOptions()).wait()
        return Sum(gathered.view(-1)[: self.numel], about, [rank for rank, each in enumerate(told) if each])

    def _exchange(self, group: Any, own: Mapping[int, torch.Tensor], flag: bool) -> list[torch.Tensor]:
        """What each replica sends to this one: its rows, the last number being its flag; the flag alone without any."""
        mine = shards_of(self.rank, self.size, self.num_shards)
        if len(mine) == 1:
            sent = own[mine[0]]
        elif mine:
            sent = torch.stack([own[shard] for shard in mine], dim=1).view(self.size, -1)
        else:
            sent = torch.empty(self.size, 1, dtype=self.dtype, device=self.device)
        sent[:, -1] = float(flag)
        counts = [len(shards_of(other, self.size, self.num_shards)) * self._row or 1 for other in range(self.size)]
        received = sent.new_empty(sum(counts))
        options = AllToAllOptions()
        group.alltoall_base(received, sent.view(-1), counts, [sent.shape[1]] * self.size, options).wait()
        return list(received.split(counts))
