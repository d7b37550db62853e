"""Replaces "auto" in a DeepSpeed configuration when a model is prepared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from accel_state import get_logger
from accel_state.errors import ConfigurationError

from .config import PreparedFacts
from .config_paths import AUTO, auto_paths, delete_value, get_value, set_value
from .optimizer import DummyOptim, DummyScheduler
from .validation import COUNTS, ZERO

logger: Final = get_logger(__name__)

TRAIN, MICRO, STEPS = COUNTS
# DeepSpeed itself interprets "auto" here.
_KEPT_AUTO = (
    "data_types.keep_in_fp32_modules",
    "zero_optimization.zenflow.",
    "autotuning.",
    "expert_parallel.",
    "tensor_parallel.",
)
# DeepSpeed has a default for missing keys here.
_WITH_DEFAULT = ("zero_optimization.", "fp16.", "bf16.", "optimizer.params.", "aio.", "activation_checkpointing.")
# In elements: sizes of the reduce and prefetch buckets, and the size up to which stage 3 does not shard a parameter.
# See https://www.deepspeed.ai/docs/config-json/.
_BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    f"{ZERO}.reduce_bucket_size": lambda size: size * size,
    f"{ZERO}.stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    f"{ZERO}.stage3_param_persistence_threshold": lambda size: 10 * size,
}


def fill_auto(config: dict[str, Any], facts: PreparedFacts, name: str, is_train_batch_min: bool) -> None:
    """Replace all "auto" values in place."""
    _check_dummies(config, facts, name)
    _fill_batch_sizes(config, facts, name, is_train_batch_min)
    if config.get("gradient_clipping") in (None, AUTO):
        # DeepSpeed's default differs between its versions: 0 in older ones, 1.0 in newer ones.
        config["gradient_clipping"] = 0.0
    _fill_bucket_sizes(config, facts, name)
    optimizer = facts.optimizer
    if isinstance(optimizer, DummyOptim):
        known = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
        _fill_params(config, "optimizer.params", known)
    elif optimizer is not None:
        # DeepSpeed refuses optimizers that it has not been tested with unless this is set.
        config.setdefault("zero_allow_untested_optimizer", True)
    _fill_scheduler(config, facts, name)
    for path in list(auto_paths(config)):
        if path.startswith(_KEPT_AUTO):
            continue
        is_list_item = path.rpartition(".")[2].isdigit()
        if is_list_item or not path.startswith(_WITH_DEFAULT):
            raise ConfigurationError(
                f'{name} has {path}: "auto", which cannot be determined here. Set a value, or remove the key.'
            )
        delete_value(config, path)


def _check_dummies(config: dict[str, Any], facts: PreparedFacts, name: str) -> None:
    """Refuse an optimizer or a scheduler that both the script and the configuration define, or neither."""
    optimizer, scheduler = facts.optimizer, facts.scheduler
    if optimizer is None and scheduler is None:
        # The model is not trained; the plugin's optimizer is for other models.
        for section in ("optimizer", "scheduler"):
            config.pop(section, None)
        return
    pairs: list[tuple[str, Any, type[Any]]] = [
        ("optimizer", optimizer, DummyOptim),
        ("scheduler", scheduler, DummyScheduler),
    ]
    for section, value, dummy in pairs:
        if value is None:
            continue
        configured = get_value(config, f"{section}.type")
        if section in config and not isinstance(value, dummy):
            raise ConfigurationError(
                f"{name} has the {section} {configured}, and the script prepares {type(value).__name__} as well. "
                f'Prepare {dummy.__name__} instead (from accel.utils), or remove "{section}" from the configuration.'
            )
        has_callable = isinstance(value, DummyScheduler) and value.lr_scheduler_callable is not None
        if section not in config and isinstance(value, dummy) and not has_callable:
            raise ConfigurationError(
                f'the script prepares {dummy.__name__}, but {name} has no "{section}". Add one, or prepare a real '
                f"{section}."
            )
        if section in config and has_callable:
            raise ConfigurationError(
                f"{name} has the scheduler {configured}, and DummyScheduler(lr_scheduler_callable=...) creates another "
                "one. Remove one."
            )
    if optimizer is None:
        raise ConfigurationError(
            f"the script prepares {type(scheduler).__name__} without an optimizer. With DeepSpeed, pass model, "
            "optimizer and scheduler to one call of prepare()."
        )
    if isinstance(optimizer, DummyOptim) and scheduler is not None and not isinstance(scheduler, DummyScheduler):
        raise ConfigurationError(
            f"the script prepares DummyOptim and {type(scheduler).__name__}, but only DeepSpeed can schedule an "
            'optimizer that it creates. Prepare DummyScheduler, with a "scheduler" in the configuration or with '
            'lr_scheduler_callable=..., or prepare a torch optimizer and remove "optimizer" from the configuration.'
        )


def _fill_batch_sizes(config: dict[str, Any], facts: PreparedFacts, name: str, smallest: bool) -> None:
    train, micro, steps = (value if isinstance(value := config.get(key), int) else None for key in COUNTS)
    world, accelerator_steps = facts.world_size, facts.gradient_accumulation_steps
    # DeepSpeed derives missing accumulation steps the same way.
    if train is not None and micro is not None and config.get(STEPS) is None and accelerator_steps == 1:
        steps = max(train // (micro * world), 1)
    steps_source = f"{STEPS}={steps}"
    if steps is None:
        steps, steps_source = accelerator_steps, f"Accelerator(gradient_accumulation_steps={accelerator_steps})"
    sizes = [size for size in facts.micro_batch_sizes if size is not None]
    micro_source = f"{MICRO}={micro}"
    if micro is None:
        micro, micro_source = _derive_micro_batch(train, steps, facts, sizes, name, smallest)
    elif sizes and micro not in sizes and facts.optimizer is not None:
        logger.warning_once(
            "%s has %s: %d, but the loaders have batch sizes of %s per process. DeepSpeed counts samples with the "
            'configured number; write "auto" there.',
            name,
            MICRO,
            micro,
            " and ".join(str(size) for size in sizes),
        )
    product = micro * steps * world
    if train is not None and train != product:
        raise ConfigurationError(
            f"{name} has {TRAIN}: {train}, but {micro_source} x {steps_source} x {world} processes = {product}. "
            f'Set {TRAIN} to "auto", or change one of the factors.'
        )
    config.update({TRAIN: product, MICRO: micro, STEPS: steps})


def _derive_micro_batch(
    train: int | None, steps: int, facts: PreparedFacts, sizes: list[int], name: str, smallest: bool
) -> tuple[int, str]:
    """Return the samples per process and batch, and how the number was determined."""
    if sizes:
        size = (min if smallest else max)(sizes)
        return size, f"the loader's batch size of {size}"
    if train is not None:
        size = max(train // (steps * facts.world_size), 1)
        return size, f"a derived micro batch of {size}"
    if facts.known_micro_batch_size is not None:
        size = facts.known_micro_batch_size
        return size, f"{MICRO}={size} of an earlier prepare()"
    if facts.optimizer is None:
        return 1, "a micro batch of 1"  # DeepSpeed requires a number even if nothing is trained
    unknown = "loaders without a batch_size" if facts.micro_batch_sizes else "no loader"
    raise ConfigurationError(
        f'{name} has {MICRO}: "auto", but {unknown} came with the model. Pass a loader with a batch_size to the same '
        f"prepare(), or set a number: in the JSON, or deepspeed_plugin.deepspeed_config[{MICRO!r}] = ..."
    )


def hidden_size(model: Any) -> int | None:
    """Return the largest hidden size in ``model.config`` or its ``text_config`` (``hidden_size``, ``hidden_sizes``)."""
    config = getattr(model, "config", None)
    for section in (config, _read_key(config, "text_config")):
        size, sizes = _read_key(section, "hidden_size"), _read_key(section, "hidden_sizes")
        if isinstance(size, int) and not isinstance(size, bool):
            return size
        if sizes:
            return int(max(sizes))
    return None


def _read_key(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _fill_bucket_sizes(config: dict[str, Any], facts: PreparedFacts, name: str) -> None:
    paths = [path for path in _BY_HIDDEN_SIZE if get_value(config, path) == AUTO]
    if not paths:
        return
    size = hidden_size(facts.model)
    if size is None:
        raise ConfigurationError(
            f'{name} has "auto" for {", ".join(paths)}, which follow from model.config.hidden_size or '
            f"max(model.config.hidden_sizes), but {type(facts.model).__name__} has neither. Set numbers, or remove the "
            "keys to use DeepSpeed's defaults."
        )
    for path in paths:
        set_value(config, path, _BY_HIDDEN_SIZE[path](size))


def _fill_scheduler(config: dict[str, Any], facts: PreparedFacts, name: str) -> None:
    if not any(auto_paths(config.get("scheduler", {}))):
        return
    scheduler, optimizer = facts.scheduler, facts.optimizer
    if isinstance(optimizer, DummyOptim):
        learning_rate = optimizer.lr
    else:
        group = (getattr(optimizer, "param_groups", None) or [{}])[0]
        learning_rate = group.get("initial_lr", group.get("lr"))
    known: dict[str, Any] = {"warmup_min_lr": 0, "warmup_max_lr": learning_rate}
    if isinstance(scheduler, DummyScheduler):
        divisor = max(facts.scheduler_steps_per_step, 1)
        # DeepSpeed refuses a warm-up of 0 steps; its schedulers do not warm up in the first step.
        known["warmup_num_steps"] = max(1, math.ceil(scheduler.warmup_num_steps / divisor))
        if scheduler.total_num_steps is not None:
            known["total_num_steps"] = math.ceil(scheduler.total_num_steps / divisor)
        known.update(scheduler.kwargs)
    _fill_params(config, "scheduler.params", known)
    left = list(auto_paths(config["scheduler"], "scheduler"))
    if left:
        raise ConfigurationError(
            f'{name} has "auto" for {", ".join(left)}, but no value was given. Prepare '
            f"DummyScheduler(optimizer, {left[0].rpartition('.')[2]}=...), or set a number in the JSON."
        )


def _fill_params(config: dict[str, Any], section: str, known: Mapping[str, Any]) -> None:
    params = get_value(config, section, {})
    for key, value in known.items():
        if isinstance(params, Mapping) and params.get(key) == AUTO and value is not None:
            set_value(config, f"{section}.{key}", list(value) if isinstance(value, tuple) else value)
