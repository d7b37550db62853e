"""Resolves arguments and environment into the objects that an Accelerator delegates to, once."""

from __future__ import annotations

import difflib
import gc
import inspect
import itertools
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Final

from accel_data import DataLoaderConfiguration
from accel_state import (
    AcceleratorState,
    ConfigurationError,
    PartialState,
    RNGType,
    get_logger,
)
from accel_state.arguments import check_flag
from accel_state.errors import ArgumentTypeError
from accel_state.logging import warn_once
from accel_state.options import CheckpointingOptions, CoreOptions, ParadigmOptions
from accel_state.random import rng_kind

from ..contract.strategy import Strategy
from ..core.compile import TorchDynamoPlugin
from ..core.project import ProjectConfiguration
from ..kwargs.activation_checkpointing import ActivationCheckpointingKwargs
from ..kwargs.base import Handlers
from ..kwargs.fp8 import FP8Kwargs
from ..kwargs.handlers import InitProcessGroupKwargs
from ..precision.full import Precision
from ..precision.registry import PRECISIONS
from ..precision.scaler import SharedGradScaler
from .registry import PLUGINS, STRATEGIES, TABLE, Row

logger: Final = get_logger(__name__)


class _Unset:
    def __repr__(self) -> str:
        return "<unset>"


UNSET: Any = _Unset()


def build(
    handlers: Handlers,
    *,
    owner: object,
    strategy: Any,
    launched: CoreOptions,
    mixed_precision: Any,
    cpu: bool,
    dynamo: TorchDynamoPlugin,
    plugins: dict[str, Any],
) -> tuple[AcceleratorState, Strategy, Precision]:
    """Initialise the process's state, and choose strategy and precision."""
    shared = AcceleratorState._shared_state
    _drop_stale_state(shared, differs=bool(shared.get("plugins")))
    strategy, chosen = choose(strategy, plugins)
    leading = dict(list(chosen.items())[:1])
    if chosen:
        mixed_precision = _precision_of(chosen[next(iter(chosen))], mixed_precision, launched.mixed_precision)
    wanted = str(mixed_precision or launched.mixed_precision or "no")
    if mixed_precision is not None and launched.mixed_precision not in (None, "no", wanted):
        warn_once(
            __name__,
            f"mixed_precision={wanted!r} of the script overrides the launcher's {launched.mixed_precision} "
            "(--mixed_precision, ACCELERATE_MIXED_PRECISION). Give the precision in one of them.",
        )
    _drop_stale_state(shared, differs=(wanted, dynamo) != (shared.get("_mixed_precision"), shared.get("dynamo_plugin")))
    state = _acquire_state(owner, wanted, mixed_precision is not None, cpu, handlers)
    used = state.mixed_precision
    recipes = handlers.all(FP8Kwargs)
    if recipes:
        _check_recipes(recipes, used)
    process = PartialState()
    strategy = _make_strategy(strategy, chosen, process, handlers)
    options = CheckpointingOptions.from_environment()
    if options.activation_checkpointing:
        handlers.add(ActivationCheckpointingKwargs.launched(options))
    checkpointed = handlers.all(ActivationCheckpointingKwargs)
    if checkpointed:
        _check_checkpointing(checkpointed[0], strategy, dynamo)
    if strategy.uses_engine and process.has_reconnected:
        raise ConfigurationError(
            f"{type(strategy).__name__} keeps process groups that the end of the training before has destroyed. Start "
            "new processes for each training, or call end_training only after the last one."
        )
    # For scripts that read the state; accel itself asks the strategy.
    state._distributed_type = strategy.distributed_type
    if strategy.settings is not None:
        state.plugins.update(leading)
    state.plugins.update(strategy.active_plugins)
    if state.dynamo_plugin is None:
        state.dynamo_plugin = dynamo
    handled = strategy.handles_precision(used)
    precision = PRECISIONS.load("no" if handled else used)(process, handlers)
    if isinstance(precision.scaler, SharedGradScaler):
        strategy.configure_scaler(precision.scaler)
    return state, strategy, precision


def _check_checkpointing(
    settings: ActivationCheckpointingKwargs, strategy: Strategy, dynamo: TorchDynamoPlugin
) -> None:
    if not strategy.checkpoints_blocks:
        advice = "Set activation_checkpointing=True in fsdp_plugin" if strategy.shards_parameters else "Leave it out"
        raise ConfigurationError(
            f"ActivationCheckpointingKwargs (--activation_checkpointing) is for one process and for DDP, and this run "
            f"uses {type(strategy).__name__}. {advice}."
        )
    if settings.offload and dynamo.compiles:
        raise ConfigurationError(
            "ActivationCheckpointingKwargs(offload=True) has not been compared with one process in compiled models. "
            "Leave out offload, or dynamo_backend."
        )


def _precision_of(settings: Any, mixed_precision: Any, launched: str | None) -> Any:
    """Return the precision given, or that in the settings of the strategy, such as a DeepSpeed configuration."""
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


def _check_recipes(recipes: list[FP8Kwargs], mixed_precision: str) -> None:
    """Warn about recipes of 8-bit floating point without an effect, and refuse several."""
    names = [type(recipe).__name__ for recipe in recipes]
    if mixed_precision != "fp8":
        logger.warning_once(
            f"kwargs_handlers holds {', '.join(names)}, which has no effect with mixed_precision={mixed_precision!r}, "
            "only with mixed_precision='fp8'."
        )
    elif len(names) > 1:
        raise ConfigurationError(f"kwargs_handlers holds {' and '.join(names)}. Pass one recipe for 8 bits.")


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
            _check_launched(strategy)
            return strategy, {}
        given = {_row_of(strategy): strategy}
    launched = ParadigmOptions.from_environment()
    in_use = AcceleratorState._shared_state.get("plugins")
    switched_on = _launched_rows(launched)
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
    for row in PLUGINS:
        if isinstance(plugin, PLUGINS.load(row)):
            return row
    name = getattr(plugin, "strategy", None)
    built_in = any(name in row.strategies for row in TABLE.values())
    if isinstance(plugin, type) or built_in or not isinstance(name, str) or name not in STRATEGIES:
        raise ConfigurationError(
            f"strategy={plugin!r} must be an accel.contract.strategy.Strategy object or one of "
            f"{', '.join(STRATEGIES.names())}, or the plugin of one."
        )
    return name


def _launched_rows(launched: ParadigmOptions) -> list[str]:
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


def _check_launched(strategy: str | Strategy) -> None:
    """Refuse a strategy of the script if a switch of the launcher asks for another one."""
    rows = _launched_rows(ParadigmOptions.from_environment())
    names = [name for row in rows for name in (row, *TABLE[row].strategies) if name in STRATEGIES]
    kind = STRATEGIES.load(strategy) if isinstance(strategy, str) else type(strategy)
    if rows and not issubclass(kind, tuple(map(STRATEGIES.load, names))):
        raise ConfigurationError(
            f"the script chooses {kind.__name__}, but was launched for {', '.join(rows)} (environment variables "
            "ACCELERATE_USE_...). Leave out strategy, or launch it without."
        )


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
        if name in in_use or name not in PLUGINS:
            return in_use.get(name)
        return PLUGINS.load(name)()
    if name not in PLUGINS:
        if getattr(settings, "strategy", None) == name:
            return settings
        argument = TABLE[name].argument
        raise ArgumentTypeError(f"{argument}={settings!r} must be the plugin of the strategy {name!r}. Pass one.")
    kind = PLUGINS.load(name)
    several = list(settings.values()) if isinstance(settings, dict) and name == "deepspeed" else [settings]
    if not several or not all(isinstance(plugin, kind) for plugin in several):
        argument = TABLE[name].argument
        raise ArgumentTypeError(f"{argument}={settings!r} must be a {kind.__name__}. Pass one, or leave it out.")
    return settings


def _make_strategy(
    strategy: Strategy | str | None, chosen: Mapping[str, Any], process: PartialState, handlers: Handlers
) -> Strategy:
    """Return the strategy for what :func:`choose` returned, on this process's device."""
    settings: Any = None
    combined: dict[str, Any] = {}
    if strategy is None and not chosen:
        strategy = process.device_backend.strategy or ("ddp" if process.num_processes > 1 else "single")
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
    if process.num_processes > 1 and not kind.supports_several_processes:
        raise ConfigurationError(
            f"{kind.__name__} trains in one process and does not average gradients, and there are "
            f"{process.num_processes} processes. Choose another strategy, such as 'ddp', or start one process."
        )
    if process.num_processes == 1 and not kind.supports_single_process:
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


def _drop_stale_state(shared: dict[str, Any], differs: bool) -> None:
    """Reset the shared state if none of its Accelerators exists any more.

    Args:
        shared: its attributes.
        differs: True if a state made now would differ from it. Only then is an unused Accelerator in a reference cycle
            looked for: that takes a garbage collection of 0.2 s.
    """
    owners = shared.get("_owners")
    if owners is None:
        return
    if differs and any(owner() is not None for owner in owners):
        gc.collect()
    owners[:] = [owner for owner in owners if owner() is not None]
    if not owners:
        AcceleratorState._reset_state()


def _acquire_state(owner: object, precision: str, is_given: bool, cpu: bool, handlers: Handlers) -> AcceleratorState:
    """Return the shared state, which lasts as long as one of the Accelerators that use it.

    Args:
        owner: the Accelerator.
        precision: the mixed precision of a new state.
        is_given: whether an existing state must have it too.
        cpu: use the CPU even if an accelerator is available.
        handlers: those of the Accelerator.
    """
    created = not AcceleratorState._shared_state
    given = handlers.all(InitProcessGroupKwargs)
    options = given[0].to_kwargs() if given else {}
    if PartialState._shared_state:
        PartialState().reconnect(**options)  # the Accelerator before has destroyed the group at its end
    state = AcceleratorState(precision if created or is_given else None, cpu, _from_accelerator=True, **options)
    if created:
        state.__dict__["_owners"] = []
    if "_owners" in state.__dict__:  # else the script has made the state
        state.__dict__["_owners"].append(weakref.ref(owner))
    return state


def release_state(owner: object) -> None:
    """Release the shared state, so that the next Accelerator may choose another precision."""
    owners = AcceleratorState._shared_state.get("_owners", [])
    # The first, which made the state, releases it for all.
    owners[:] = [other for other in owners if owners[0]() is not owner and other() is not owner]


def loader_settings(config: DataLoaderConfiguration | None, split_batches: Any) -> DataLoaderConfiguration:
    """Return the settings of the loaders, with the Accelerator's older argument merged in."""
    if config is not None and not isinstance(config, DataLoaderConfiguration):
        hint = "DataLoaderConfiguration(**settings)" if isinstance(config, dict) else "a DataLoaderConfiguration"
        raise ConfigurationError(f"dataloader_config is a {type(config).__name__}. Pass {hint}.")
    if split_batches is UNSET:
        return config or DataLoaderConfiguration()
    check_flag("split_batches", split_batches, or_none=True)
    if config is not None and config.split_batches != split_batches:
        raise ConfigurationError(
            f"split_batches={split_batches} contradicts dataloader_config.split_batches={config.split_batches}. Set "
            "it in DataLoaderConfiguration only."
        )
    return replace(config or DataLoaderConfiguration(), split_batches=bool(split_batches))


def refuse_unknown(arguments: Iterable[str], accelerator: type) -> None:
    """Raise ArgumentTypeError for arguments that an Accelerator does not have, with what was probably meant."""
    name = next(iter(arguments))
    precisions = {precision: f"mixed_precision={precision!r}" for precision in ("fp16", "bf16", "fp8")}
    settings = {
        field.name: f"{argument}({field.name}=...)"
        for argument, kind in (
            ("dataloader_config=DataLoaderConfiguration", DataLoaderConfiguration),
            ("project_config=ProjectConfiguration", ProjectConfiguration),
        )
        for field in fields(kind)
    }
    own = {
        item.name: item.name
        for item in inspect.signature(accelerator).parameters.values()
        if item.kind != item.VAR_KEYWORD
    }
    known = {**settings, **precisions, **own}
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {known[close[0]]}?" if close else " See help(Accelerator) for those that there are."
    raise ArgumentTypeError(f"Accelerator() has no argument {name}.{hint}")


def rng_settings(rng_types: Iterable[str | RNGType] | None) -> list[str]:
    """Return the generators that loaders synchronise at each epoch; by default the sampler's own."""
    if isinstance(rng_types, str):
        raise ConfigurationError(f"rng_types={str(rng_types)!r} must be a list: rng_types=[{str(rng_types)!r}].")
    if rng_types is not None and not isinstance(rng_types, (list, tuple, set, frozenset)):
        raise ConfigurationError(f"rng_types={rng_types!r} must be a list, such as ['torch', 'generator'].")
    return [str(rng_kind(kind)) for kind in rng_types] if rng_types is not None else [RNGType.GENERATOR.value]
