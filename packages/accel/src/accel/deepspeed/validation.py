"""Checks of a DeepSpeed configuration before an engine is created from it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options.deepspeed import OFFLOAD_DEVICES

from .config_paths import AUTO, MISSING, delete_value, get_value, set_value

ZERO = "zero_optimization"
COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
GROUP_SIZE = "zero_hpz_partition_size"
QUANTIZED_KEYS = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
# Settings of a stage and above: the value that turns them off, and the lowest stage.
_BY_STAGE: dict[str, tuple[Any, int]] = {
    "offload_optimizer.device": ("none", 1),
    "offload_param.device": ("none", 3),
    GROUP_SIZE: (1, 3),
    **dict.fromkeys(QUANTIZED_KEYS, (False, 3)),
}
# DeepSpeed ignores keys that it does not know, so a misspelt one would train with the default.
_KNOWN_KEYS = (
    *COUNTS,
    *"""
    gradient_clipping steps_per_print optimizer scheduler fp16 bf16 bfloat16 amp torch_autocast zero_optimization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer communication_data_type
    seq_parallel_communication_data_type sequence_parallel_size prescale_gradients gradient_predivide_factor
    gradient_allreduce_op sparse_gradients managed_gradient_accumulation disable_allgather dump_state disable_python_gc
    wall_clock_breakdown memory_breakdown dataloader_drop_last log_level logging aio activation_checkpointing
    sparse_attention data_efficiency data_types data_sampling curriculum_learning progressive_layer_drop eigenvalue
    quantize_training compression_training weight_quantization checkpoint nebula datastates tensorboard wandb comet
    csv_monitor comms_logger flops_profiler autotuning elasticity hybrid_engine pipeline tensor_parallel expert_parallel
    use_data_before_expert_parallelism timers compile vocabulary_size graph_harvesting
    """.split(),
)
_SECTIONS = (
    *(ZERO, f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param", "fp16", "bf16"),
    *("optimizer", "optimizer.params", "scheduler", "scheduler.params"),
)
_EXAMPLE_TYPES = {"optimizer": "AdamW", "scheduler": "WarmupLR"}


def check_section_types(config: dict[str, Any], name: str) -> None:
    """Remove sections that are null, and refuse sections that are not objects."""
    for path in _SECTIONS:
        value = get_value(config, path, MISSING)
        if value is None:
            delete_value(config, path)
        elif value is not MISSING and not isinstance(value, dict):
            raise ConfigurationError(f"{name} has {path}: {value!r}, which must be a JSON object: {{...}}.")


def check_config(config: Mapping[str, Any], name: str) -> None:
    """Check a configuration in which any value may still be "auto"."""
    for key in config:
        close = difflib.get_close_matches(str(key), _KNOWN_KEYS, n=1, cutoff=0.85)
        if key not in _KNOWN_KEYS and close:
            raise ConfigurationError(f"{name} has {key!r}, which DeepSpeed would ignore. Did you mean {close[0]!r}?")
    stage = _check_stage(config, name)
    for key in COUNTS:
        _check_number(config, key, name, (int,), minimum=1)
    _check_number(config, "gradient_clipping", name, (int, float), minimum=0)
    if get_value(config, "fp16.enabled") is True and get_value(config, "bf16.enabled") is True:
        raise ConfigurationError(
            f"{name} has fp16.enabled: true and bf16.enabled: true; only one may be enabled. Remove the other."
        )
    for section, example in _EXAMPLE_TYPES.items():
        if section in config and not isinstance(get_value(config, f"{section}.type"), str):
            raise ConfigurationError(
                f'{name} has "{section}" without a "type", such as {example}. Add it, or remove the section.'
            )
    for kind in ("optimizer", "param"):
        path = f"{ZERO}.offload_{kind}.device"
        device = get_value(config, path, "none")
        if device not in (None, AUTO, *OFFLOAD_DEVICES):
            raise ConfigurationError(
                f"{name} has {path}: {device!r}, which is not one of {', '.join(OFFLOAD_DEVICES)}."
            )
    if stage == AUTO:
        return
    zero = config[ZERO]
    for key in QUANTIZED_KEYS:
        if zero.get(key) not in (None, True, False, AUTO):
            raise ConfigurationError(f"{name} has {ZERO}.{key}: {zero[key]!r}, which is neither true nor false.")
    size = zero.get(GROUP_SIZE, 1)
    if size != AUTO and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ConfigurationError(f"{name} has {ZERO}.{GROUP_SIZE}: {size!r}, which is not an integer of at least 1.")


def turn_off_unused(config: dict[str, Any], name: str) -> list[str]:
    """Turn off what has no effect at the configuration's ZeRO stage, in place; recipes often set it for every stage.

    Returns:
        A message for each setting.
    """
    stage = get_value(config, f"{ZERO}.stage")
    if stage == AUTO:
        return []
    messages = []
    for key, (off, least) in _BY_STAGE.items():
        value = get_value(config, f"{ZERO}.{key}")
        if value not in (None, AUTO, off) and stage < least:
            messages.append(f"{name} has {ZERO}.{key}: {value}, which has no effect below ZeRO stage {least}.")
            set_value(config, f"{ZERO}.{key}", off)
    return messages


def check_resolved(config: Mapping[str, Any], name: str, world_size: int) -> None:
    """Check what requires a configuration without "auto"."""
    for kind in ("optimizer", "param"):
        section = f"{ZERO}.offload_{kind}"
        if get_value(config, f"{section}.device") == "nvme" and not get_value(config, f"{section}.nvme_path"):
            raise ConfigurationError(
                f"{name} has {section}.device: nvme without a path. Set {section}.nvme_path, "
                f"--offload_{kind}_nvme_path or DeepSpeedPlugin(offload_{kind}_nvme_path=...)."
            )
    group_size = get_value(config, f"{ZERO}.{GROUP_SIZE}", 1)
    if isinstance(group_size, int) and group_size > 1 and world_size % group_size:
        raise ConfigurationError(
            f"{name} has {ZERO}.{GROUP_SIZE}: {group_size}, which does not divide the {world_size} "
            "processes. Set it to the number of processes per node."
        )


def _check_stage(config: Mapping[str, Any], name: str) -> Any:
    zero = config.get(ZERO)
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if stage is None:
        raise ConfigurationError(
            f"{name} does not set the ZeRO stage: {ZERO} is {zero!r}. Please specify the ZeRO optimization config in "
            f'it, as in "{ZERO}": {{"stage": 2}}, or pass --zero_stage or DeepSpeedPlugin(zero_stage=...); 0 disables '
            "sharding."
        )
    if stage != AUTO and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        raise ConfigurationError(f"{name} has {ZERO}.stage: {stage!r}, which is not one of 0, 1, 2, 3.")
    return stage


def _check_number(config: Mapping[str, Any], key: str, name: str, kinds: tuple[type, ...], minimum: int) -> None:
    value: Any = config.get(key)
    if value is None or value == AUTO:
        return
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not minimum <= value < math.inf:
        kind = "a number" if float in kinds else "an integer"
        raise ConfigurationError(
            f'{name} has {key}: {value!r}, which is neither "auto" nor {kind} of at least {minimum}.'
        )
