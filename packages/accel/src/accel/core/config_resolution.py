"""Turning arguments and environment into the parts of an Accelerator, once."""

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
from accel_state.options import CoreOptions, ParadigmOptions

from ..checkpoint.names import ProjectConfiguration
from ..kwargs.base import Handlers
from ..kwargs.fp8 import FP8Kwargs
from ..kwargs.handlers import InitProcessGroupKwargs
from ..precision.full import Precision
from ..precision.registry import PRECISIONS
from ..precision.scaler import SharedGradScaler
from ..strategies.base import Strategy
from ..strategies.registry import PLUGINS, STRATEGIES
from .compile import TorchDynamoPlugin

logger = get_logger(__name__)


# The strategy that each of the launcher's switches asks for.
LAUNCHED = {
    "use_deepspeed": "deepspeed",
    "use_fsdp": "fsdp",
    "use_megatron_lm": "megatron",
    "use_parallelism_config": "mesh",
}

# Where the shared state keeps the settings of engines that may have several.
_PLACES = {"deepspeed": "deepspeed_plugins", "mesh": "parallelism_config"}

# A mesh may be laid over FSDP, whose settings are then those of its sharded axes.
_TOGETHER = {"mesh", "fsdp"}


class _Unset:
    def __repr__(self) -> str:
        return "<unset>"


UNSET: Any = _Unset()


@dataclass
class Setup:
    """Everything that an Accelerator delegates to."""

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
    """Start the process's state and choose strategy and precision.

    Args:
        handlers: the settings given as ``kwargs_handlers``.
        owner: the Accelerator, which the state belongs to as long as it is in use.
        strategy: an object, which is used as it is, or a registered name; None follows from ``engines``.
        mixed_precision: as given, or None.
        cpu: stay on the CPU.
        accumulation_plugin: settings of gradient accumulation.
        dynamo: settings of compilation.
        engines: settings of strategies other than data parallelism, by the name they are registered under.

    Raises:
        ConfigurationError: a setting that cannot be used, or the launcher asks for a strategy that is not installed.
    """
    given = [name for name, settings in engines.items() if settings is not None]
    if strategy is not None:
        check_strategy(strategy, given)
    asked = [] if strategy is not None else asked_strategies(given)
    if len(asked) > 1 and not set(asked) <= _TOGETHER:
        raise ConfigurationError(
            f"one strategy trains a model, but settings were given for {', '.join(asked)}. Pass one of them."
        )
    _drop_stale_state()
    asked = asked or ([] if strategy is not None else _strategies_in_use())
    engine = ("mesh" if "mesh" in asked else asked[0]) if asked else None
    settings = _settings_of(engine, engines)
    beside = {name: _settings_of(name, engines) for name in asked if name != engine}
    state = _acquire_state(owner, _precision_of(settings, mixed_precision), cpu, handlers)
    _check_recipes(handlers.all(FP8Kwargs), state.mixed_precision)
    process = PartialState()
    if isinstance(strategy, Strategy):
        strategy.attach(process, handlers)
    elif strategy is not None:
        strategy = STRATEGIES.load(strategy)(process, handlers)
    else:
        strategy = _choose_strategy(engine, settings, beside, handlers, process)
    # What users ask the state for; inside, nobody branches on it.
    state._distributed_type = strategy.distributed_type
    plugins = {engine: settings} if engine is not None and strategy.settings is not None else {}
    for name, in_use in {**plugins, **strategy.active_plugins}.items():
        setattr(state, _PLACES.get(name, f"{name}_plugin"), in_use)
    precision = PRECISIONS.load("no" if strategy.handles_precision(state.mixed_precision) else state.mixed_precision)(
        process, handlers
    )
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
    """Check the argument ``strategy``.

    Args:
        strategy: a Strategy, or a name.
        given: names of the plugins that the script passes.

    Raises:
        ConfigurationError: it is neither, an unknown name, or contradicts a plugin.
    """
    if given:
        raise ConfigurationError(
            f"strategy={strategy!r} contradicts the settings given for {', '.join(given)}. Pass the strategy or the "
            "plugin; a strategy object takes its settings in its constructor."
        )
    if isinstance(strategy, str):
        STRATEGIES.target(strategy)
    elif not isinstance(strategy, Strategy):
        raise ConfigurationError(
            f"strategy={strategy!r} must be an accel.strategies.base.Strategy object or one of "
            f"{', '.join(STRATEGIES.names())}."
        )


def _strategies_in_use() -> list[str]:
    """The engine of another Accelerator in this process: one that asks for nothing else shares it, as it shares the
    state.
    """
    shared = AcceleratorState._shared_state
    found = [name for name in PLUGINS if shared.get(_PLACES.get(name, f"{name}_plugin")) is not None]
    return [name for name in found if name in _TOGETHER] if "mesh" in found else found[:1]


def _settings_of(engine: str | None, engines: dict[str, Any]) -> Any:
    """The settings of an engine ("fsdp", ...): those given, those in use, or those of the launcher; None of one that
    has none.
    """
    settings = engines.get(engine) if engine is not None else None
    if engine is None or engine not in PLUGINS:
        return settings
    kind = PLUGINS.load(engine)
    if settings is None:
        in_use = AcceleratorState._shared_state.get(_PLACES.get(engine, f"{engine}_plugin"))
        return kind() if in_use is None else in_use
    several = list(settings.values()) if isinstance(settings, dict) and engine in _PLACES else [settings]
    wrong = [one for one in several if not isinstance(one, kind)]
    if wrong or not several:
        raise ConfigurationError(f"{engine}_plugin={settings!r} is no {kind.__name__}. Pass one, or leave it out.")
    return settings


def _precision_of(settings: Any, mixed_precision: Any) -> Any:
    """The precision given, unless the settings of the strategy have one themselves, as a DeepSpeed configuration may.

    Raises:
        ConfigurationError: both have one, and not the same.
    """
    launched = CoreOptions.from_environment().mixed_precision
    # A launcher's "no" is what it hands over where nobody chose.
    given, source = (
        (launched if launched != "no" else None),
        f"environment variable ACCELERATE_MIXED_PRECISION={launched}",
    )
    if mixed_precision is not None:
        given, source = str(mixed_precision), f"mixed_precision={str(mixed_precision)!r}"
    several = list(settings.values()) if isinstance(settings, dict) else [settings]
    active = next((one for one in several if getattr(one, "selected", False)), several[0])
    own = getattr(active, "precision", None)
    if own is not None and given not in (None, own):
        raise ConfigurationError(
            f"{source} contradicts {type(active).__name__}, whose configuration enables {own}. Set the precision in "
            "one of them."
        )
    return mixed_precision if own is None else own


def _choose_strategy(
    engine: str | None, settings: Any, beside: dict[str, Any], handlers: Handlers, process: PartialState
) -> Strategy:
    """The strategy of an engine ("fsdp", ...) with its settings, and those of engines beside it; without one, that of
    the machine.
    """
    if hasattr(settings, "for_world"):
        settings = settings.for_world(process.num_processes)
    name = engine
    if engine is not None and engine in PLUGINS:
        name = next(iter(settings.values())).strategy if isinstance(settings, dict) else settings.strategy
    if name is not None and not process.use_distributed and not STRATEGIES.load(name).supports_single_process:
        logger.warning(
            "%s divides a model among processes, and there is one: it trains as it is. Start several: `accel launch "
            "--num_processes N`.",
            engine,
        )
        name = None
    if name is None:
        return STRATEGIES.load("ddp" if process.use_distributed else "single")(process, handlers)
    return STRATEGIES.load(name)(process, handlers, settings, **beside)


def _check_recipes(recipes: list[FP8Kwargs], mixed_precision: str) -> None:
    """Refuse recipes of 8-bit floating point that would have no effect."""
    names = [type(recipe).__name__ for recipe in recipes]
    if names and mixed_precision != "fp8":
        raise ConfigurationError(
            f"kwargs_handlers holds {', '.join(names)}, which has no effect with mixed_precision={mixed_precision!r}. "
            "Pass mixed_precision='fp8', or leave it out."
        )
    if len(names) > 1:
        raise ConfigurationError(
            f"kwargs_handlers holds {' and '.join(names)}, but one back end computes in 8 bits. Pass one of them."
        )


def asked_strategies(given: list[str]) -> list[str]:
    """The strategies that the script asks for, or else those of the launcher.

    Args:
        given: names of those that the script has settings for.

    Raises:
        ConfigurationError: script and launcher ask for different ones.
    """
    launched = launched_strategies()
    if {"mesh"} & {*given, *launched} and {*given, *launched} <= _TOGETHER:
        return list(dict.fromkeys([*given, *launched]))
    if given and launched and not set(given) & set(launched):
        raise ConfigurationError(
            f"the script passes settings for {', '.join(given)}, but was launched for {', '.join(launched)} "
            "(environment variables "
            f"ACCELERATE_USE_...). Pass no such settings, or launch with the other one."
        )
    return given or launched


def launched_strategies() -> list[str]:
    """The strategies that the launcher asks for in this process's environment.

    Raises:
        ConfigurationError: one of them is not installed. To train without it would be another run than the one that was
            launched.
    """
    launched = ParadigmOptions.from_environment()
    wanted = [(opt, LAUNCHED[opt.name]) for opt in ParadigmOptions.options() if getattr(launched, opt.field)]
    for opt, name in wanted:
        if name not in STRATEGIES and name not in PLUGINS:
            raise ConfigurationError(
                f"environment variable {opt.env}=true asks for the strategy {name}, which is not installed. Installed: "
                f"{', '.join(STRATEGIES)}. Launch without {opt.flags[0]} (or distributed_type in the configuration "
                "file), or install "
                f"a package that provides the strategy."
            )
    return [name for _, name in wanted]


def _drop_stale_state() -> None:
    """Forget the shared state of an Accelerator which is gone."""
    holder = AcceleratorState._shared_state.get("_owner")
    if holder is not None:
        if holder() is not None:
            gc.collect()  # an Accelerator that was dropped may still wait in a reference cycle
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
    """Give the shared state up, so that the next Accelerator may choose another precision."""
    holder = AcceleratorState._shared_state.get("_owner")
    if holder is not None and holder() is owner:
        AcceleratorState._shared_state["_owner"] = lambda: None


def accumulation_settings(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """Settings of gradient accumulation; the launcher's number of steps wins over the script's.

    Raises:
        ConfigurationError: both a number of steps and a plugin were given, or the number is not positive.
    """
    launched = CoreOptions.from_environment().gradient_accumulation_steps
    if plugin is None:
        return GradientAccumulationPlugin(num_steps=launched or steps)
    if steps != 1:
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin were both given. Put the number "
            "into the plugin: "
            f"GradientAccumulationPlugin(num_steps={steps})."
        )
    return replace(plugin, num_steps=launched or plugin.num_steps or 1)


def loader_settings(config: DataLoaderConfiguration | None, split_batches: Any) -> DataLoaderConfiguration:
    """Settings of the loaders, with the Accelerator's older argument merged in.

    Raises:
        ConfigurationError: the two disagree.
    """
    if split_batches is UNSET:
        return config or DataLoaderConfiguration()
    if config is not None and config.split_batches != split_batches:
        raise ConfigurationError(
            f"split_batches={split_batches} contradicts dataloader_config.split_batches={config.split_batches}. Set "
            "it in "
            "DataLoaderConfiguration only."
        )
    return replace(config or DataLoaderConfiguration(), split_batches=bool(split_batches))


def dynamo_settings(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Settings of compilation.

    Raises:
        ConfigurationError: both a back end and a plugin were given.
    """
    if plugin is not None and backend is not None:
        raise ConfigurationError(
            "dynamo_backend and dynamo_plugin were both given. Put the back end into TorchDynamoPlugin(backend=...)."
        )
    return plugin or TorchDynamoPlugin(backend=backend)


def project_settings(project_dir: Any, config: ProjectConfiguration | None) -> ProjectConfiguration:
    """Folders of the project.

    Raises:
        ConfigurationError: two different folders were given.
    """
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
    return [RNGType(str(kind)) for kind in rng_types] if rng_types is not None else [RNGType.GENERATOR]
