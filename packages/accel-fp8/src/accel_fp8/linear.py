"""Linear layer of the native back end: weights in their original precision, products in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .autograd import LinearPrecision, RowwiseLinear, TensorwiseLinear
from .recipe import FP8Recipe
from .scaling import E4M3, E5M2, delayed_scale, largest_value, scale_for

# Indices of a layer's three tensors in its histories and scales.
INPUT, WEIGHT, GRADIENT = 0, 1, 2


class _Switch:
    """Whether converted layers compute in 8 bits; a class attribute, so that torch.compile guards on it."""

    on: ClassVar[bool] = True


@contextmanager
def high_precision(enabled: bool = True) -> Iterator[None]:
    """Context in which layers of the native back end compute as before their conversion.

    Args:
        enabled: False has no effect, so that a condition can be passed.
    """
    before = _Switch.on
    _Switch.on = before and not enabled
    try:
        yield
    finally:
        _Switch.on = before


class NativeLinear(nn.Linear):
    """A ``torch.nn.Linear`` whose products are computed in 8-bit floating point.

    :func:`convert_layer` changes the class of a linear layer, which stays the same object with the same parameters and
    hooks.

    Attributes:
        recipe: the FP8 settings.
        precision: dtypes of the layer's products.
        fp8_amax_history: with delayed scaling, float32 of shape (3, amax_history_len): the largest absolute values of
            input, weight and output gradient in recent forward passes, newest first.
        fp8_scale: float32 of shape (3,): factors of these three before rounding; 0 while unknown.
        fp8_forward_amax: float32 of shape (2,): largest values since the last update of the history.
        fp8_gradient_amax: float32 scalar: the same for the output gradient.
        fp8_updates: int64 scalar: number of updates of the history.
    """

    recipe: FP8Recipe
    precision: LinearPrecision
    fp8_amax_history: Tensor
    fp8_scale: Tensor
    fp8_forward_amax: Tensor
    fp8_gradient_amax: Tensor
    fp8_updates: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``, in the dtype of the surrounding autocast, or else in that of the input."""
        in_8_bits = _Switch.on and (self.training or self.recipe.use_autocast_during_eval)
        if not in_8_bits or not input.numel():
            return nn.functional.linear(input, self.weight, self.bias)
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        x = input.reshape(-1, self.in_features)
        if self.recipe.scaling == "rowwise":
            product: Tensor = RowwiseLinear.apply(x, self.weight, dtype, self.precision)
        else:
            product = self._tensorwise(x, dtype)
        product = product.view(*input.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias.to(dtype)

    def reset_parameters(self) -> None:
        """Initialise the weights and clear the histories, both of which are empty in a model from the meta device."""
        super().reset_parameters()
        for _, buffer in self._scaling_buffers():
            buffer.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the layer; histories and scales stay float32, because they need its range."""
        before = self._scaling_buffers()
        super()._apply(fn, recurse)
        for name, tensor in before:
            moved = getattr(self, name)
            if moved.dtype is not tensor.dtype:
                setattr(self, name, tensor.to(moved.device))
        return self

    def _scaling_buffers(self) -> list[tuple[str, Tensor]]:
        return [(name, buffer) for name, buffer in self.named_buffers(recurse=False) if name.startswith("fp8_")]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8_format={self.recipe.fp8_format}, scaling={self.recipe.scaling}"

    def _tensorwise(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        precision = self.precision
        amax_x, amax_weight = largest_value(x), largest_value(self.weight)
        if self.recipe.scaling == "dynamic":
            scale_x = scale_for(amax_x, precision.forward, precision.margin)
            scale_weight = scale_for(amax_weight, precision.forward, precision.margin)
            stored, pending = torch.zeros((), device=x.device), None
        else:
            # Cloned, because the scales may change between this forward pass and its backward pass.
            scales = self.fp8_scale.clone()
            scale_x = delayed_scale(scales[INPUT], amax_x, precision.forward, precision.margin)
            scale_weight = delayed_scale(scales[WEIGHT], amax_weight, precision.forward, precision.margin)
            stored, pending = scales[GRADIENT], self._record(amax_x, amax_weight)
        product: Tensor = TensorwiseLinear.apply(
            x, self.weight, scale_x, scale_weight, stored, pending, dtype, precision
        )
        return product

    def _record(self, amax_x: Tensor, amax_weight: Tensor) -> Tensor | None:
        """Record the largest values of a training step, and return the buffer for that of the gradient."""
        if not self.training or not torch.is_grad_enabled():
            return None
        with torch.no_grad():
            amax = torch.stack([amax_x, amax_weight])
            # An overflow must not enter the history, where it would affect many steps.
            finite = torch.where(torch.isfinite(amax), amax, 0.0)
            self.fp8_forward_amax.copy_(torch.maximum(self.fp8_forward_amax, finite))
        return self.fp8_gradient_amax


def convert_layer(layer: nn.Linear, recipe: FP8Recipe) -> NativeLinear:
    """Convert a linear layer, which must not be of a subclass, in place."""
    layer.__class__ = NativeLinear
    assert isinstance(layer, NativeLinear)
    layer.recipe = recipe
    backward = E4M3 if recipe.fp8_format == "E4M3" else E5M2
    delayed = recipe.scaling == "delayed"
    margin = recipe.margin if delayed else 0
    layer.precision = LinearPrecision(E4M3.dtype, backward.dtype, *recipe.override_linear_precision, margin=margin)
    if delayed:
        device = layer.weight.device
        layer.register_buffer("fp8_amax_history", torch.zeros(3, recipe.amax_history_len, device=device))
        layer.register_buffer("fp8_scale", torch.zeros(3, device=device))
        layer.register_buffer("fp8_forward_amax", torch.zeros(2, device=device))
        layer.register_buffer("fp8_gradient_amax", torch.zeros((), device=device))
        layer.register_buffer("fp8_updates", torch.zeros((), dtype=torch.int64, device=device))
    return layer


def restore_layer(layer: NativeLinear) -> nn.Linear:
    """Turn a converted layer back into a plain linear layer, in place."""
    for name, _ in layer._scaling_buffers():
        delattr(layer, name)
    del layer.recipe, layer.precision
    layer.__class__ = nn.Linear  # type: ignore[assignment]
    return layer
