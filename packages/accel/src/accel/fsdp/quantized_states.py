"""Optimizers that keep their state in 8 or 4 bits, on shards of parameters."""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accel_state import get_logger

logger = get_logger(__name__)

SMALLEST = 4096
"""Elements below which torchao keeps a state in full precision (torchao 0.18, ``torchao.optim``)."""


def warn_of_local_decisions(optimizer: Optimizer) -> None:
    """Warn if torchao's optimizers would quantize the state of a whole parameter, but not that of this rank's shard.

    They look at the number of elements that a rank has. Where that decides otherwise than in one process, updates
    differ by the rounding of the state.
    """
    block = getattr(optimizer, "block_size", None)
    if not type(optimizer).__module__.startswith("torchao.") or block is None:
        return

    def is_quantized(elements: int) -> bool:
        return elements >= SMALLEST and elements % block == 0

    sharded = [one for group in optimizer.param_groups for one in group["params"] if isinstance(one, DTensor)]
    apart = [one for one in sharded if is_quantized(one.numel()) != is_quantized(one.to_local().numel())]
    if apart:
        logger.warning(
            "%s quantizes the state of a parameter if this rank's shard has at least %d elements, in blocks of %d: for "
            "%d of %d parameters (the first of shape %s, with %d elements here) it decides otherwise than one process, "
            "so updates differ by the rounding. Shard over fewer ranks, or use an optimizer that keeps its state in "
            "full precision for equal results.",
            type(optimizer).__name__,
            SMALLEST,
            block,
            len(apart),
            len(sharded),
            tuple(apart[0].shape),
            apart[0].to_local().numel(),
        )
