"""Documents that are packed into one sequence: which tokens attend to which, and an even split of their work.

A document begins where the positions of a sequence do not count on by one, as in Transformers. Tokens attend to those
before them in their own document.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn import functional

from accel_state.errors import ConfigurationError

from .._torch_compat import has_ring_kernels

# Torch's own: within a block of context parallelism, another function has its name.
_ATTENTION = functional.scaled_dot_product_attention
PIECES = 16
"""Pieces that each rank's part of a sequence consists of where the work is balanced."""
FLEX_BLOCK = 128
"""Queries, and keys, of a block that flex attention computes or leaves out."""


class Documents:
    """The documents of the full sequences of a batch.

    Args:
        ids: a number for each token's document, equal within a document, ``[batch, length]``; a batch of 1 holds for
            all sequences.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        self._lengths: list[list[int]] | None = None
        self._masks: dict[tuple[str, int | None], Any] = {}

    @classmethod
    def of_positions(cls, positions: torch.Tensor) -> Documents:
        """Documents whose positions each count up by one: ``[batch, length]``."""
        begins = positions.diff(dim=-1) != 1
        return cls(functional.pad(begins.long().cumsum(-1), (1, 0)))

    @classmethod
    def of_boundaries(cls, boundaries: torch.Tensor, length: int) -> Documents:
        """Return the documents of a sequence, given their first tokens and its length at the end (cu_seqlens).

        Raises:
            ValueError: the boundaries do not go from 0 to the length, or not upwards.
        """
        ends = boundaries.flatten().tolist()
        if boundaries.ndim != 1 or ends[:1] != [0] or ends[-1] != length or sorted(set(ends)) != ends:
            raise ValueError(f"{ends} do not rise from 0 to {length}")
        return cls(torch.repeat_interleave(boundaries.diff().long()).unsqueeze(0))

    def positions(self) -> torch.Tensor:
        """Return the place of each token in its document: ``[batch, length]``."""
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
        window: int | None = None,
    ) -> torch.Tensor:
        """Attention of some tokens to others: shapes ``[batch, heads, tokens, D]``.

        Args:
            query: of these tokens.
            key: of the others; may have fewer heads, which divide those of the queries.
            value: of the others.
            queries: positions of the tokens in the full sequence, ``[tokens]``; the same in every call.
            keys: those of the others.
            scale: of the scores; by default ``D ** -0.5``.
            window: tokens attend to so many, themselves included, and not to those before them.
        """
        is_grouped = query.shape[1] != key.shape[1]
        if has_ring_kernels(query.device.type):
            mask = self._mask("flex", queries, keys, window)
            attended: torch.Tensor = _flex_attention()(
                query, key, value, block_mask=mask, scale=scale, enable_gqa=is_grouped
            )
            return attended
        mask = self._mask("sdpa", queries, keys, window)
        return _ATTENTION(query, key, value, attn_mask=mask, scale=scale, enable_gqa=is_grouped)

    def attend_whole(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        dropout: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Causal attention of all tokens, in order, to those of their documents: ``[batch, heads, length, D]``."""
        if window is not None and dropout:
            raise ConfigurationError(
                f"attention with sliding_window={window} over split sequences has no dropout, and the model asks for "
                f"{dropout}. Set attention_dropout=0."
            )
        if window is not None or (has_ring_kernels(query.device.type) and not dropout):
            places = torch.arange(query.shape[2], device=query.device)
            return self.attend(query, key, value, places, places, scale, window)
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

    def _mask(self, kind: str, queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> Any:
        if (kind, window) not in self._masks:
            ids = self.ids.to(queries.device)
            if kind == "sdpa":
                mask = ids[:, queries].unsqueeze(-1) == ids[:, keys].unsqueeze(-2)
                mask = (mask & in_reach(queries.unsqueeze(-1), keys, window)).unsqueeze(1)
            else:
                mask = flex_mask(ids, queries, keys, window)
            self._masks[kind, window] = mask
        return self._masks[kind, window]

    def split_evenly(self, size: int, block: int = 1) -> torch.Tensor:
        """Return the positions of each rank, ``[size, length / size]``, with about the same work.

        The heaviest piece of the sequence goes to the rank with the least work that has room (longest processing time
        first: Graham, Bounds on multiprocessing timing anomalies, 1969).

        Args:
            size: ranks; they divide the length.
            block: attention computes blocks of so many queries and as many keys, or none of a block; the work of a
                query is then the blocks, and no block is split. Other than 1 it has no effect if it does not divide
                the length of each part.
        """
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        share = len(places) // size
        block = 1 if share % block else block
        first = (places - self.positions()).unflatten(1, (-1, block)).amin(2) // block
        work = (places[::block] // block - first + 1).sum(0).cpu()
        parts = share // block
        piece = next(piece for piece in range(max(1, parts // PIECES), 0, -1) if parts % piece == 0)
        weights = work.unflatten(0, (-1, piece)).sum(1).tolist()
        loads, taken = [0] * size, [list[int]() for _ in range(size)]
        for index in sorted(range(len(weights)), key=lambda index: -weights[index]):
            rank = min((rank for rank in range(size) if len(taken[rank]) < parts // piece), key=loads.__getitem__)
            loads[rank] += weights[index]
            taken[rank].append(index)
        begins = torch.tensor([sorted(pieces) for pieces in taken]) * piece * block
        return (begins.unsqueeze(-1) + torch.arange(piece * block)).flatten(1)


def in_reach(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return whether tokens attend to others, by their positions."""
    return keys <= queries if window is None else (keys <= queries) & (keys > queries - window)


def flex_mask(ids: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, window: int | None = None) -> Any:
    """Return the same mask for flex attention, which leaves out blocks that it hides."""
    from torch.nn.attention.flex_attention import create_block_mask

    def attends(row: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        del head
        return (ids[row, queries[q]] == ids[row, keys[k]]) & in_reach(queries[q], keys[k], window)

    size = len(queries), len(keys)
    return create_block_mask(attends, len(ids), None, *size, device=str(queries.device), BLOCK_SIZE=FLEX_BLOCK)


@cache
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)  # without it, flex attention computes all scores


def are_packed_positions(tensor: torch.Tensor) -> bool:
    """Return True if values begin at 0, and count up by one or begin again, at least once: ``[batch, length]``."""
    if tensor.ndim != 2 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return False
    begins = tensor.diff(dim=-1) != 1
    return bool((tensor[:, 0] == 0).all() & begins.any() & (tensor[:, 1:][begins] == 0).all())
