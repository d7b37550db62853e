"""Documents that are packed into one sequence: which tokens attend to which, and an even split of their work.

A document begins where the positions of a sequence do not count on by one, as in Transformers. Tokens attend to those
before them in their own document.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn import functional

from .._torch_compat import has_ring_kernels

# Torch's own: within a block of context parallelism, another function has its name.
_ATTENTION = functional.scaled_dot_product_attention
PIECES = 16
"""Pieces that each rank's part of a sequence consists of where the work is balanced."""


class Documents:
    """The documents of the full sequences of a batch.

    Args:
        ids: a number for each token's document, equal within a document, ``[batch, length]``; a batch of 1 holds for
            all sequences.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        self._lengths: list[list[int]] | None = None
        self._masks: dict[str, Any] = {}

    @classmethod
    def of_positions(cls, positions: torch.Tensor) -> Documents:
        """Documents whose positions each count up by one: ``[batch, length]``."""
        begins = positions.diff(dim=-1) != 1
        return cls(functional.pad(begins.long().cumsum(-1), (1, 0)))

    @classmethod
    def of_boundaries(cls, boundaries: torch.Tensor, length: int) -> Documents:
        """The documents of one sequence of which the first tokens, and its length at the end, are given (cu_seqlens).

        Raises:
            ValueError: the boundaries do not go from 0 to the length, or not upwards.
        """
        ends = boundaries.flatten().tolist()
        if boundaries.ndim != 1 or ends[:1] != [0] or ends[-1] != length or sorted(set(ends)) != ends:
            raise ValueError(f"{ends} do not rise from 0 to {length}")
        return cls(torch.repeat_interleave(boundaries.diff().long()).unsqueeze(0))

    def positions(self) -> torch.Tensor:
        """The place of each token in its document: ``[batch, length]``."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        begins = functional.pad(self.ids.diff(dim=-1) != 0, (1, 0), value=True)
        return places - torch.where(begins, places, 0).cummax(-1).values

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attention of some tokens to others: shapes ``[batch, heads, tokens, D]``.

        Args:
            query: of these tokens.
            key: of the others; may have fewer heads, which divide those of the queries.
            value: of the others.
            queries: positions of the tokens in the full sequence, ``[tokens]``; the same in every call.
            keys: those of the others.
            scale: of the scores; by default ``D ** -0.5``.
        """
        is_grouped = query.shape[1] != key.shape[1]
        if has_ring_kernels(query.device.type):
            mask = self._mask("flex", queries, keys)
            attended: torch.Tensor = _flex_attention()(
                query, key, value, block_mask=mask, scale=scale, enable_gqa=is_grouped
            )
            return attended
        return _ATTENTION(
            query, key, value, attn_mask=self._mask("sdpa", queries, keys), scale=scale, enable_gqa=is_grouped
        )

    def attend_whole(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, dropout: float
    ) -> torch.Tensor:
        """Causal attention of all tokens, in order, to those of their documents: ``[batch, heads, length, D]``."""
        if has_ring_kernels(query.device.type) and not dropout:
            places = torch.arange(query.shape[2], device=query.device)
            return self.attend(query, key, value, places, places, scale)
        settings: dict[str, Any] = {"is_causal": True, "scale": scale, "dropout_p": dropout}
        settings["enable_gqa"] = query.shape[1] != key.shape[1]
        rows = []
        for row, lengths in enumerate(self.lengths(query.shape[0])):
            split = zip(*(x[row : row + 1].split(lengths, 2) for x in (query, key, value)), strict=True)
            rows.append(torch.cat([_ATTENTION(*one, **settings) for one in split], 2))
        return torch.cat(rows)

    def lengths(self, batch: int) -> list[list[int]]:
        """Tokens of each document, by sequence."""
        if self._lengths is None:
            counts = [torch.unique_consecutive(row, return_counts=True)[1] for row in self.ids]
            self._lengths = [count.tolist() for count in counts]
        return self._lengths * (batch // len(self._lengths))

    def _mask(self, kind: str, queries: torch.Tensor, keys: torch.Tensor) -> Any:
        if kind in self._masks:
            return self._masks[kind]
        ids = self.ids.to(queries.device)
        if kind == "sdpa":
            mask = (ids[:, queries].unsqueeze(-1) == ids[:, keys].unsqueeze(-2)) & (keys <= queries.unsqueeze(-1))
            self._masks[kind] = mask.unsqueeze(1)
        else:
            self._masks[kind] = flex_mask(ids, queries, keys)
        return self._masks[kind]

    def split_evenly(self, size: int) -> torch.Tensor:
        """The positions of each rank, ``[size, length / size]``, with about the same number of attended pairs.

        The heaviest piece of the sequence goes to the rank with the least work that has room (longest processing time
        first: Graham, Bounds on multiprocessing timing anomalies, 1969).
        """
        work = (self.positions() + 1).sum(0).cpu()
        share = len(work) // size
        piece = next(piece for piece in range(max(1, share // PIECES), 0, -1) if share % piece == 0)
        weights = work.unflatten(0, (-1, piece)).sum(1).tolist()
        loads, taken = [0] * size, [list[int]() for _ in range(size)]
        for index in sorted(range(len(weights)), key=lambda index: -weights[index]):
            rank = min((rank for rank in range(size) if len(taken[rank]) < share // piece), key=loads.__getitem__)
            loads[rank] += weights[index]
            taken[rank].append(index)
        first = torch.tensor([sorted(pieces) for pieces in taken]) * piece
        return (first.unsqueeze(-1) + torch.arange(piece)).flatten(1)


def flex_mask(ids: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> Any:
    """The same mask for flex attention, which leaves out blocks that it hides."""
    from torch.nn.attention.flex_attention import create_block_mask

    def attends(row: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        del head
        return (ids[row, queries[q]] == ids[row, keys[k]]) & (keys[k] <= queries[q])

    return create_block_mask(attends, len(ids), None, len(queries), len(keys), device=str(queries.device))


@cache
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)  # without it, flex attention computes all scores


def are_packed_positions(tensor: torch.Tensor) -> bool:
    """Whether values begin at 0, and count up by one or begin again, at least once: ``[batch, length]``."""
    if tensor.ndim != 2 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return False
    begins = tensor.diff(dim=-1) != 1
    return bool((tensor[:, 0] == 0).all() & begins.any() & (tensor[:, 1:][begins] == 0).all())
