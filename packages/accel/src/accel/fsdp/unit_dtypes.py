"""The dtypes of the parameters in a unit, which FSDP gathers or reduces together."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn

from accel_state import get_logger
from accel_state.errors import ConfigurationError

from .meta_init import own_parameters

logger: Final = get_logger(__name__)
Named = list[tuple[str, nn.Parameter]]
_RULE: Final = "fsdp_version=1 merges the parameters of a unit, which must have one dtype"


def parameters_of_units(
    model: nn.Module, owned: Iterable[Sequence[nn.Module]], untouched: set[nn.Parameter]
) -> list[Named]:
    """Return the parameters of each unit with their names, without those that are not sharded.

    Args:
        model: the model.
        owned: the modules of each unit, from :func:`accel.fsdp.wrap_policy.owned_by`.
        untouched: the parameters of ignored modules.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    units = [dict.fromkeys(own_parameters(list(modules)).values()) for modules in owned]
    return [[(names[item], item) for item in unit if item not in untouched] for unit in units]


def unify_dtypes(units: Iterable[Named], computes_in: torch.dtype | None) -> None:
    """Convert the parameters of each unit to its widest dtype, as FSDP 1 merges them into one flat parameter.

    Args:
        units: the parameters of each unit.
        computes_in: the dtype that parameters are gathered in; None for the one that they are stored in.

    Raises:
        ConfigurationError: a unit has several dtypes, and the conversion would change what is computed.
    """
    converted: list[str] = []
    for unit in units:
        dtypes = {parameter.dtype for _, parameter in unit}
        if len(dtypes) < 2:
            continue
        if any(getattr(parameter, "quant_state", None) is not None for _, parameter in unit):
            raise ConfigurationError(
                f"{_RULE}, and packed 4-bit weights cannot be converted, but {_examples(unit)}. Set fsdp_version=2 "
                "(--fsdp_version 2)."
            )
        if computes_in is None:
            raise ConfigurationError(
                f"{_RULE}, but {_examples(unit)}. Convert the model with model.to(dtype), set mixed_precision='bf16', "
                "which computes in one dtype, or set fsdp_version=2 (--fsdp_version 2) if all that is trained has one "
                "dtype."
            )
        widest = functools.reduce(torch.promote_types, dtypes)
        for name, parameter in unit:
            if parameter.dtype != widest:
                parameter.data = parameter.data.to(widest)
                converted.append(name)
    if converted:
        logger.warning(
            "Converted %d parameters (the first is %s) to the dtype of others in their unit, because fsdp_version=1 "
            "stores one dtype per unit. They still compute in %s, but take more memory and are saved in the wider "
            "dtype. Set fsdp_version=2 (--fsdp_version 2) to keep their dtypes.",
            len(converted),
            converted[0],
            computes_in,
            main_process_only=True,
        )


def check_requires_grad(units: Iterable[Named]) -> None:
    """Refuse units of FSDP 1 that are trained in part, where ``use_orig_params=False`` makes them one parameter.

    Raises:
        ConfigurationError: a unit has frozen and trainable parameters.
    """
    for unit in units:
        first = {parameter.requires_grad: name for name, parameter in reversed(unit)}
        if len(first) > 1:
            raise ConfigurationError(
                f"use_orig_params=False merges the parameters of a unit, but {first[False]} is frozen and "
                f"{first[True]} is trained. Set use_orig_params=True (--fsdp_use_orig_params true)."
            )


def check_trainable_dtypes(named: Named) -> None:
    """Refuse a unit whose gradients FSDP 2 cannot reduce together.

    Raises:
        ConfigurationError: trainable parameters of the unit have several dtypes.
    """
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if len({parameter.dtype for _, parameter in trainable}) > 1:
        raise ConfigurationError(
            "fsdp_version=2 reduces the gradients of a unit together, so its trainable parameters must have one dtype, "
            f"but {_examples(trainable)}. Convert the model with model.to(dtype) before it is prepared, or set "
            "mixed_precision='bf16', which keeps parameters in half precision that are trained as fp32."
        )


def _examples(parameters: Named) -> str:
    first: dict[Any, str] = {}
    for name, parameter in parameters:
        first.setdefault(parameter.dtype, name)
    return " and ".join(f"{name} is {dtype}" for dtype, name in first.items())
