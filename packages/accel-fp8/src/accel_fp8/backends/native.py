"""Native back end: torch's scaled matrix product, without further packages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from .._torch_compat import COMPILED_PREFIX, DDP_IGNORED, forward_pre_hooks
from ..delayed_scaling import AmaxGroup, ScaleUpdate, synchronize
from ..filters import layer_filter, linear_layers
from ..linear import NativeLinear, convert_layer, restore_layer
from ..matmul import computes_in_8_bits
from ..recipe import FP8Recipe
from .base import Backend


class NativeBackend(Backend):
    """Linear layers use the hardware's FP8 product, or compute the same numbers in a wider dtype."""

    name: ClassVar[str] = "native"

    def __init__(self, recipe: FP8Recipe, device: torch.device) -> None:
        super().__init__(recipe, device)
        self._refuse_pure_e5m2()

    @classmethod
    def merit(cls, device: torch.device) -> str | None:
        if computes_in_8_bits(device):
            return f"torch multiplies in 8 bits on {device.type}, and no other package is needed"
        return f"torch cannot multiply in 8 bits on {device.type}: results have 8-bit precision, without its speed"

    def convert(self, model: nn.Module, process_group: Any = None, sharded: bool = False) -> nn.Module:
        return convert_to_native(model, self.recipe, process_group)

    def synchronize(self, model: nn.Module) -> None:
        synchronize(model)


def convert_to_native(
    model: nn.Module, recipe: FP8Recipe | None = None, process_group: Any = None, reduce_amax: bool = True
) -> nn.Module:
    """Convert the linear layers of a model to the native back end, in place.

    The layers keep their weights, names and hooks. Delayed scaling adds buffers, which are in the state dict. Convert
    before wrapping (DDP, FSDP) and before compiling.

    Args:
        model: the whole model.
        recipe: FP8 settings.
        process_group: the data-parallel process group, over which largest values are reduced; defaults to all
            processes.
        reduce_amax: False lets every process use its own scales.

    Returns:
        The given model.

    Raises:
        ConfigurationError: the model is already converted with other settings.
    """
    recipe = recipe or FP8Recipe(backend="native")
    accepts = layer_filter(model, recipe.module_filter_func)
    # The filter is not needed after conversion, and often cannot be pickled with the model.
    recipe = replace(recipe, module_filter_func=None)
    linears = list(linear_layers(model))
    existing = [layer.recipe for _, layer in linears if isinstance(layer, NativeLinear)]
    if existing:
        conflicts = [other for other in existing if other != recipe]
        if conflicts:
            raise ConfigurationError(
                f"the model is converted already, with {conflicts[0]}. Call restore_native(model) before converting it "
                f"with {recipe}."
            )
        return model
    selected = [layer for name, layer in linears if type(layer) is nn.Linear and accepts(layer, name)]
    converted = [convert_layer(layer, recipe) for layer in selected]
    if converted and recipe.scaling == "delayed":
        model.register_forward_pre_hook(ScaleUpdate(converted, recipe, AmaxGroup(process_group, reduce_amax)))
        # DDP would broadcast rank 0's histories before each forward pass, and lose those of the other ranks.
        setattr(model, DDP_IGNORED, [*getattr(model, DDP_IGNORED, []), *_buffer_names(model)])
    return model


def restore_native(model: nn.Module) -> nn.Module:
    """Undo :func:`convert_to_native`, in place. Weights do not change."""
    for module in model.modules():
        hooks = forward_pre_hooks(module)
        for key in [key for key, hook in hooks.items() if isinstance(hook, ScaleUpdate)]:
            del hooks[key]
            names = _buffer_names(module)
            setattr(module, DDP_IGNORED, [name for name in getattr(module, DDP_IGNORED, []) if name not in names])
        if isinstance(module, NativeLinear):
            restore_layer(module)
    return model


def has_native_layers(model: nn.Module) -> bool:
    """Return True if a layer of a model belongs to the native back end."""
    return any(isinstance(module, NativeLinear) for module in model.modules())


def _buffer_names(model: nn.Module) -> set[str]:
    """Return the names of FP8 buffers, as seen by DDP around the model and around ``torch.compile(model)``."""
    names = {name for name, _ in model.named_buffers() if name.rpartition(".")[2].startswith("fp8_")}
    return names | {COMPILED_PREFIX + name for name in names}
