"""Activation checkpointing: what a unit computed is computed again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn

from accel_state.errors import ConfigurationError


def checkpoint_units(model: nn.Module, units: Sequence[nn.Module], offload: bool) -> list[nn.Module]:
    """Put a checkpoint around each unit, in place.

    Units that have one already are left as they are.

    Args:
        model: the model that holds the units.
        units: the modules whose inputs alone are kept.
        offload: keep those in CPU memory.

    Returns:
        The wrappers, in the order of the units.

    Raises:
        ConfigurationError: there are no units.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
        offload_wrapper,
    )

    if not units:
        raise ConfigurationError(
            "activation_checkpointing works on the units of auto_wrap_policy, and there are none. Set "
            "auto_wrap_policy to "
            "transformer_based_wrap or size_based_wrap."
        )
    before = checkpoints_in(model)
    wanted = {id(unit) for unit in units} - set(before)
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: id(module) in wanted)
    wrappers = checkpoints_in(model)
    if offload:
        for place in wanted:
            wrappers[place] = _replace(model, wrappers[place], offload_wrapper)
    return [wrappers[id(unit)] for unit in units]


def checkpoints_in(model: nn.Module) -> dict[int, nn.Module]:
    """The outermost checkpoint around each module that has one, by the module's id."""
    direct = {
        id(inner): module
        for module in model.modules()
        if (inner := getattr(module, "_checkpoint_wrapped_module", None)) is not None
    }
    return {inner: direct.get(id(wrapper), wrapper) for inner, wrapper in direct.items()}


def _replace(
    model: nn.Module, old: nn.Module, wrap: functools.partial[nn.Module] | type[nn.Module] | object
) -> nn.Module:
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is old:
                new: nn.Module = wrap(old)  # type: ignore[operator]
                setattr(parent, name, new)
                return new
    return old
