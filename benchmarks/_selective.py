"""Selective activation checkpointing by operation, as torchtitan has it: every second matrix product is recomputed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_PRODUCTS = "aten::mm"
_KEPT = ("aten::_scaled_dot_product", "c10d::_reduce_scatter")


def checkpoint_by_operation(blocks: nn.ModuleList) -> None:
    """Keep attention and every second matrix product of each block, and recompute the rest in the backward pass."""
    for index, block in enumerate(blocks):
        blocks[index] = checkpoint_wrapper(block, context_fn=_contexts, preserve_rng_state=False)


def _contexts() -> Any:
    products = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator.name() if isinstance(operator, torch._ops.OpOverload) else str(operator)
        if name == _PRODUCTS:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        else:
            keep = name.startswith(_KEPT)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
