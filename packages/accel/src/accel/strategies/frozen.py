"""Parameters of ``fully_shard`` that are frozen when their model is wrapped, and trained later."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .._torch_compat import choose_gradient_dtypes, forms_of_parameter, fsdp2_groups
from ..core.unwrap import clean_name
from ..fsdp.unit_dtypes import check_trainable_dtypes


def follow_requires_grad(model: nn.Module) -> None:
    """Let ``requires_grad`` be changed between steps, whatever form the parameters of a sharded model have then.

    After a forward pass without a backward one (an evaluation), units that are not freed after it have gathered
    parameters in the place of the sharded ones. A change of those would last for a step, or not even that: torch copies
    the flag of the sharded parameter at the next gathering.
    """
    groups = list(fsdp2_groups(model))
    trainable = {holder: bool(holder.sharded_param.requires_grad) for group in groups for holder in group.fsdp_params}
    if trainable:
        carry_over = torch.compiler.disable(partial(_carry_over, groups, trainable))
        model.register_forward_pre_hook(carry_over, prepend=True)


def _carry_over(groups: Sequence[Any], trainable: dict[Any, bool], module: nn.Module, inputs: Any) -> None:
    """Give all forms of a parameter its changed flag; ``trainable`` has those of the last forward pass."""
    thawed = []
    for group in groups:
        for holder in group.fsdp_params:
            flag, forms = trainable[holder], forms_of_parameter(holder)
            if all(parameter.requires_grad == flag for parameter in forms):
                continue
            trainable[holder] = not flag
            for parameter in forms:
                parameter.requires_grad_(not flag)
            if not flag and group not in thawed:
                thawed.append(group)
    names = {parameter: clean_name(name) for name, parameter in module.named_parameters()} if thawed else {}
    for group in thawed:
        named = []
        for holder in group.fsdp_params:
            name = next(names[form] for form in forms_of_parameter(holder) if form in names)
            named.append((name, holder.sharded_param))
        check_trainable_dtypes(named)
        choose_gradient_dtypes(group)
