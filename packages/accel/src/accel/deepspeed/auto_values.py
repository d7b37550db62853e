"""The values that "auto" stands for, once a model is prepared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from accel_state import get_logger
from accel_state.errors import ConfigurationError

from .config import PreparedFacts
from .config_paths import AUTO, autos, drop, get, put
from .optimizer import DummyOptim, DummyScheduler
from .validation import COUNTS, ZERO

logger = get_logger(__name__)

TRAIN, MICRO, STEPS = COUNTS
# DeepSpeed reads "auto" here itself, and means something of its own by it.
_OF_DEEPSPEED = (
    "data_types.keep_in_fp32_modules",
    "zero_optimization.zenflow.",
    "autotuning.",
    "expert_parallel.",
    "tensor_parallel.",
)
# Without the key DeepSpeed takes its own default.
_DEFAULT_OF_DEEPSPEED = (
    "zero_optimization.",
    "fp16.",
    "bf16.",
    "optimizer.params.",
    "aio.",
    "activation_checkpointing.",
)
# Of the hidden size (https://www.deepspeed.ai/docs/config-json/ gives what they mean): elements of the buffers that
# gradients are # reduced in and that parameters are fetched ahead into, and the size up to which a parameter stays
# whole.
_BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    f"{ZERO}.reduce_bucket_size": lambda size: size * size,
    f"{ZERO}.stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    f"{ZERO}.stage3_param_persistence_threshold": lambda size: 10 * size,
}


def complete(config: dict[str, Any], facts: PreparedFacts, name: str, is_train_batch_min: bool) -> None:
    """Replace everything that is "auto", in place.

    Args:
        config: the configuration.
        facts: what ``prepare`` knows.
        name: where the configuration comes from, for messages.
        is_train_batch_min: take the smallest batch of several loaders, not the largest.

    Raises:
        ConfigurationError: a value cannot be found, or contradicts another; the message names both.
    """
    for path, value in facts.more.items():
        if get(config, path) == AUTO:
            put(config, path, value)
    check_dummies(config, facts, name)
    _fill_batches(config, facts, name, is_train_batch_min)
    if config.get("gradient_clipping") in (None, AUTO):
        # Nobody asked for any. Left out, it would depend on the version of DeepSpeed: 1.0 in newer ones, 0 in older.
        config["gradient_clipping"] = 0.0
    _fill_sizes(config, facts, name)
    _fill_optimizer(config, facts)
    _fill_scheduler(config, facts, name)
    _fill_rest(config, name)


def check_dummies(config: dict[str, Any], facts: PreparedFacts, name: str) -> None:
    """Refuse an optimizer or a scheduler that is described twice, or nowhere.

    Raises:
        ConfigurationError: the script and the configuration do not go together.
    """
    optimizer, scheduler = facts.optimizer, facts.scheduler
    if optimizer is None and scheduler is None:
        # A model that is not trained, with a plugin that others are trained with.
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
        described = get(config, f"{section}.type")
        if section in config and not isinstance(value, dummy):
            raise ConfigurationError(
                f"{name} has the {section} {described}, and the script prepares {type(value).__name__} as well. "
                f"Prepare {dummy.__name__} "
                f'in its place (from accel.utils), or remove "{section}" from the configuration.'
            )
        makes_one = section == "scheduler" and isinstance(value, dummy) and value.lr_scheduler_callable is not None
        if section not in config and isinstance(value, dummy) and not makes_one:
            raise ConfigurationError(
                f'the script prepares {dummy.__name__}, but {name} has no "{section}" that it stands for. Add one, or '
                "prepare a real one."
            )
        if section in config and makes_one:
            raise ConfigurationError(
                f"{name} has the scheduler {described}, and DummyScheduler(lr_scheduler_callable=...) makes another "
                "one. Remove one."
            )
    _check_pair(optimizer, scheduler)


def _check_pair(optimizer: Any, scheduler: Any) -> None:
    if optimizer is None:
        raise ConfigurationError(
            f"the script prepares {type(scheduler).__name__} without an optimizer. With DeepSpeed, pass model, "
            "optimizer and scheduler to "
            "one call of prepare()."
        )
    if isinstance(optimizer, DummyOptim) and scheduler is not None and not isinstance(scheduler, DummyScheduler):
        raise ConfigurationError(
            f"the script prepares DummyOptim and {type(scheduler).__name__}, but only DeepSpeed can schedule an "
            "optimizer that it makes. "
            'Prepare DummyScheduler, with a "scheduler" in the configuration or with lr_scheduler_callable=..., or '
            "prepare an optimizer of "
            'torch and remove "optimizer" from the configuration.'
        )


def _fill_batches(config: dict[str, Any], facts: PreparedFacts, name: str, smallest: bool) -> None:
    train, micro, steps = (value if isinstance(value := config.get(key), int) else None for key in COUNTS)
    world = facts.world_size
    if (
        steps is None
        and train is not None
        and micro is not None
        and config.get(STEPS) is None
        and facts.gradient_accumulation_steps == 1
    ):
        steps = max(train // (micro * world), 1)  # as DeepSpeed reads a configuration that leaves it out
    steps_from = (
        f"{STEPS} {steps}"
        if steps is not None
        else f"Accelerator(gradient_accumulation_steps={facts.gradient_accumulation_steps})"
    )
    steps = facts.gradient_accumulation_steps if steps is None else steps
    sizes = [size for size in facts.micro_batch_sizes if size is not None]
    micro_from = f"{MICRO} {micro}"
    if micro is None:
        micro, micro_from = _micro_batch(train, steps, facts, sizes, name, smallest)
    elif sizes and micro not in sizes and facts.optimizer is not None:
        logger.warning_once(
            "%s has %s: %d, but the loaders yield %s samples a process and batch. DeepSpeed counts samples by the "
            "former: "
            'write "auto" there.',
            name,
            MICRO,
            micro,
            " and ".join(str(size) for size in sizes),
        )
    if train is not None and train != micro * steps * world:
        raise ConfigurationError(
            f"{name} has {TRAIN}: {train}, but {micro_from} x {steps_from} x {world} processes make "
            f"{micro * steps * world}. Set "
            f'{TRAIN} to "auto", or change one of the others.'
        )
    config.update({TRAIN: micro * steps * world, MICRO: micro, STEPS: steps})


def _micro_batch(
    train: int | None, steps: int, facts: PreparedFacts, sizes: list[int], name: str, smallest: bool
) -> tuple[int, str]:
    """Samples a process and batch, and where the number comes from."""
    if sizes:
        size = (min if smallest else max)(sizes)
        return size, f"the loader's batch of {size} a process"
    if train is not None:
        size = max(train // (steps * facts.world_size), 1)
        return size, f"{size} whole samples a process and batch"
    if facts.known_micro_batch_size is not None:
        size = facts.known_micro_batch_size
        return size, f"{MICRO} {size} of what was prepared before"
    if facts.optimizer is None:
        return 1, "1 sample a batch"  # DeepSpeed wants a number, also where it trains nothing
    unknown = "loaders without a batch_size" if facts.micro_batch_sizes else "no loader"
    raise ConfigurationError(
        f'{name} has {MICRO}: "auto", and {unknown} came with the model. Pass a loader with a batch_size to the same '
        "prepare(), or set a "
        f"number: in the JSON, or deepspeed_plugin.deepspeed_config[{MICRO!r}] = ..."
    )


def hidden_size(model: Any) -> int | None:
    """The widest hidden size that a model's ``config`` names (``hidden_size``, ``hidden_sizes``, or those of its
    ``text_config``).
    """
    config = getattr(model, "config", None)
    for holder in (config, _attribute(config, "text_config")):
        one, many = _attribute(holder, "hidden_size"), _attribute(holder, "hidden_sizes")
        if isinstance(one, int) and not isinstance(one, bool):
            return one
        if many:
            return int(max(many))
    return None


def _attribute(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _fill_sizes(config: dict[str, Any], facts: PreparedFacts, name: str) -> None:
    asked = [path for path in _BY_HIDDEN_SIZE if get(config, path) == AUTO]
    if not asked:
        return
    size = hidden_size(facts.model)
    if size is None:
        raise ConfigurationError(
            f'{name} has "auto" for {", ".join(asked)}, which follow from model.config.hidden_size or '
            "max(model.config.hidden_sizes), but "
            f"{type(facts.model).__name__} has neither. Set numbers there, or remove them: DeepSpeed has defaults."
        )
    for path in asked:
        put(config, path, _BY_HIDDEN_SIZE[path](size))


def _fill_optimizer(config: dict[str, Any], facts: PreparedFacts) -> None:
    optimizer = facts.optimizer
    if isinstance(optimizer, DummyOptim):
        known = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
        _fill_params(config, "optimizer.params", known)
    elif optimizer is not None:
        # DeepSpeed has tried few optimizers with ZeRO, and wants to hear that others are meant.
        config.setdefault("zero_allow_untested_optimizer", True)


def _fill_scheduler(config: dict[str, Any], facts: PreparedFacts, name: str) -> None:
    asked = [path for path in autos(config.get("scheduler", {}), "scheduler")]
    if not asked:
        return
    scheduler, each = facts.scheduler, max(facts.scheduler_steps_per_step, 1)
    known: dict[str, Any] = {"warmup_min_lr": 0, "warmup_max_lr": _learning_rate(facts.optimizer)}
    if isinstance(scheduler, DummyScheduler):
        known["warmup_num_steps"] = math.ceil(scheduler.warmup_num_steps / each)
        if scheduler.total_num_steps is not None:
            known["total_num_steps"] = math.ceil(scheduler.total_num_steps / each)
        known.update(scheduler.kwargs)
    _fill_params(config, "scheduler.params", known)
    left = [path for path in autos(config["scheduler"], "scheduler")]
    if left:
        raise ConfigurationError(
            f'{name} has "auto" for {", ".join(left)}, and nothing says what that is. Prepare '
            f"DummyScheduler(optimizer, {left[0].rpartition('.')[2]}=...), or set a number in the JSON."
        )


def _learning_rate(optimizer: Any) -> Any:
    if isinstance(optimizer, DummyOptim):
        return optimizer.lr
    groups = getattr(optimizer, "param_groups", None) or [{}]
    return groups[0].get("initial_lr", groups[0].get("lr"))


def _fill_params(config: dict[str, Any], section: str, known: Mapping[str, Any]) -> None:
    params = get(config, section, {})
    for key, value in known.items():
        if isinstance(params, Mapping) and params.get(key) == AUTO and value is not None:
            put(config, f"{section}.{key}", list(value) if isinstance(value, tuple) else value)


def _fill_rest(config: dict[str, Any], name: str) -> None:
    """Whatever is "auto" by now has a default of DeepSpeed, or is a mistake."""
    for path in list(autos(config)):
        if path.startswith(_OF_DEEPSPEED):
            continue
        in_list = path.rpartition(".")[2].isdigit()
        if in_list or not path.startswith(_DEFAULT_OF_DEEPSPEED):
            raise ConfigurationError(
                f'{name} has {path}: "auto", which nothing here gives a value to. Set one, or remove the key.'
            )
        drop(config, path)
