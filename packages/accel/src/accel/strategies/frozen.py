"""Parameters that are frozen when their model is wrapped, and trained later."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from .._torch_compat import choose_gradient_dtypes, forms_of_parameter, fsdp2_groups
from ..core.unwrap import clean_name
from ..fsdp.unit_dtypes import check_trainable_dtypes


class FrozenParameters:
    """For wrappers that synchronise only the gradients of parameters that were trainable when they were created."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, list[tuple[str, nn.Parameter]]] = weakref.WeakKeyDictionary()

    def remember(self, wrapped: nn.Module, model: nn.Module) -> None:
        """Remember the parameters of a model that are frozen now."""
        frozen = [(name, item) for name, item in model.named_parameters() if not item.requires_grad]
        if frozen:
            self._of[wrapped] = frozen

    def check(self, strategy: str) -> None:
        """Refuse to train them, before a backward pass whose gradients are synchronised.

        Raises:
            ConfigurationError: a parameter that was frozen is trainable now.
        """
        for model, frozen in self._of.items():
            if not getattr(model, "require_backward_grad_sync", True):
                continue
            name = next((name for name, parameter in frozen if parameter.requires_grad), None)
            if name is not None:
                raise ConfigurationError(
                    f"{name} was frozen when its {type(model).__name__} was prepared and is trainable now, but "
                    f"{strategy} would not synchronise its gradients. Use FSDP 2 or DDP, which take parameters that "
                    "are trained later."
                )


class _Flag:
    """Whether a parameter of ``fully_shard`` was trainable in the last forward pass."""

    def __init__(self, group: Any, holder: Any) -> None:
        self.group, self.holder, self.value = group, holder, bool(holder.sharded_param.requires_grad)


def follow_requires_grad(model: nn.Module) -> None:
    """Let ``requires_grad`` be changed between steps, whatever form the parameters of a sharded model have then.

    After a forward pass without a backward one (an evaluation), units that are not freed after it have gathered
    parameters in the place of the sharded ones. A change of those would last for a step, or not even that: torch copies
    the flag of the sharded parameter at the next gathering.
    """
    flags = [_Flag(group, holder) for group in fsdp2_groups(model) for holder in group.fsdp_params]
    if flags:
        model.register_forward_pre_hook(torch.compiler.disable(partial(_carry_over, flags)), prepend=True)


def _carry_over(flags: list[_Flag], module: nn.Module, inputs: Any) -> None:
    changed = {}
    for flag in flags:
        forms = forms_of_parameter(flag.holder)
        if all(parameter.requires_grad == flag.value for parameter in forms):
            continue
        flag.value = not flag.value
        for parameter in forms:
            parameter.requires_grad_(flag.value)
        if flag.value:
            changed[id(flag.group)] = flag.group
    names = {parameter: name for name, parameter in module.named_parameters()} if changed else {}
    for group in changed.values():
        check_trainable_dtypes([_named(holder, names) for holder in group.fsdp_params])
        choose_gradient_dtypes(group)


def _named(holder: Any, names: dict[nn.Parameter, str]) -> tuple[str, nn.Parameter]:
    found = next(names[form] for form in forms_of_parameter(holder) if form in names)
    return clean_name(found), holder.sharded_param
