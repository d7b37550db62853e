"""Delayed scaling: each forward pass appends the last pass's largest values to histories and updates the scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_state.errors import ConfigurationError

from ._torch_compat import foreach_add_, foreach_copy_, foreach_zero_, forward_pre_hooks
from .linear import NativeLinear
from .recipe import FP8Recipe
from .scaling import BY_DTYPE, SMALLEST_AMAX


class AmaxGroup:
    """The processes that share scales, and over which largest values (amax) are reduced."""

    def __init__(self, group: dist.ProcessGroup | None = None, enabled: bool = True) -> None:
        self.group = group
        self.enabled = enabled

    def reduce(self, amax: Tensor) -> Tensor:
        """Return the elementwise maximum over the processes."""
        if self.enabled and dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        return amax

    def __deepcopy__(self, memo: dict[int, Any]) -> AmaxGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            raise ConfigurationError(
                "a model converted with an explicit process_group cannot be pickled, because a process group cannot. "
                "Save its state_dict()."
            )
        return AmaxGroup, (None, self.enabled)


class ScaleUpdate:
    """Forward pre-hook that updates the scales of a converted model.

    It consists of tensor operations only, so that it becomes part of the graph when the model is compiled.
    """

    def __init__(self, layers: list[NativeLinear], recipe: FP8Recipe, group: AmaxGroup) -> None:
        self.layers = layers
        self.recipe = recipe
        self.group = group

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Update the scales in a training step."""
        if module.training and torch.is_grad_enabled() and self.layers:
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Move the pending largest values to the histories, and compute the scales from these."""
        layers = self.layers
        amax = self.group.reduce(self._pending())
        older = torch.stack([layer.fp8_amax_history for layer in layers])[..., :-1]
        history = torch.cat([amax.unsqueeze(-1), older], dim=-1)
        previous = torch.stack([layer.fp8_scale for layer in layers])
        updates = torch.stack([layer.fp8_updates for layer in layers])
        is_due = (updates % self.recipe.interval == 0).unsqueeze(-1)
        scales = torch.where(is_due, self._scales(history, previous), previous)
        foreach_copy_([layer.fp8_amax_history for layer in layers], list(history.unbind()))
        foreach_copy_([layer.fp8_scale for layer in layers], list(scales.unbind()))
        foreach_add_([layer.fp8_updates for layer in layers], 1)
        foreach_zero_([layer.fp8_forward_amax for layer in layers])
        foreach_zero_([layer.fp8_gradient_amax for layer in layers])

    @torch.no_grad()
    def synchronize(self) -> None:
        """Reduce the pending largest values over all processes, as the next forward pass would."""
        if not self.layers:
            return
        amax = self.group.reduce(self._pending())
        foreach_copy_([layer.fp8_forward_amax for layer in self.layers], list(amax[:, :2].unbind()))
        foreach_copy_([layer.fp8_gradient_amax for layer in self.layers], list(amax[:, 2].unbind()))

    def _pending(self) -> Tensor:
        """Return the pending largest values, of shape (layers, 3)."""
        forward = torch.stack([layer.fp8_forward_amax for layer in self.layers])
        gradient = torch.stack([layer.fp8_gradient_amax for layer in self.layers])
        return torch.cat([forward, gradient.unsqueeze(-1)], dim=-1)

    def _scales(self, history: Tensor, previous: Tensor) -> Tensor:
        """Return the scales of all layers; those of tensors without largest values stay.

        ``scale = largest / amax / 2**margin``, as in the delayed scaling of Transformer Engine:
        https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html
        """
        amax = history.amax(dim=-1) if self.recipe.amax_compute_algo == "max" else history[..., 0]
        precision = self.layers[0].precision
        dtypes = (precision.forward, precision.forward, precision.backward)
        largest = torch.tensor([BY_DTYPE[dtype].largest for dtype in dtypes], device=amax.device)
        return torch.where(amax > 0, largest / amax.clamp(min=SMALLEST_AMAX) * 2.0**-precision.margin, previous)


def scale_updates(model: nn.Module) -> Iterator[ScaleUpdate]:
    """Yield the ScaleUpdate hooks of a model and its submodules."""
    for module in model.modules():
        yield from (hook for hook in forward_pre_hooks(module).values() if isinstance(hook, ScaleUpdate))


def synchronize(model: nn.Module) -> None:
    """Reduce the largest values since the last forward pass over all processes.

    The next forward pass does the same. Call this on every process before one of them saves the state dict for all, so
    that training resumed from it is bit-for-bit equal to an uninterrupted run.

    Args:
        model: a model converted by the native back end; other models are not changed.
    """
    for update in scale_updates(model):
        update.synchronize()
