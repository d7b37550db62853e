"""Optimizers of torchao that keep their state in 8 or 4 bits, on shards of parameters."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

SMALLEST: Final = 4096
"""Elements below which torchao keeps a state in full precision (torchao 0.18, ``torchao.optim``)."""


def decide_by_whole(optimizer: Optimizer, collectives: Collectives) -> None:
    """Let torchao's optimizers quantize the state of a shard if, and only if, they would that of the whole parameter.

    They look at the number of elements that a rank has, so that updates would differ from those of one process by the
    rounding of the state. Blocks of a shard are those of the whole if each rank has whole blocks of consecutive
    elements.

    Args:
        optimizer: of sharded parameters; others than torchao's are left alone.
        collectives: over all ranks that have shards.

    Raises:
        ConfigurationError: a rank would have parts of blocks.
    """
    block = getattr(optimizer, "block_size", None)
    if not type(optimizer).__module__.startswith("torchao.") or block is None:
        return
    sharded = [one for group in optimizer.param_groups for one in group["params"] if isinstance(one, DTensor)]
    cut = [_is_quantized(one, block) and not _has_whole_blocks(one, block) for one in sharded]
    on_ranks = collectives.all_gather_object(cut)
    first = next((index for index in range(len(sharded)) if any(ranks[index] for ranks in on_ranks)), None)
    if first is not None:
        raise ConfigurationError(
            f"{type(optimizer).__name__} keeps the state of a parameter of shape {tuple(sharded[first].shape)} in "
            f"blocks of {block} elements, and shards of {sharded[first].placements} over "
            f"{sharded[first].device_mesh.size()} ranks cut through blocks, so updates would differ from one process. "
            "Give such parameters to torch.optim.AdamW and pass both optimizers to prepare(), shard over fewer ranks, "
            "or use DDP."
        )
    if sharded:
        _replace_decision(optimizer, block)


def _replace_decision(optimizer: Any, block: int) -> None:
    def new_buffer(parameter: torch.Tensor, signed: bool) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            whole: torch.Tensor = own(parameter, signed)
            return whole
        local = parameter.to_local()
        if _is_quantized(parameter, block) and local.numel():
            state = optimizer._subclass_zeros(local, signed, block)
        else:
            state = torch.zeros_like(local)
        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(
            state, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        ).to(parameter.device)

    own = optimizer._new_buffer
    optimizer._new_buffer = new_buffer


def _is_quantized(parameter: torch.Tensor, block: int) -> bool:
    return parameter.numel() >= SMALLEST and parameter.numel() % block == 0


def _has_whole_blocks(parameter: DTensor, block: int) -> bool:
    """Return True if this rank has whole blocks of consecutive elements of a parameter."""
    rows = [one for one in parameter.placements if isinstance(one, Shard) and one.dim != 0]
    local = parameter.to_local()
    return local.numel() % block == 0 and not rows
