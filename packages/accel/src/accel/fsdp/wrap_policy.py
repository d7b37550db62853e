"""Which submodules are gathered and freed together: the units of a sharded model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from torch import nn

from accel_state.errors import ConfigurationError

from .._torch_compat import run_wrap_policy

logger: Final = logging.getLogger(__name__)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # which have no forward


def find_units(model: nn.Module, policy: Any, ignored: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """Return the submodules that a policy makes units of their own, inner ones first, without the model itself."""
    if policy is None:
        return []
    skipped = {id(inner) for module in ignored for inner in module.modules()}
    modules = run_wrap_policy(policy, model, ignored)
    chosen: set[int] = set() if modules is None else {id(module) for module in modules}
    if modules is None:
        _apply_policy(model, policy, skipped, chosen)
    # Sharding needs children before their parents.
    candidates = list(model.modules())[::-1]
    units = [module for module in candidates if id(module) in chosen - skipped and module is not model]
    while (torn := _find_torn(model, units)) is not None:
        unit, name = torn
        logger.info(
            "A %s does not become a unit: it shares %s with another part of the model.", type(unit).__name__, name
        )
        units = [other for other in units if other is not unit]
    return units


def _apply_policy(module: nn.Module, policy: Callable[..., bool], skipped: set[int], chosen: set[int]) -> int:
    """Apply a policy function to a module and its submodules; returns how many parameter elements are in units now."""
    total = sum(parameter.numel() for parameter in module.parameters())
    if id(module) in skipped or not policy(module=module, recurse=True, nonwrapped_numel=total):
        return 0
    wrapped = sum(_apply_policy(child, policy, skipped, chosen) for child in module.children())
    if policy(module=module, recurse=False, nonwrapped_numel=total - wrapped):
        chosen.add(id(module))
        return total
    return wrapped


def _find_torn(model: nn.Module, units: list[nn.Module]) -> tuple[nn.Module, str] | None:
    """Return a unit that shares a parameter with another part: sharded apart, tied weights would diverge."""
    holders: dict[int, set[int]] = {}
    for index, modules in enumerate(owned_by(model, units)):
        for module in modules:
            for parameter in module.parameters(recurse=False):
                holders.setdefault(id(parameter), set()).add(index)
    for name, parameter in model.named_parameters():
        if len(holders[id(parameter)]) > 1:
            return units[min(holders[id(parameter)])], name
    return None


def owned_by(model: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return the modules of each unit outside its inner units, and at the end the model's outside all units."""
    indices = {id(unit): index for index, unit in enumerate(units)}
    owned: list[list[nn.Module]] = [[] for _ in [*units, model]]
    seen: set[int] = set()

    def visit(module: nn.Module, index: int) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        index = indices.get(id(module), index)
        owned[index].append(module)
        for child in module.children():
            visit(child, index)

    visit(model, len(units))
    return owned


def transformer_policy(
    model: nn.Module,
    names: Sequence[str] | None,
    setting: str = "transformer_cls_names_to_wrap (--fsdp_transformer_layer_cls_to_wrap)",
) -> Callable[..., bool]:
    """Return a policy that makes every module of the named classes a unit.

    ``setting`` is what names them, for messages.
    """
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    wanted = list(names) if names else list(getattr(model, "_no_split_modules", None) or ())
    if not wanted:
        raise ConfigurationError(
            f"the class names of the model's blocks are needed, but {type(model).__name__} has no _no_split_modules. "
            f"Set {setting}{_blocks_hint(model)}."
        )
    classes = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in wanted if name not in classes]
    # The model's own list may name blocks of related models.
    if missing and (names or len(missing) == len(wanted)):
        raise ConfigurationError(
            f"{setting}: {type(model).__name__} has no module of class {', '.join(missing)}. Set it"
            f"{_blocks_hint(model)}. The classes of the model: {', '.join(sorted(classes))}."
        )
    # A name may stand for several classes: torch and accel derive classes of the same name.
    layer_classes = {type(module) for module in model.modules() if type(module).__name__ in wanted}
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layer_classes)


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the class names of the model's repeated blocks, largest first: siblings of one class with children."""
    sizes: dict[str, int] = {}
    for parent in model.modules():
        counts: dict[type, list[nn.Module]] = {}
        for child in parent.children():
            counts.setdefault(type(child), []).append(child)
        for kind, children in counts.items():
            is_block = any(True for _ in children[0].children()) and not isinstance(children[0], _CONTAINERS)
            if len(children) > 1 and is_block:
                size = sum(parameter.numel() for child in children for parameter in child.parameters())
                sizes[kind.__name__] = max(size, sizes.get(kind.__name__, 0))
    return sorted((name for name, size in sizes.items() if size), key=lambda name: -sizes[name])


def _blocks_hint(model: nn.Module) -> str:
    blocks = repeated_blocks(model)
    return f" to {blocks[0]}, which the model repeats" if blocks else " to the class of the model's largest layers"
