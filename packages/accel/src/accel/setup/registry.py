"""The table of strategies, and the choice of one by what the script and the launcher ask for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from accel_state import AcceleratorState, ConfigurationError, PartialState, get_logger
from accel_state.errors import ArgumentTypeError
from accel_state.options import ParadigmOptions
from accel_state.registry import Registry

from ..contract.strategy import Strategy
from ..kwargs.base import Handlers

logger: Final = get_logger(__name__)

StrategyName = Literal[
    "single",
    "ddp",
    "fsdp1",
    "fsdp2",
    "deepspeed",
    "mesh",
    "mesh_ddp",
    "xla",
    "xla_spmd",
    "ft",
    "ft_fsdp2",
    "mesh_pp",
]
"""The names of accel's own strategies, for type checkers."""


@dataclass(frozen=True)
class Row:
    """Strategies that share their settings.

    Attributes:
        strategies: their classes, as ``"module:class"``, by name.
        plugin: the class of their settings. Without arguments, it takes the launcher's values; its ``strategy`` names
            the strategy that it configures.
        argument: the argument of the Accelerator with the settings; empty if there is none.
        switch: the option of the launcher that asks for them, a field of :class:`ParadigmOptions`.
        compatible_with: the rows whose settings may be given together with these.
        replaceable: whether a device with a sharded strategy of its own takes these settings instead.
    """

    strategies: Mapping[str, str] = field(default_factory=dict)
    plugin: str = ""
    argument: str = ""
    switch: str = ""
    compatible_with: tuple[str, ...] = ()
    replaceable: bool = False


# Of settings that are combined, the first in this order lead: they name the strategy, which gets the others.
TABLE: Final[dict[str, Row]] = {
    "single": Row({"single": "accel.strategies.single:SingleStrategy"}),
    "ddp": Row({"ddp": "accel.strategies.ddp:DDPStrategy"}),
    "mesh": Row(
        {
            "mesh": "accel.strategies.mesh:MeshStrategy",
            "mesh_ddp": "accel.strategies.mesh_ddp:MeshDDPStrategy",
            "mesh_pp": "accel.strategies.mesh_pp:PipelineStrategy",
        },
        "accel.parallel.config:ParallelismConfig",
        "parallelism_config",
        "use_parallelism_config",
        ("fsdp",),
        replaceable=True,
    ),
    "fsdp": Row(
        {"fsdp1": "accel.strategies.fsdp1:FSDP1Strategy", "fsdp2": "accel.strategies.fsdp2:FSDP2Strategy"},
        "accel.fsdp.plugin:FullyShardedDataParallelPlugin",
        "fsdp_plugin",
        "use_fsdp",
        ("mesh", "ft"),
        replaceable=True,
    ),
    # The older form of a mesh.
    "torch_tp": Row({}, "accel.parallel.config:TorchTensorParallelPlugin", "torch_tp_plugin", replaceable=True),
    "deepspeed": Row(
        {"deepspeed": "accel.strategies.deepspeed:DeepSpeedStrategy"},
        "accel.deepspeed.plugin:DeepSpeedPlugin",
        "deepspeed_plugin",
        "use_deepspeed",
    ),
    # Argument and switch are the reference's; accel-megatron registers the strategy.
    "megatron": Row(argument="megatron_lm_plugin", switch="use_megatron_lm"),
    "ft": Row(
        {
            "ft": "accel.strategies.ft:FaultTolerantStrategy",
            "ft_fsdp2": "accel.strategies.ft_fsdp2:FaultTolerantFSDP2Strategy",
        },
        switch="ft",
        compatible_with=("fsdp",),
    ),
    "xla": Row({"xla": "accel.strategies.xla:XlaStrategy"}),
    "xla_spmd": Row({"xla_spmd": "accel.strategies.xla_spmd:XlaSpmdStrategy"}),
}

STRATEGIES: Final[Registry[type[Strategy]]] = Registry(
    "strategy",
    {name: target for row in TABLE.values() for name, target in row.strategies.items()},
    entry_point_group="accel.strategies",
)
"""The strategies of the table, and those of other distributions."""

_PLUGINS: Final[Registry[type[Any]]] = Registry(
    "plugin", {name: row.plugin for name, row in TABLE.items() if row.plugin}
)


def choose(strategy: Any, plugins: Mapping[str, Any]) -> tuple[Strategy | str | None, dict[str, Any]]:
    """Return the strategy that is given as such, or else the settings that name one.

    Args:
        strategy: a strategy, the name of one, or its plugin; None if the script gives none.
        plugins: the plugins passed to the Accelerator, by row of the table; None where there are none.

    Returns:
        A strategy or its name, or None; and the settings (a plugin, or several by name) by row of the table, or by
        the name of a strategy that has no row. The first ones lead. Without either, another Accelerator of this
        process decides, and then the device and the number of processes.

    Raises:
        ConfigurationError: script and launcher contradict each other, or settings cannot be combined.
    """
    given = {name: settings for name, settings in plugins.items() if settings is not None}
    if strategy is not None:
        if given:
            raise ConfigurationError(
                f"strategy={strategy!r} contradicts the settings given for {', '.join(given)}. Pass the strategy or "
                "the plugin; a strategy object takes its settings in its constructor."
            )
        if isinstance(strategy, str):
            STRATEGIES.target(strategy)
        if isinstance(strategy, (str, Strategy)):
            return strategy, {}
        given = {_row_of(strategy): strategy}
    launched = ParadigmOptions.from_environment()
    in_use = AcceleratorState._shared_state.get("plugins")
    switched_on = launched_rows(launched)
    asked = _agreed(list(given), switched_on) if given and switched_on else [*given, *switched_on]
    names = asked or [*(in_use or ())]
    ordered = sorted(names, key=[*TABLE, *names].index)
    if in_use and not asked:  # of another Accelerator, which may have added the form that its strategy takes
        ordered = [name for name in ordered if _conflict([ordered[0], name]) is None]
    if not ordered:
        return launched.strategy, {}
    conflict = _conflict(ordered)
    if conflict:
        raise ConfigurationError(
            f"settings were given for {', '.join(ordered)}, but {' and '.join(conflict)} do not combine: one strategy "
            "trains a model. Pass the settings of one of them."
        )
    return None, {name: _settings_of(name, given.get(name), in_use or {}) for name in ordered}


def _row_of(plugin: Any) -> str:
    """Return the row of a plugin that is given as ``strategy``, or the name of its strategy if that has no row."""
    for row in _PLUGINS:
        if isinstance(plugin, _PLUGINS.load(row)):
            return row
    name = getattr(plugin, "strategy", None)
    built_in = any(name in row.strategies for row in TABLE.values())
    if isinstance(plugin, type) or built_in or not isinstance(name, str) or name not in STRATEGIES:
        raise ConfigurationError(
            f"strategy={plugin!r} must be an accel.contract.strategy.Strategy object or one of "
            f"{', '.join(STRATEGIES.names())}, or the plugin of one."
        )
    return name


def launched_rows(launched: ParadigmOptions) -> list[str]:
    """Return the rows of the table that the launcher's switches ask for in this process's environment."""
    names = []
    for name, row in TABLE.items():
        if not row.switch or not getattr(launched, row.switch):
            continue
        names.append(name)
        option = ParadigmOptions.declaration(row.switch)
        if not row.strategies and name not in STRATEGIES:
            raise ConfigurationError(
                f"environment variable {option.env}=true requests the strategy {name}, which is not installed. "
                f"Installed: {', '.join(STRATEGIES)}. Launch without {option.flags[0]} (or distributed_type in the "
                f"configuration file), or install it: pip install 'accel[{name}]'."
            )
        if launched.strategy is not None:
            raise ConfigurationError(
                f"environment variable {option.env}=true contradicts ACCELERATE_STRATEGY={launched.strategy}. Launch "
                f"with {option.flags[0]} or with --strategy {launched.strategy}, not with both."
            )
    return names


def _agreed(given: list[str], launched: list[str]) -> list[str]:
    """Return what the script passes, with what the launcher adds to it, such as the sizes of a mesh or replicas."""
    both = list(dict.fromkeys([*given, *launched]))
    if not _conflict(both):
        return both
    if not set(given) & set(launched):
        raise ConfigurationError(
            f"the script passes settings for {', '.join(given)}, but was launched for {', '.join(launched)} "
            "(environment variables ACCELERATE_USE_...). Remove the settings, or launch it for the same strategy."
        )
    return given


def _conflict(names: list[str]) -> tuple[str, str] | None:
    """Return two rows whose settings cannot be given together."""
    for first, second in itertools.combinations(dict.fromkeys(names), 2):
        if second not in TABLE.get(first, Row()).compatible_with:
            return first, second
    return None


def _settings_of(name: str, settings: Any, in_use: Mapping[str, Any]) -> Any:
    """Return the settings of a row: those given, those in use, or by default the launcher's."""
    if settings is None:
        if name in in_use or name not in _PLUGINS:
            return in_use.get(name)
        return _PLUGINS.load(name)()
    if name not in _PLUGINS:
        if getattr(settings, "strategy", None) == name:
            return settings
        argument = TABLE[name].argument
        raise ArgumentTypeError(f"{argument}={settings!r} must be the plugin of the strategy {name!r}. Pass one.")
    kind = _PLUGINS.load(name)
    several = list(settings.values()) if isinstance(settings, dict) and name == "deepspeed" else [settings]
    if not several or not all(isinstance(plugin, kind) for plugin in several):
        argument = TABLE[name].argument
        raise ArgumentTypeError(f"{argument}={settings!r} must be a {kind.__name__}. Pass one, or leave it out.")
    return settings


def make_strategy(
    strategy: Strategy | str | None, chosen: Mapping[str, Any], process: PartialState, handlers: Handlers
) -> Strategy:
    """Return the strategy for what :func:`choose` returned, on this process's device."""
    settings: Any = None
    combined: dict[str, Any] = {}
    if strategy is None and not chosen:
        strategy = process.device_backend.strategy or ("ddp" if process.use_distributed else "single")
        return STRATEGIES.load(strategy)(process, handlers)
    if strategy is None:
        strategy, settings, combined = _configured(dict(chosen), process)
    kind = STRATEGIES.load(strategy) if isinstance(strategy, str) else type(strategy)
    launched = ParadigmOptions.read("strategy")
    if launched is not None and STRATEGIES.load(launched) is not kind:
        raise ConfigurationError(
            f"the script chooses {kind.__name__}, but was launched for the strategy {launched} "
            "(ACCELERATE_STRATEGY). Leave one of them out, or choose the same."
        )
    if process.use_distributed and not kind.supports_several_processes:
        raise ConfigurationError(
            f"{kind.__name__} trains in one process and does not average gradients, and there are "
            f"{process.num_processes} processes. Choose another strategy, such as 'ddp', or start one process."
        )
    if not process.use_distributed and not kind.supports_single_process:
        name = strategy if isinstance(strategy, str) else kind.__name__
        logger.warning(
            "%s trains a model over several processes, and there is only one: the model is trained without it. Start "
            "several: `accel launch --num_processes N`.",
            next(iter(chosen), name),
        )
        return STRATEGIES.load("single")(process, handlers)
    if isinstance(strategy, Strategy):
        strategy.attach(process, handlers)
        return strategy
    return kind(process, handlers, settings, **combined)


def _configured(chosen: dict[str, Any], process: PartialState) -> tuple[str, Any, dict[str, Any]]:
    """Return the name of the strategy for the settings that lead, these settings, and those of others that it gets."""
    device, name = process.device_backend, next(iter(chosen))
    settings, row = chosen.pop(name), TABLE.get(name, Row())
    if row.replaceable and device.sharded_strategy is not None:
        return device.sharded_strategy, settings, chosen
    if device.strategy is not None and name in TABLE:
        available = sorted(other for other, entry in TABLE.items() if entry.replaceable)
        raise ConfigurationError(
            f"{name} does not train on {device.name} devices. Leave it out; {', '.join(available)} are available, and "
            "shard a model over the devices of one process."
        )
    if hasattr(settings, "for_world"):
        settings = settings.for_world(process.num_processes)
    strategy = getattr(next(iter(settings.values())) if isinstance(settings, dict) else settings, "strategy", name)
    if "ft" in chosen:
        if strategy != "fsdp2":
            raise ConfigurationError(
                f"replicas that may be killed are sharded by FSDP version 2, and the settings are those of {strategy}. "
                "Set fsdp_version=2, or launch without --ft."
            )
        return "ft_fsdp2", settings, {}
    return strategy, settings, chosen
