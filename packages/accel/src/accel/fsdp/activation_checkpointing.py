"""Activation checkpointing: the activations of a unit are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from accel_state.errors import ConfigurationError

from .._torch_compat import checkpoint_wrappers, checkpointed_module


def checkpoint_units(model: nn.Module, units: Sequence[nn.Module], offload: bool) -> None:
    """Wrap each unit in a checkpoint, in place; units that have one already stay as they are."""
    if not units:
        raise ConfigurationError(
            "activation_checkpointing wraps the units of auto_wrap_policy, and there are none. Set auto_wrap_policy to "
            "transformer_based_wrap or size_based_wrap."
        )
    apply, checkpoint_wrapper, offload_wrapper = checkpoint_wrappers()
    chosen = {id(unit) for unit in units} - set(checkpoints_in(model))

    def wrap(module: nn.Module) -> nn.Module:
        wrapped = checkpoint_wrapper(module)
        return offload_wrapper(wrapped) if offload else wrapped

    apply(model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: id(module) in chosen)


def checkpoints_in(model: nn.Module) -> dict[int, nn.Module]:
    """The outermost checkpoint around each module that has one, by the module's id."""
    direct = {}
    for module in model.modules():
        inner = checkpointed_module(module)
        if inner is not None:
            direct[id(inner)] = module
    return {inner: direct.get(id(wrapper), wrapper) for inner, wrapper in direct.items()}
