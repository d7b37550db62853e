"""Low-rank adapters of PEFT on layers that tensor parallelism shards.

An adapter adds ``up(down(x))`` to the output of its base layer, and is sharded like it. Where the base layer is
column-wise, ``up`` has the rows of the same outputs, and every rank computes ``down``. Where it is row-wise, ``down``
is row-wise too, and every rank computes ``up`` from the summed result. Forwards are PEFT's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import nn

from accel_state.errors import ConfigurationError

from .tp_layers import Columns, Rows, is_linear

BASE: Final = ".base_layer"
_UP: Final = ".lora_B."
_COPIES: Final = ".modules_to_save."


def copied(name: str, module: Any) -> list[tuple[str, Any]]:
    """Return the modules, with their names, that compute in the place of a module: itself, unless PEFT copied it.

    A module that is named in ``modules_to_save`` becomes the frozen original and a trained copy of each adapter.
    """
    if type(module).__name__ != "ModulesToSaveWrapper" or not type(module).__module__.startswith("peft."):
        return [(name, module)]
    copies = [(f"{name}{_COPIES}{adapter}", copy) for adapter, copy in module.modules_to_save.items()]
    return [(f"{name}.original_module", module.original_module), *copies]


def has_adapters(plan: Iterable[str]) -> bool:
    """Return True if a plan, of :func:`plan_with_adapters`, names layers of PEFT."""
    return any(name.endswith(BASE) or _COPIES in name for name in plan)


def is_adapted(module: Any) -> bool:
    """Return True if a module is a layer of PEFT with low-rank adapters."""
    named = hasattr(module, "base_layer") and hasattr(module, "lora_A") and hasattr(module, "lora_B")
    return named and any(cls.__module__.startswith("peft.") for cls in type(module).__mro__)


def base_of(module: Any) -> Any:
    """Return the layer that adapters are added to, or the module itself."""
    return module.base_layer if is_adapted(module) else module


def plan_with_adapters(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan with base layers and factors in the place of layers that have adapters.

    Raises:
        ConfigurationError: an adapter computes something else than a product with two factors.
    """
    modules = dict(model.named_modules())
    found: dict[str, Any] = {}
    for name, style in plan.items():
        module: Any = modules[name]
        if not is_adapted(module):
            found[name] = style
            continue
        _check(name, module, style)
        factor = "lora_B" if isinstance(style, Columns) else "lora_A"
        found[f"{name}{BASE}"] = style
        found.update({f"{name}.{factor}.{adapter}": style for adapter in getattr(module, factor)})
    return found


def _check(name: str, module: Any, style: Any) -> None:
    factors = [*module.lora_A.values(), *module.lora_B.values()]
    if not isinstance(style, (Columns, Rows)) or not all(map(is_linear, factors)):
        raise ConfigurationError(
            f"{name} has low-rank adapters, and tensor parallelism supports these on linear layers only, but the plan "
            f"shards it by {style!r}. Leave it out of target_modules, or shard by FSDP 2 (dp_shard_size)."
        )
    variants = sorted({type(variant).__name__ for variant in (getattr(module, "lora_variant", None) or {}).values()})
    if variants or getattr(module, "merged", False):
        what = f"adapters of the kind {', '.join(variants)}" if variants else "adapters that are merged into its weight"
        raise ConfigurationError(
            f"{name} has {what}, which have not been compared with one process under tensor parallelism. Use plain, "
            "unmerged LoRA, or shard by FSDP 2 (dp_shard_size)."
        )


def input_name(name: str) -> str | None:
    """Return the name of the layer that gets the input of a column-wise one; None if that input is its own.

    A base layer gets that of the layer with adapters. The second factor gets the output of the first one.
    """
    return None if _UP in name else name.removesuffix(BASE)
