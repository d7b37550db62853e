"""Modules that ZeRO stage 3 fetches as a whole."""

from __future__ import annotations

from typing import Any

from accel_state.errors import ConfigurationError, require


def mark(model: Any, names: str) -> None:
    """Mark the modules of some classes.

    Args:
        model: the model.
        names: class names, separated by commas.

    Raises:
        ConfigurationError: the model has no module of one of them.
        MissingDependencyError: DeepSpeed is not installed.
    """
    classes: dict[str, type[Any]] = {type(module).__name__: type(module) for module in model.modules()}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in classes:
            raise ConfigurationError(
                f"transformer_moe_cls_names={names!r}: {type(model).__name__} has no module of class {name}. Its classes: "
                f"{', '.join(sorted(classes))}."
            )
    utils = require("deepspeed.utils", purpose="ZeRO stage 3", install="accel[deepspeed]")
    utils.set_z3_leaf_modules(model, [classes[name] for name in wanted])
