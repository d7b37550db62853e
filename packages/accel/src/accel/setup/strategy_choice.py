"""Which strategy trains: a table of what can be asked for, and the functions that read it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from accel_state import AcceleratorState, ConfigurationError, PartialState, get_logger
from accel_state.errors import ArgumentTypeError
from accel_state.options import ParadigmOptions

from ..contract.strategy import Strategy
from ..kwargs.base import Handlers
from .registry import PLUGINS, STRATEGIES

logger: Final = get_logger(__name__)


@dataclass(frozen=True)
class Family:
    """A kind of training that a script or the launcher asks for.

    Attributes:
        argument: the argument of the Accelerator with its settings; empty if a script cannot pass any.
        attribute: the attribute of :class:`AcceleratorState` that holds them.
        switch: the option of the launcher, a field of :class:`ParadigmOptions`.
        combines_with: the families whose settings may be given together with these.
        replaceable: whether a device with a sharded strategy of its own takes these settings instead.
    """

    argument: str = ""
    attribute: str = ""
    switch: str = ""
    combines_with: tuple[str, ...] = ()
    replaceable: bool = False


# By the name of the settings (``PLUGINS``). Of families that are combined, the first in this order leads: its settings
# name the strategy, which gets those of the others.
FAMILIES = {
    "mesh": Family("parallelism_config", "parallelism_config", "use_parallelism_config", ("fsdp",), replaceable=True),
    "fsdp": Family("fsdp_plugin", "fsdp_plugin", "use_fsdp", ("mesh", "ft"), replaceable=True),
    "torch_tp": Family("torch_tp_plugin", "torch_tp_plugin", replaceable=True),
    "deepspeed": Family("deepspeed_plugin", "deepspeed_plugins", "use_deepspeed"),
    "megatron": Family("megatron_lm_plugin", "megatron_lm_plugin", "use_megatron_lm"),
    "ft": Family(switch="ft", combines_with=("fsdp",)),
}


@dataclass
class Choice:
    """The families that were asked for; without one, the device and the number of processes decide.

    Attributes:
        family: the leading one.
        settings: its settings: a plugin, or several by name.
        combined: the settings of those combined with it, by family.
    """

    family: str | None = None
    settings: Any = None
    combined: dict[str, Any] = field(default_factory=dict)


def choose(plugins: Mapping[str, Any]) -> Choice:
    """What the script or the launcher asks for, or else what another Accelerator of this process uses.

    Args:
        plugins: the settings passed to the Accelerator, by family; None where there are none.

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
    if not asked:
        return Choice()
    leading, *others = sorted(asked, key=list(FAMILIES).index)
    combined = {name: _settings_of(name, plugins.get(name)) for name in others}
    return Choice(leading, _settings_of(leading, plugins.get(leading)), combined)


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


def make_strategy(choice: Choice, process: PartialState, handlers: Handlers) -> Strategy:
    """The strategy for a choice, on this process's device."""
    device, name, settings = process.device_backend, choice.family, choice.settings
    if name is None:
        return STRATEGIES.load(device.strategy or _data_parallel(process))(process, handlers)
    if FAMILIES[name].replaceable and device.sharded_strategy is not None:
        return STRATEGIES.load(device.sharded_strategy)(process, handlers, settings, **choice.combined)
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
    if "ft" in choice.combined:
        if strategy != "fsdp2":
            raise ConfigurationError(
                f"replicas that may be killed are sharded by FSDP version 2, and the settings are those of {strategy}. "
                "Set fsdp_version=2, or launch without --ft."
            )
        return STRATEGIES.load("ft_fsdp2")(process, handlers, settings)
    if not process.use_distributed and not STRATEGIES.load(strategy).supports_single_process:
        return _without(name, process, handlers)
    return STRATEGIES.load(strategy)(process, handlers, settings, **choice.combined)


def _data_parallel(process: PartialState) -> str:
    return "ddp" if process.use_distributed else "single"
