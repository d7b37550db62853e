"""Delayed scaling: at each forward pass, what the last one saw goes into the histories, and the scales follow them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_state.errors import ConfigurationError

from .formats import BY_DTYPE
from .linear import NativeLinear
from .recipe import FP8Recipe
from .scaling import SMALLEST_AMAX


class AmaxGroup:
    """The processes over which largest values are taken: those that share a batch, and so must share scales.

    Args:
        group: a process group; None is the default one, where there is one.
        enabled: False keeps every process to itself.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, enabled: bool = True) -> None:
        self.group = group
        self.enabled = enabled

    def reduce(self, amax: Tensor) -> Tensor:
        """The elementwise maximum over the processes."""
        if self.enabled and dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        return amax

    def __deepcopy__(self, memo: dict[int, Any]) -> AmaxGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            raise ConfigurationError(
                "a model that was converted with a process_group of its own cannot be pickled, because the group "
                "cannot. Save its "
                "state_dict()."
            )
        return AmaxGroup, (None, self.enabled)


class ScaleUpdate:
    """The hook that runs before each forward pass of a converted model.

    It is made of tensor operations only, so that it becomes part of the graph when the model is compiled.

    Args:
        layers: the layers with delayed scaling.
        recipe: how scales follow from histories.
        group: the processes that share them.
    """

    def __init__(self, layers: list[NativeLinear], recipe: FP8Recipe, group: AmaxGroup) -> None:
        self.layers = layers
        self.recipe = recipe
        self.group = group

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Update the scales, if this is a step of training."""
        if module.training and torch.is_grad_enabled() and self.layers:
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Write the pending largest values into the histories, and compute the scales from these."""
        layers = self.layers
        amax = self.group.reduce(self._pending())
        history = torch.cat(
            [amax.unsqueeze(-1), torch.stack([layer.fp8_amax_history for layer in layers])[..., :-1]], dim=-1
        )
        before = torch.stack([layer.fp8_scale for layer in layers])
        updates = torch.stack([layer.fp8_updates for layer in layers])
        scales = torch.where((updates % self.recipe.interval == 0).unsqueeze(-1), self._scales(history, before), before)
        torch._foreach_copy_([layer.fp8_amax_history for layer in layers], list(history.unbind()))
        torch._foreach_copy_([layer.fp8_scale for layer in layers], list(scales.unbind()))
        torch._foreach_add_([layer.fp8_updates for layer in layers], 1)
        torch._foreach_zero_([layer.fp8_forward_amax for layer in layers])
        torch._foreach_zero_([layer.fp8_gradient_amax for layer in layers])

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give every process the largest values of all of them, as the next forward pass would."""
        if not self.layers:
            return
        amax = self.group.reduce(self._pending())
        torch._foreach_copy_([layer.fp8_forward_amax for layer in self.layers], list(amax[:, :2].unbind()))
        torch._foreach_copy_([layer.fp8_gradient_amax for layer in self.layers], list(amax[:, 2].unbind()))

    def _pending(self) -> Tensor:
        """Of shape (layers, 3)."""
        return torch.cat(
            [
                torch.stack([layer.fp8_forward_amax for layer in self.layers]),
                torch.stack([layer.fp8_gradient_amax for layer in self.layers]).unsqueeze(-1),
            ],
            dim=-1,
        )

    def _scales(self, history: Tensor, before: Tensor) -> Tensor:
        """The scales of all layers; a tensor that was not seen keeps its own.

        ``scale = largest / amax / 2**margin``, as in the delayed scaling of Transformer Engine:
        https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html
        """
        amax = history.amax(dim=-1) if self.recipe.amax_compute_algo == "max" else history[..., 0]
        plan = self.layers[0]._plan
        largest = [BY_DTYPE[dtype].largest for dtype in (plan.forward, plan.forward, plan.backward)]
        ends = torch.tensor(largest, device=amax.device)
        return torch.where(amax > 0, ends / amax.clamp(min=SMALLEST_AMAX) * 2.0**-plan.margin, before)


def updates_of(model: nn.Module) -> Iterator[ScaleUpdate]:
    """The hooks of this kind on a model and the modules in it."""
    for module in model.modules():
        yield from (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, ScaleUpdate))


def synchronize(model: nn.Module) -> None:
    """Give every process the largest values that any of them has seen since the last forward pass.

    The next forward pass does so by itself. Call it on every process before the state dict of one of them is saved for
    all: training that is resumed from it is then bit for bit that of the run without an interruption.

    Args:
        model: a model converted by the native back end; any other has nothing to synchronise.
    """
    for update in updates_of(model):
        update.synchronize()
