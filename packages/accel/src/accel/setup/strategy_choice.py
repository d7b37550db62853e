"""Which strategy trains, by what the script and the launcher ask for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

from accel_state import AcceleratorState, ConfigurationError, PartialState, get_logger
from accel_state.errors import ArgumentTypeError
from accel_state.options import ParadigmOptions

from ..contract.strategy import Strategy
from ..kwargs.base import Handlers
from .registry import FAMILIES, PLUGINS, STRATEGIES

logger: Final = get_logger(__name__)


def choose(plugins: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the script or the launcher asks for, or else what another Accelerator of this process uses.

    Args:
        plugins: the settings passed to the Accelerator, by family; None where there are none.

    Returns:
        The settings (a plugin, or several by name) by family, those of the leading one first. Without any, the device
        and the number of processes decide.

    Raises:
        ConfigurationError: script and launcher contradict each other, or settings cannot be combined.
    """
    given = [name for name, settings in plugins.items() if settings is not None]
    asked = _agreed(given, launched_families()) or _in_use()
    conflict = _conflict(asked)
    if conflict:
        raise ConfigurationError(
            f"settings were given for {', '.join(asked)}, but {' and '.join(conflict)} do not combine: one strategy "
            "trains a model. Pass the settings of one of them."
        )
    return {name: _settings_of(name, plugins.get(name)) for name in FAMILIES if name in asked}


def launched_families() -> list[str]:
    """The families that the launcher asks for in this process's environment."""
    launched = ParadigmOptions.from_environment()
    by_switch = {family.switch: name for name, family in FAMILIES.items() if family.switch}
    names = []
    for option in ParadigmOptions.options():
        if not getattr(launched, option.field):
            continue
        name = by_switch[option.name]
        names.append(name)
        if name not in STRATEGIES and name not in PLUGINS:
            raise ConfigurationError(
                f"environment variable {option.env}=true requests the strategy {name}, which is not installed. "
                f"Installed: {', '.join(STRATEGIES)}. Launch without {option.flags[0]} (or distributed_type in the "
                f"configuration file), or install it: pip install 'accel[{name}]'."
            )
    return names


def _agreed(given: list[str], launched: list[str]) -> list[str]:
    """What the script passes, with what the launcher adds to it, such as the sizes of a mesh or replicas."""
    both = list(dict.fromkeys([*given, *launched]))
    if not _conflict(both):
        return both
    if given and launched and not set(given) & set(launched):
        raise ConfigurationError(
            f"the script passes settings for {', '.join(given)}, but was launched for {', '.join(launched)} "
            "(environment variables ACCELERATE_USE_...). Remove the settings, or launch it for the same strategy."
        )
    return given or launched


def _conflict(names: list[str]) -> tuple[str, str] | None:
    """Two families that cannot be given together."""
    for first, second in itertools.combinations(names, 2):
        if second not in FAMILIES[first].combines_with:
            return first, second
    return None


def _in_use() -> list[str]:
    """What another Accelerator of this process uses, which one without settings shares."""
    shared = AcceleratorState._shared_state
    found = [name for name, family in FAMILIES.items() if shared.get(family.attribute) is not None]
    return [name for name in found if name == found[0] or name in FAMILIES[found[0]].combines_with]


def attribute_of(name: str) -> str:
    """The attribute of :class:`AcceleratorState` that holds the settings of a family, or of a strategy of that name."""
    return FAMILIES[name].attribute if name in FAMILIES else f"{name}_plugin"


def _settings_of(name: str, settings: Any) -> Any:
    """The settings of a family: those given, those in use, or by default the launcher's."""
    if name not in PLUGINS:
        return settings
    family, kind = FAMILIES[name], PLUGINS.load(name)
    if settings is None:
        in_use = AcceleratorState._shared_state.get(family.attribute)
        return kind() if in_use is None else in_use
    plugins = list(settings.values()) if isinstance(settings, dict) and name == "deepspeed" else [settings]
    if not plugins or not all(isinstance(plugin, kind) for plugin in plugins):
        raise ArgumentTypeError(f"{family.argument}={settings!r} must be a {kind.__name__}. Pass one, or leave it out.")
    return settings


def check_strategy(strategy: Any, plugins: Mapping[str, Any]) -> None:
    """Check the argument ``strategy``."""
    given = [name for name, settings in plugins.items() if settings is not None]
    if given:
        raise ConfigurationError(
            f"strategy={strategy!r} contradicts the settings given for {', '.join(given)}. Pass the strategy or the "
            "plugin; a strategy object takes its settings in its constructor."
        )
    if isinstance(strategy, str):
        STRATEGIES.target(strategy)
    elif not isinstance(strategy, Strategy):
        raise ConfigurationError(
            f"strategy={strategy!r} must be an accel.contract.strategy.Strategy object or one of "
            f"{', '.join(STRATEGIES.names())}."
        )


def attach_strategy(strategy: Strategy | str, process: PartialState, handlers: Handlers) -> Strategy:
    """The strategy that the argument ``strategy`` names or is, on this process's device."""
    kind = STRATEGIES.load(strategy) if isinstance(strategy, str) else type(strategy)
    if not process.use_distributed and not kind.supports_single_process:
        return _without(strategy if isinstance(strategy, str) else kind.__name__, process, handlers)
    if isinstance(strategy, Strategy):
        strategy.attach(process, handlers)
        return strategy
    return kind(process, handlers)


def _without(name: str, process: PartialState, handlers: Handlers) -> Strategy:
    logger.warning(
        "%s trains a model over several processes, and there is only one: the model is trained without it. Start "
        "several: `accel launch --num_processes N`.",
        name,
    )
    return STRATEGIES.load("single")(process, handlers)


def make_strategy(chosen: Mapping[str, Any], process: PartialState, handlers: Handlers) -> Strategy:
    """Return the strategy for what :func:`choose` returned, on this process's device."""
    device = process.device_backend
    if not chosen:
        data_parallel = "ddp" if process.use_distributed else "single"
        return STRATEGIES.load(device.strategy or data_parallel)(process, handlers)
    name = next(iter(chosen))
    combined = dict(chosen)
    settings = combined.pop(name)
    if FAMILIES[name].replaceable and device.sharded_strategy is not None:
        return STRATEGIES.load(device.sharded_strategy)(process, handlers, settings, **combined)
    if device.strategy is not None:
        available = sorted(family for family, entry in FAMILIES.items() if entry.replaceable)
        raise ConfigurationError(
            f"{name} does not train on {device.name} devices. Leave it out; {', '.join(available)} are available, and "
            "shard a model over the devices of one process."
        )
    if hasattr(settings, "for_world"):
        settings = settings.for_world(process.num_processes)
    strategy = name
    if name in PLUGINS:
        strategy = next(iter(settings.values())).strategy if isinstance(settings, dict) else settings.strategy
    if "ft" in combined:
        if strategy != "fsdp2":
            raise ConfigurationError(
                f"replicas that may be killed are sharded by FSDP version 2, and the settings are those of {strategy}. "
                "Set fsdp_version=2, or launch without --ft."
            )
        return STRATEGIES.load("ft_fsdp2")(process, handlers, settings)
    if not process.use_distributed and not STRATEGIES.load(strategy).supports_single_process:
        return _without(name, process, handlers)
    return STRATEGIES.load(strategy)(process, handlers, settings, **combined)
