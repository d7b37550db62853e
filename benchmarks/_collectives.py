"""Counts what a rank sends in a step, and adds up the times of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _measure import Times
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):
    """Counts collectives and messages, and the bytes that a rank of two sends in them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sent = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if "c10d" in name and not any(word in name for word in ("wait", "recv", "barrier")):
            tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
            largest = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            if "functional.all_gather" in name:  # gets the part only
                largest *= 2
            whole = any(word in name for word in ("send", "broadcast")) or (
                "reduce_scatter" not in name and "reduce" in name
            )
            self.calls += 1
            self.sent += largest if whole else largest // 2
        return function(*args, **(kwargs or {}))


def counted(step: Callable[[], object]) -> Collectives:
    """What a step sends."""
    with Collectives() as found:
        step()
    return found


def on_all_ranks(own: Times) -> Times:
    """The sums of the times of all ranks, by round; every rank must call it."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {name: [sum(turn) for turn in zip(*(rank[name] for rank in everyone), strict=True)] for name in own}
