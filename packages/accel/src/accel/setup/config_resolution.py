"""Resolves arguments and environment into the objects that an Accelerator delegates to, once."""

from __future__ import annotations

import difflib
import gc
import inspect
import weakref
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, Final

from accel_data import DataLoaderConfiguration
from accel_state import (
    AcceleratorState,
    ConfigurationError,
    GradientAccumulationPlugin,
    PartialState,
    RNGType,
    get_logger,
)
from accel_state.accumulation import check_steps
from accel_state.arguments import check_flag
from accel_state.errors import ArgumentTypeError, check_type
from accel_state.options import CoreOptions
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
from .registry import choose, make_strategy

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
    _drop_stale_state(shared, differs=(wanted, dynamo) != (shared.get("_mixed_precision"), shared.get("dynamo_plugin")))
    state = _acquire_state(owner, wanted, mixed_precision is not None, cpu, handlers)
    used = state.mixed_precision
    recipes = handlers.all(FP8Kwargs)
    if recipes:
        _check_recipes(recipes, used)
    process = PartialState()
    strategy = make_strategy(strategy, chosen, process, handlers)
    checkpointing = ActivationCheckpointingKwargs.launched()
    if checkpointing is not None:
        handlers.add(checkpointing)
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


def accumulation_settings(
    steps: int, plugin: GradientAccumulationPlugin | None, launched: int | None
) -> GradientAccumulationPlugin:
    """Return the settings of gradient accumulation; the launcher's number of steps overrides the script's."""
    check_steps("gradient_accumulation_steps", steps)
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


def dynamo_settings(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return the settings of compilation."""
    if plugin is not None and backend is not None:
        raise ConfigurationError(
            "dynamo_backend and dynamo_plugin were both given. Put the back end into TorchDynamoPlugin(backend=...)."
        )
    if plugin is not None:
        check_type(plugin, TorchDynamoPlugin, "dynamo_plugin", f"Pass TorchDynamoPlugin(backend={plugin!r}).")
    return plugin or TorchDynamoPlugin(backend=backend)


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


def rng_settings(rng_types: Iterable[str | RNGType] | None) -> list[RNGType | str]:
    """Return the generators that loaders synchronise at each epoch; by default the sampler's own."""
    if isinstance(rng_types, str):
        raise ConfigurationError(f"rng_types={str(rng_types)!r} must be a list: rng_types=[{str(rng_types)!r}].")
    if rng_types is not None and not isinstance(rng_types, (list, tuple, set, frozenset)):
        raise ConfigurationError(f"rng_types={rng_types!r} must be a list, such as ['torch', 'generator'].")
    return [rng_kind(kind) for kind in rng_types] if rng_types is not None else [RNGType.GENERATOR]
