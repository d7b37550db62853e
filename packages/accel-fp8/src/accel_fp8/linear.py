"""The linear layer of the native back end: float32 (or 16-bit) weights, products in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .autograd import Plan, RowwiseLinear, TensorwiseLinear
from .formats import E4M3, E5M2
from .recipe import FP8Recipe
from .scaling import delayed_scale, largest_value, scale_for

INPUT, WEIGHT, GRADIENT = 0, 1, 2
"""Places of the three tensors of a layer in its histories and scales."""


class _Switch:
    """Whether converted layers compute in 8 bits. A plain attribute: torch.compile guards on it, and compiles each side
    once.
    """

    on: ClassVar[bool] = True


@contextmanager
def high_precision(enabled: bool = True) -> Iterator[None]:
    """A block in which layers of the native back end compute as they did before their conversion.

    Args:
        enabled: False leaves them in 8 bits, so that a condition can be passed.
    """
    before = _Switch.on
    _Switch.on = before and not enabled
    try:
        yield
    finally:
        _Switch.on = before


class NativeLinear(nn.Linear):
    """A ``torch.nn.Linear`` whose products are computed in 8-bit floating point.

    Made from a linear layer by :func:`convert_layer`: it stays the same object, with the same parameters and hooks.

    Attributes:
        recipe: what is computed, and how.
        fp8_amax_history: with delayed scaling, float32 of shape (3, amax_history_len): the largest absolute values of
            inputs, weight and output gradients in the last forward passes, the newest first.
        fp8_scale: float32 of shape (3,): what the three are multiplied by before they are rounded; 0 where none is
            known yet.
        fp8_forward_amax: float32 of shape (2,): the largest values since the history was last written.
        fp8_gradient_amax: float32 scalar, likewise.
        fp8_updates: int64 scalar: how often the history was written.
    """

    recipe: FP8Recipe
    fp8_amax_history: Tensor
    fp8_scale: Tensor
    fp8_forward_amax: Tensor
    fp8_gradient_amax: Tensor
    fp8_updates: Tensor
    _plan: Plan

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``, in the type of the surrounding autocast, or else in that of the input."""
        if not self._computes_in_8_bits() or not input.numel():
            return nn.functional.linear(input, self.weight, self.bias)
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        x = input.reshape(-1, self.in_features)
        product = self._rowwise(x, dtype) if self.recipe.scaling == "rowwise" else self._tensorwise(x, dtype)
        product = product.view(*input.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias.to(dtype)

    def reset_parameters(self) -> None:
        """Initialise the weights, and forget the histories: both hold nothing yet where a model comes from the meta
        device.
        """
        super().reset_parameters()
        for name in self._scaling_buffers():
            getattr(self, name).zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move, or change the type of the weights; histories and scales stay float32, which has the range that they
        need.
        """
        before = {name: getattr(self, name) for name in self._scaling_buffers()}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            moved = getattr(self, name)
            if moved.dtype is not tensor.dtype:
                setattr(self, name, tensor.to(moved.device))
        return self

    def _scaling_buffers(self) -> list[str]:
        return [name for name in self._buffers if name.startswith("fp8_")]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8_format={self.recipe.fp8_format}, scaling={self.recipe.scaling}"

    def _computes_in_8_bits(self) -> bool:
        return _Switch.on and (self.training or self.recipe.use_autocast_during_eval)

    def _rowwise(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        product: Tensor = RowwiseLinear.apply(x, self.weight, dtype, self._plan)
        return product

    def _tensorwise(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        plan = self._plan
        amax_x, amax_weight = largest_value(x), largest_value(self.weight)
        if self.recipe.scaling == "dynamic":
            scale_x = scale_for(amax_x, plan.forward, plan.margin)
            scale_weight = scale_for(amax_weight, plan.forward, plan.margin)
            stored, pending = torch.zeros((), device=x.device), None
        else:
            # A copy: the scales may change between this forward pass and its backward pass.
            scales = self.fp8_scale.clone()
            scale_x = delayed_scale(scales[INPUT], amax_x, plan.forward, plan.margin)
            scale_weight = delayed_scale(scales[WEIGHT], amax_weight, plan.forward, plan.margin)
            stored, pending = scales[GRADIENT], self._record(amax_x, amax_weight)
        product: Tensor = TensorwiseLinear.apply(x, self.weight, scale_x, scale_weight, stored, pending, dtype, plan)
        return product

    def _record(self, amax_x: Tensor, amax_weight: Tensor) -> Tensor | None:
        """Remember the largest values of a training step, and return what takes that of the gradient."""
        if not self.training or not torch.is_grad_enabled():
            return None
        with torch.no_grad():
            seen = torch.stack([amax_x, amax_weight])
            # An overflow must not stay in the history, where it would spoil many steps.
            finite = torch.where(torch.isfinite(seen), seen, 0.0)
            self.fp8_forward_amax.copy_(torch.maximum(self.fp8_forward_amax, finite))
        return self.fp8_gradient_amax


def convert_layer(layer: nn.Linear, recipe: FP8Recipe) -> NativeLinear:
    """Let a linear layer compute in 8 bits, in place.

    Args:
        layer: exactly a ``torch.nn.Linear``.
        recipe: what is computed, and how.
    """
    layer.__class__ = NativeLinear
    assert isinstance(layer, NativeLinear)
    layer.recipe = recipe
    backward = E4M3 if recipe.fp8_format == "E4M3" else E5M2
    delayed = recipe.scaling == "delayed"
    layer._plan = Plan(
        E4M3.dtype, backward.dtype, *recipe.override_linear_precision, margin=recipe.margin if delayed else 0
    )
    if delayed:
        device = layer.weight.device
        layer.register_buffer("fp8_amax_history", torch.zeros(3, recipe.amax_history_len, device=device))
        layer.register_buffer("fp8_scale", torch.zeros(3, device=device))
        layer.register_buffer("fp8_forward_amax", torch.zeros(2, device=device))
        layer.register_buffer("fp8_gradient_amax", torch.zeros((), device=device))
        layer.register_buffer("fp8_updates", torch.zeros((), dtype=torch.int64, device=device))
    return layer


def restore_layer(layer: NativeLinear) -> nn.Linear:
    """Make a converted layer the plain linear layer it was, in place."""
    for name in layer._scaling_buffers():
        delattr(layer, name)
    del layer.recipe, layer._plan
    layer.__class__ = nn.Linear  # type: ignore[assignment]
    return layer
