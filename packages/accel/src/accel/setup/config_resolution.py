"""Resolves arguments and environment into the objects that an Accelerator delegates to, once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from accel_data import DataLoaderConfiguration
from accel_state import (
    AcceleratorState,
    ConfigurationError,
    GradientAccumulationPlugin,
    GradientState,
    PartialState,
    RNGType,
    get_logger,
)
from accel_state.errors import ArgumentTypeError, check_type
from accel_state.options import CoreOptions, ParadigmOptions

from ..checkpoint.names import ProjectConfiguration
from ..contract.strategy import Strategy
from ..core.compile import TorchDynamoPlugin
from ..kwargs.base import Handlers
from ..kwargs.fp8 import FP8Kwargs
from ..kwargs.handlers import InitProcessGroupKwargs
from ..precision.full import Precision
from ..precision.registry import PRECISIONS
from ..precision.scaler import SharedGradScaler
from .registry import PLUGINS, STRATEGIES

logger = get_logger(__name__)


# The strategy of each switch of the launcher.
LAUNCHED = {
    "use_deepspeed": "deepspeed",
    "use_fsdp": "fsdp",
    "use_megatron_lm": "megatron",
    "use_parallelism_config": "mesh",
    "ft": "ft",
}

# The attributes of the shared state that hold the settings of an engine, where they are not `<engine>_plugin`.
_ATTRIBUTES = {"deepspeed": "deepspeed_plugins", "mesh": "parallelism_config", "megatron": "megatron_lm_plugin"}

# Engines that can be combined: FSDP shards the dp_shard axis of a mesh.
_COMBINABLE = {"mesh", "fsdp"}
# Replicas that may be killed, each sharded.
_SHARDED_REPLICAS = {"ft", "fsdp"}

# Engines that devices with a strategy of their own may replace.
_MESHES = {"mesh", "fsdp", "torch_tp"}


class _Unset:
    def __repr__(self) -> str:
        return "<unset>"


UNSET: Any = _Unset()


@dataclass
class Setup:
    """The objects that an Accelerator delegates to."""

    state: AcceleratorState
    process: PartialState
    gradient_state: GradientState
    accumulation_plugin: GradientAccumulationPlugin
    handlers: Handlers
    strategy: Strategy
    precision: Precision
    dynamo: TorchDynamoPlugin


def build(
    handlers: Handlers,
    *,
    owner: object,
    strategy: Strategy | str | None = None,
    mixed_precision: Any,
    cpu: bool,
    accumulation_plugin: GradientAccumulationPlugin,
    dynamo: TorchDynamoPlugin,
    engines: dict[str, Any],
) -> Setup:
    """Initialise the process's state, and choose strategy and precision."""
    given = [name for name, settings in engines.items() if settings is not None]
    requested: list[str] = []
    if strategy is not None:
        check_strategy(strategy, given)
    else:
        requested = asked_strategies(given)
    if len(requested) > 1 and not (set(requested) <= _COMBINABLE or set(requested) == _SHARDED_REPLICAS):
        raise ConfigurationError(
            f"settings were given for {', '.join(requested)}, but a model is trained by one strategy. Pass one of them."
        )
    _drop_stale_state()
    if strategy is None:
        requested = requested or _strategies_in_use()
    engine = None
    if requested:
        engine = next((name for name in ("mesh", "fsdp") if name in requested), requested[0])
    settings = _settings_of(engine, engines)
    combined = {name: _settings_of(name, engines) for name in requested if name != engine}
    state = _acquire_state(owner, _precision_of(settings, mixed_precision), cpu, handlers)
    _check_recipes(handlers.all(FP8Kwargs), state.mixed_precision)
    process = PartialState()
    if isinstance(strategy, Strategy):
        strategy.attach(process, handlers)
    elif strategy is not None:
        strategy = STRATEGIES.load(strategy)(process, handlers)
    else:
        strategy = _choose_strategy(engine, settings, combined, handlers, process)
    # For scripts that read the state; accel itself asks the strategy.
    state._distributed_type = strategy.distributed_type
    plugins = {engine: settings} if engine is not None and strategy.settings is not None else {}
    for name, plugin in {**plugins, **strategy.active_plugins}.items():
        setattr(state, _ATTRIBUTES.get(name, f"{name}_plugin"), plugin)
    if state.dynamo_plugin is None:
        state.dynamo_plugin = dynamo
    handled = strategy.handles_precision(state.mixed_precision)
    precision = PRECISIONS.load("no" if handled else state.mixed_precision)(process, handlers)
    if isinstance(precision.scaler, SharedGradScaler):
        strategy.configure_scaler(precision.scaler)
    accumulation_plugin = strategy.accumulation(accumulation_plugin)
    return Setup(
        state=state,
        process=process,
        gradient_state=GradientState(accumulation_plugin),
        accumulation_plugin=accumulation_plugin,
        handlers=handlers,
        strategy=strategy,
        precision=precision,
        dynamo=dynamo,
    )


def check_strategy(strategy: Any, given: list[str]) -> None:
    """Check the argument ``strategy``."""
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


def _strategies_in_use() -> list[str]:
    """The strategies of another Accelerator in this process, which one without settings shares."""
    shared = AcceleratorState._shared_state
    in_use = [name for name in PLUGINS if shared.get(_ATTRIBUTES.get(name, f"{name}_plugin")) is not None]
    return [name for name in in_use if name in _COMBINABLE] if "mesh" in in_use else in_use[:1]


def _settings_of(engine: str | None, engines: dict[str, Any]) -> Any:
    settings = engines.get(engine) if engine is not None else None
    if engine is None or engine not in PLUGINS:
        return settings
    kind = PLUGINS.load(engine)
    if settings is None:
        in_use = AcceleratorState._shared_state.get(_ATTRIBUTES.get(engine, f"{engine}_plugin"))
        return kind() if in_use is None else in_use
    plugins = list(settings.values()) if isinstance(settings, dict) and engine in _ATTRIBUTES else [settings]
    if not plugins or not all(isinstance(plugin, kind) for plugin in plugins):
        argument = {"mesh": "parallelism_config", "megatron": "megatron_lm_plugin"}.get(engine, f"{engine}_plugin")
        raise ArgumentTypeError(f"{argument}={settings!r} must be a {kind.__name__}. Pass one, or leave it out.")
    return settings


def _precision_of(settings: Any, mixed_precision: Any) -> Any:
    """The precision given, or that in the settings of the strategy, such as a DeepSpeed configuration."""
    launched = CoreOptions.from_environment().mixed_precision
    # The launcher passes "no" where nothing was chosen.
    given = None if launched == "no" else launched
    source = f"environment variable ACCELERATE_MIXED_PRECISION={launched}"
    if mixed_precision is not None:
        given, source = str(mixed_precision), f"mixed_precision={str(mixed_precision)!r}"
    plugins = list(settings.values()) if isinstance(settings, dict) else [settings]
    active = next((plugin for plugin in plugins if getattr(plugin, "selected", False)), plugins[0])
    configured = getattr(active, "precision", None)
    if configured is not None and given not in (None, configured):
        raise ConfigurationError(
            f"{source} contradicts {type(active).__name__}, whose configuration enables {configured}. Set the "
            "precision in one of them."
        )
    return mixed_precision if configured is None else configured


def _choose_strategy(
    engine: str | None, settings: Any, combined: dict[str, Any], handlers: Handlers, process: PartialState
) -> Strategy:
    """The strategy of an engine ("fsdp", ...), with the settings of engines combined with it; or data parallelism."""
    device = process.device_backend
    if engine is None and device.strategy is not None:
        return STRATEGIES.load(device.strategy)(process, handlers)
    if engine in _MESHES and device.sharded_strategy is not None:
        return STRATEGIES.load(device.sharded_strategy)(process, handlers, settings, **combined)
    if device.strategy is not None:
        raise ConfigurationError(
            f"{engine} does not train on {device.name} devices. Leave it out; {', '.join(sorted(_MESHES))} are "
            "available, and shard a model over the devices of one process."
        )
    if hasattr(settings, "for_world"):
        settings = settings.for_world(process.num_processes)
    name = engine
    if engine is not None and engine in PLUGINS:
        name = next(iter(settings.values())).strategy if isinstance(settings, dict) else settings.strategy
    if "ft" in combined:
        if name != "fsdp2":
            raise ConfigurationError(
                f"replicas that may be killed are sharded by FSDP version 2, and the settings are those of {name}. Set "
                "fsdp_version=2, or launch without --ft."
            )
        return STRATEGIES.load("ft_fsdp2")(process, handlers, settings)
    if name is not None and not process.use_distributed and not STRATEGIES.load(name).supports_single_process:
        logger.warning(
            "%s shards a model over processes, and there is only one: the model is trained without it. Start several: "
            "`accel launch --num_processes N`.",
            engine,
        )
        name = None
    if name is None:
        return STRATEGIES.load("ddp" if process.use_distributed else "single")(process, handlers)
    return STRATEGIES.load(name)(process, handlers, settings, **combined)


def _check_recipes(recipes: list[FP8Kwargs], mixed_precision: str) -> None:
    """Warn about recipes of 8-bit floating point without an effect, and refuse several."""
    names = [type(recipe).__name__ for recipe in recipes]
    if names and mixed_precision != "fp8":
        logger.warning_once(
            f"kwargs_handlers holds {', '.join(names)}, which has no effect with mixed_precision={mixed_precision!r}, "
            "only with mixed_precision='fp8'."
        )
    elif len(names) > 1:
        raise ConfigurationError(f"kwargs_handlers holds {' and '.join(names)}. Pass one recipe for 8 bits.")


def asked_strategies(given: list[str]) -> list[str]:
    """The strategies requested by the script, or else by the launcher."""
    launched = launched_strategies()
    if "mesh" in (*given, *launched) and {*given, *launched} <= _COMBINABLE:
        return list(dict.fromkeys([*given, *launched]))
    if given and launched and not set(given) & set(launched):
        raise ConfigurationError(
            f"the script passes settings for {', '.join(given)}, but was launched for {', '.join(launched)} "
            "(environment variables ACCELERATE_USE_...). Remove the settings, or launch it for the same strategy."
        )
    return given or launched


def launched_strategies() -> list[str]:
    """The strategies requested by the launcher in this process's environment."""
    launched = ParadigmOptions.from_environment()
    names = []
    for option in ParadigmOptions.options():
        if not getattr(launched, option.field):
            continue
        name = LAUNCHED[option.name]
        names.append(name)
        if name not in STRATEGIES and name not in PLUGINS:
            raise ConfigurationError(
                f"environment variable {option.env}=true requests the strategy {name}, which is not installed. "
                f"Installed: {', '.join(STRATEGIES)}. Launch without {option.flags[0]} (or distributed_type in the "
                f"configuration file), or install it: pip install 'accel[{name}]'."
            )
    return names


def _drop_stale_state() -> None:
    """Reset the shared state of an Accelerator that no longer exists."""
    holder = AcceleratorState._shared_state.get("_owner")
    if holder is not None:
        if holder() is not None:
            gc.collect()  # an unused Accelerator may still be in a reference cycle
        if holder() is None:
            AcceleratorState._reset_state()


def _acquire_state(owner: object, mixed_precision: Any, cpu: bool, handlers: Handlers) -> AcceleratorState:
    """The shared state, which belongs to the Accelerator that made it."""
    created = not AcceleratorState._shared_state
    state = AcceleratorState(
        mixed_precision=None if mixed_precision is None else str(mixed_precision),
        cpu=cpu,
        _from_accelerator=True,
        **handlers.get(InitProcessGroupKwargs).to_kwargs(),
    )
    if created:
        state.__dict__["_owner"] = weakref.ref(owner)
    return state


def release_state(owner: object) -> None:
    """Release the shared state, so that the next Accelerator may choose another precision."""
    holder = AcceleratorState._shared_state.get("_owner")
    if holder is not None and holder() is owner:
        AcceleratorState._shared_state["_owner"] = lambda: None


def accumulation_settings(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """Settings of gradient accumulation; the launcher's number of steps overrides the script's."""
    launched = CoreOptions.from_environment().gradient_accumulation_steps
    if plugin is None:
        return GradientAccumulationPlugin(num_steps=launched or steps)
    hint = f"Pass GradientAccumulationPlugin(num_steps={plugin!r})."
    check_type(plugin, GradientAccumulationPlugin, "gradient_accumulation_plugin", hint)
    if steps != 1:
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin were both given. Put the number "
            f"into the plugin: GradientAccumulationPlugin(num_steps={steps})."
        )
    return replace(plugin, num_steps=launched or plugin.num_steps or 1)


def loader_settings(config: DataLoaderConfiguration | None, split_batches: Any) -> DataLoaderConfiguration:
    """Settings of the loaders, with the Accelerator's older argument merged in."""
    if config is not None and not isinstance(config, DataLoaderConfiguration):
        hint = "DataLoaderConfiguration(**settings)" if isinstance(config, dict) else "a DataLoaderConfiguration"
        raise ConfigurationError(f"dataloader_config is a {type(config).__name__}. Pass {hint}.")
    if split_batches is UNSET:
        return config or DataLoaderConfiguration()
    if config is not None and config.split_batches != split_batches:
        raise ConfigurationError(
            f"split_batches={split_batches} contradicts dataloader_config.split_batches={config.split_batches}. Set "
            "it in DataLoaderConfiguration only."
        )
    return replace(config or DataLoaderConfiguration(), split_batches=bool(split_batches))


def dynamo_settings(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Settings of compilation."""
    if plugin is not None and backend is not None:
        raise ConfigurationError(
            "dynamo_backend and dynamo_plugin were both given. Put the back end into TorchDynamoPlugin(backend=...)."
        )
    if plugin is not None:
        check_type(plugin, TorchDynamoPlugin, "dynamo_plugin", f"Pass TorchDynamoPlugin(backend={plugin!r}).")
    return plugin or TorchDynamoPlugin(backend=backend)


def project_settings(project_dir: Any, config: ProjectConfiguration | None) -> ProjectConfiguration:
    """Directories of the project."""
    if config is not None and not isinstance(config, ProjectConfiguration):
        raise ConfigurationError(
            f"project_config={config!r} must be a ProjectConfiguration. For a directory, pass project_dir={config!r}."
        )
    settings = config or ProjectConfiguration(project_dir=project_dir)
    if project_dir is not None and settings.project_dir is None:
        settings.set_directories(project_dir)
    if project_dir is not None and str(settings.project_dir) != str(project_dir):
        raise ConfigurationError(
            f"project_dir={str(project_dir)!r} contradicts project_config.project_dir={settings.project_dir!r}. Pass "
            "one of them."
        )
    return settings


def rng_settings(rng_types: Iterable[str | RNGType] | None) -> list[RNGType]:
    """The generators that loaders synchronise at each epoch; by default the sampler's own."""
    if isinstance(rng_types, str):
        raise ConfigurationError(f"rng_types={str(rng_types)!r} must be a list: rng_types=[{str(rng_types)!r}].")
    return [RNGType(str(kind)) for kind in rng_types] if rng_types is not None else [RNGType.GENERATOR]
