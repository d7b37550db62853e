"""Which submodules are gathered and freed together: the units of a sharded model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from accel_state.errors import ConfigurationError

logger = logging.getLogger(__name__)

POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")


def find_units(model: nn.Module, policy: Any, ignored: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """The submodules that a policy makes units of their own, inner ones first; the model itself is not among them.

    Args:
        model: the whole model, not sharded yet.
        policy: None; a policy object of torch (``ModuleWrapPolicy``, ``CustomPolicy``); or a function of torch's form
            ``policy(module, recurse, nonwrapped_numel)``.
        ignored: modules that stay whole, with all in them.
    """
    if policy is None:
        return []
    skipped = {id(inner) for module in ignored for inner in module.modules()}
    if hasattr(policy, "_run_policy"):
        chosen = {id(module) for module in policy._run_policy(model, set(ignored), {})}
    else:
        chosen = set()
        _ask(model, policy, skipped, chosen)
    # Children come before their parents, as sharding needs it.
    units = [module for module in _bottom_up(model) if id(module) in chosen - skipped and module is not model]
    return _with_whole_ties(model, units)


def _bottom_up(model: nn.Module) -> list[nn.Module]:
    return list(model.modules())[::-1]


def _ask(module: nn.Module, policy: Callable[..., bool], skipped: set[int], chosen: set[int]) -> int:
    """Ask a policy function about a module and all in it; returns the number of parameter elements that are now in
    units.
    """
    own = {id(parameter): parameter.numel() for parameter in module.parameters()}
    total = sum(own.values())
    if id(module) in skipped or not policy(module=module, recurse=True, nonwrapped_numel=total):
        return 0
    wrapped = sum(_ask(child, policy, skipped, chosen) for child in module.children())
    if policy(module=module, recurse=False, nonwrapped_numel=total - wrapped):
        chosen.add(id(module))
        return total
    return wrapped


def _with_whole_ties(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Drop units that share a parameter with what is outside of them: sharded apart, tied weights would drift apart."""
    while (torn := _torn(model, units)) is not None:
        unit, names = torn
        logger.info(
            "A %s is no unit of its own: it shares %s with another part of the model.", type(unit).__name__, names
        )
        units = [other for other in units if other is not unit]
    return units


def _torn(model: nn.Module, units: list[nn.Module]) -> tuple[nn.Module, str] | None:
    holders: dict[int, set[int]] = {}
    for place, modules in enumerate(owned_by(model, units)):
        for parameter in (parameter for module in modules for parameter in module.parameters(recurse=False)):
            holders.setdefault(id(parameter), set()).add(place)
    for name, parameter in model.named_parameters():
        if len(holders[id(parameter)]) > 1:
            return units[min(holders[id(parameter)])], name
    return None


def owned_by(model: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The modules of each unit that are in no inner unit, and at the end those of the model that are in none."""
    places = {id(unit): place for place, unit in enumerate(units)}
    owned: list[list[nn.Module]] = [[] for _ in [*units, model]]
    seen: set[int] = set()

    def visit(module: nn.Module, place: int) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        place = places.get(id(module), place)
        owned[place].append(module)
        for child in module.children():
            visit(child, place)

    visit(model, len(units))
    return owned


def transformer_policy(model: nn.Module, names: Sequence[str] | None) -> Callable[..., bool]:
    """A policy that makes a unit of every module of the named classes.

    Args:
        model: the model; where no names are given, its ``_no_split_modules`` (as Transformers models have) are taken.
        names: class names, such as "LlamaDecoderLayer".

    Raises:
        ConfigurationError: there are no names, or the model has no module of a class of that name.
    """
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    wanted = list(names) if names else list(getattr(model, "_no_split_modules", None) or ())
    if not wanted:
        raise ConfigurationError(
            f"transformer_based_wrap needs the class names of the model's blocks, and {type(model).__name__} names "
            "none in "
            "_no_split_modules. Set transformer_cls_names_to_wrap (--fsdp_transformer_layer_cls_to_wrap), such as "
            "BertLayer."
        )
    classes = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in wanted if name not in classes]
    # A list of the model's own may name blocks of its relatives.
    if missing and (names or len(missing) == len(wanted)):
        raise ConfigurationError(
            f"transformer_cls_names_to_wrap: {type(model).__name__} has no module of class {', '.join(missing)}. Its "
            "classes: "
            f"{', '.join(sorted(classes))}."
        )
    found = {classes[name] for name in wanted if name in classes}
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=found)


def size_policy(min_num_params: int) -> Callable[..., bool]:
    """A policy that makes units of at least so many parameter elements."""
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    return functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
