"""Checks that parameters which tensor parallelism does not shard have the same gradient on all ranks of the axis.

Between a column-wise and the next row-wise layer, each rank has its own columns. A parameter that is used there (of the
norm of single heads, or of an activation) has a part of its gradient on each rank, which only the plan of the model can
tell from the whole gradients of other parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from ..core.local_part import local

_STEPS: Final = 3  # layers that begin with zeros hide the gradients of others in the first
_TOLERANCE: Final = 5e-2  # of the norm: kernels add in any order, in 16 bits; parts of a sum differ by far more


class ReplicatedGradients:
    """Compares the ranks of the tensor-parallel axis before the first steps of an optimizer.

    Args:
        ranks: collectives over the axis.
    """

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._names: Any = WeakIdKeyDictionary()
        self._left: Any = WeakIdKeyDictionary()  # of each optimizer: the number of trainable parameters, checks to come

    def follow(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Check these parameters, which are the same on all ranks of the axis."""
        for name, parameter in named:
            self._names[parameter] = name

    def before_step(self, optimizer: Optimizer, everyone: Collectives) -> None:
        """Raise ConfigurationError on all ranks of a model if a gradient differs along the axis; all must call it."""
        parameters = [item for group in optimizer.param_groups for item in group["params"] if item.requires_grad]
        count, left = self._left.get(optimizer, (0, _STEPS))
        left = left if count == len(parameters) else _STEPS
        self._left[optimizer] = len(parameters), left
        checked = [item for item in parameters if item in self._names] if left else []
        if not checked:
            return
        prints = torch.stack([_fingerprint(item) for item in checked])
        of_ranks = self._ranks.all_gather(prints.flatten(), "optimizer.step").unflatten(-1, prints.shape)
        highest, lowest = of_ranks.amax(0), of_ranks.amin(0)
        differs = ((highest - lowest) > _TOLERANCE * highest[:, :1]).any(1)
        # Of a short parameter, some ranks of FSDP have no part. Gradients that are not finite cannot be compared.
        flags = torch.cat([differs, ~of_ranks.isfinite().all().reshape(1)]).float()
        *found, has_overflow = everyone.all_reduce(flags, "max").tolist()
        if has_overflow:
            return
        for parameter, is_other in zip(checked, found, strict=True):
            if is_other:
                raise self._error(self._names[parameter])
        self._left[optimizer] = len(parameters), left - 1

    def _error(self, name: str) -> ConfigurationError:
        module = name.rpartition(".")[0]
        return ConfigurationError(
            f"the gradient of {name} differs among the {self._ranks.world_size} ranks of tp_size: it is used between "
            "layers that are sharded by columns and by rows, so that each rank has a part of the sum. The step was not "
            f"taken. In TorchTensorParallelConfig(plan=...), name {module!r} 'replicated_with_grad_allreduce' if it is "
            "a norm of heads; else leave out the layers before and after it. The plan of a model of Transformers is "
            "model.tp_plan."
        )


def _fingerprint(parameter: torch.Tensor) -> torch.Tensor:
    """Return the norm of a gradient, and its product with waves, on the CPU; zeros without a gradient."""
    if parameter.grad is None:
        return torch.zeros(2)
    gradient = local(parameter.grad).detach().flatten().float()
    waves = torch.arange(gradient.numel(), device=gradient.device).sin()
    return torch.stack([gradient.norm(), gradient @ (waves + 0.5)]).cpu()
