"""Names of packages that an extra installs, imported when first used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

from accel_state.errors import require

_NAMES = {
    "accel_megatron": (
        "AbstractTrainStep",
        "BertTrainStep",
        "GPTTrainStep",
        "MegatronLMDummyDataLoader",
        "MegatronLMDummyScheduler",
        "MegatronLMPlugin",
        "T5TrainStep",
        "avg_losses_across_data_parallel_group",
        "gather_across_data_parallel_groups",
    ),
    "accel_quant": (
        "BnbQuantizationConfig",
        "get_keys_to_not_convert",
        "has_4bit_bnb_layers",
        "load_and_quantize_model",
        "replace_with_bnb_layers",
    ),
}


def names_of_extra(module: str, package: str, extra: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` for the names of a package, whose absence is an error that names the extra."""

    def get(name: str) -> Any:
        if name not in _NAMES[package]:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(require(package, purpose=f"accel.utils.{name}", install=f"accel[{extra}]"), name)

    return get


def without_missing_extras(names: Iterable[str]) -> list[str]:
    """Return the names that can be imported, for a star import, which must work without the extras."""
    missing = {name for package, found in _NAMES.items() if find_spec(package) is None for name in found}
    return [name for name in names if name not in missing]
