"""Which modules are run whole: the parts between which a model can be split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from torch import nn

from accel_state.errors import ConfigurationError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def choose_units(model: nn.Module, whole: Collection[str], split_points: Sequence[str]) -> dict[str, nn.Module]:
    """The outermost modules that are of a class in ``whole``, or have no children, by name.

    Args:
        model: the model.
        whole: names of classes whose instances are not split.
        split_points: names of modules at which a stage begins; a module that holds one is split in any case.

    Raises:
        ConfigurationError: a split point is not the name of a submodule.
    """
    for name in split_points:
        _check_name(model, name)
    units: dict[str, nn.Module] = {}
    _visit(model, "", frozenset(whole), split_points, units)
    return units


def repeated_blocks(model: nn.Module) -> set[str]:
    """Classes of the modules that a list or sequence holds several of: the layers of most models."""
    found: set[str] = set()
    for module in model.modules():
        if isinstance(module, (*_CONTAINERS, nn.Sequential)):
            counts = Counter(
                type(child).__name__ for child in module.children() if next(child.children(), None) is not None
            )
            found |= {name for name, count in counts.items() if count > 1}
    return found


def declared_blocks(model: nn.Module) -> set[str]:
    """Classes that the model itself declares not to be split (``_no_split_modules``, the convention of transformers)."""
    return {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}


def _visit(
    module: nn.Module, name: str, whole: frozenset[str], split_points: Sequence[str], units: dict[str, nn.Module]
) -> None:
    holds_split_point = any(point.startswith(f"{name}.") for point in split_points) or not name
    children = list(module.named_children())
    if (
        not holds_split_point
        and (type(module).__name__ in whole or not children)
        and not isinstance(module, _CONTAINERS)
    ):
        # A module that is registered under several names is one unit.
        if all(known is not module for known in units.values()):
            units[name] = module
        return
    for child_name, child in children:
        _visit(child, f"{name}.{child_name}" if name else child_name, whole, split_points, units)


def _check_name(model: nn.Module, name: str) -> None:
    known = [known for known, _ in model.named_modules() if known]
    if name in known:
        return
    try:
        model.get_submodule(name)
    except AttributeError:
        raise ConfigurationError(
            f"split_points names {name!r}, which is no submodule of {type(model).__name__}. Its submodules are "
            f"{', '.join(known[:12])}{', ...' if len(known) > 12 else ''}; print(model) shows all of them."
        ) from None
