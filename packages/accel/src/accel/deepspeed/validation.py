"""What cannot go together in a DeepSpeed configuration, found before a process starts an engine with it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options.deepspeed import OFFLOAD_DEVICES

from .config_paths import AUTO, MISSING, drop, get

ZERO = "zero_optimization"
COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# DeepSpeed ignores keys that it does not know, so a slip of the pen would train with a default.
_KNOWN = (
    *COUNTS,
    "gradient_clipping",
    "steps_per_print",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "bfloat16",
    "amp",
    "torch_autocast",
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "sequence_parallel_size",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "sparse_gradients",
    "managed_gradient_accumulation",
    "disable_allgather",
    "dump_state",
    "disable_python_gc",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dataloader_drop_last",
    "log_level",
    "logging",
    "aio",
    "activation_checkpointing",
    "sparse_attention",
    "data_efficiency",
    "data_types",
    "data_sampling",
    "curriculum_learning",
    "progressive_layer_drop",
    "eigenvalue",
    "quantize_training",
    "compression_training",
    "weight_quantization",
    "checkpoint",
    "nebula",
    "datastates",
    "tensorboard",
    "wandb",
    "comet",
    "csv_monitor",
    "comms_logger",
    "flops_profiler",
    "autotuning",
    "elasticity",
    "hybrid_engine",
    "pipeline",
    "tensor_parallel",
    "expert_parallel",
    "use_data_before_expert_parallelism",
    "timers",
    "compile",
    "vocabulary_size",
    "graph_harvesting",
)
_ZERO_PLUS_PLUS = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


_SECTIONS = (
    ZERO,
    f"{ZERO}.offload_optimizer",
    f"{ZERO}.offload_param",
    "fp16",
    "bf16",
    "optimizer",
    "optimizer.params",
    "scheduler",
    "scheduler.params",
)


def check_sections(config: dict[str, Any], name: str) -> None:
    """Refuse a single value where a section belongs; null, which stands for none, is removed.

    Raises:
        ConfigurationError: a section is no object.
    """
    for path in _SECTIONS:
        value = get(config, path, MISSING)
        if value is None:
            drop(config, path)
        elif value is not MISSING and not isinstance(value, dict):
            raise ConfigurationError(
                f"{name} has {path}: {value!r}, which is no section with settings of its own. Write {{...}} there."
            )


def check(config: Mapping[str, Any], name: str) -> None:
    """Refuse what contradicts itself; "auto" may stand anywhere.

    Args:
        config: the configuration, with the script's and the launcher's settings in it.
        name: where it comes from, for messages.

    Raises:
        ConfigurationError: something is misspelt, out of range, or cannot go together.
    """
    _check_names(config, name)
    stage = _check_stage(config, name)
    for key in COUNTS:
        _check_number(config, key, name, least=1, whole=True)
    _check_number(config, "gradient_clipping", name, least=0, whole=False)
    if get(config, "fp16.enabled") is True and get(config, "bf16.enabled") is True:
        raise ConfigurationError(
            f"{name} has fp16.enabled: true and bf16.enabled: true; a model is trained in one of them. Remove the "
            "other."
        )
    for section in ("optimizer", "scheduler"):
        if section in config and not isinstance(get(config, f"{section}.type"), str):
            raise ConfigurationError(
                f'{name} has "{section}" without a "type", such as {_EXAMPLES[section]}. Add it, or remove the section.'
            )
    if stage != AUTO:
        _check_offload(config, name, stage)
        _check_plus_plus(config, name, stage)


_EXAMPLES = {"optimizer": "AdamW", "scheduler": "WarmupLR"}


def check_complete(config: Mapping[str, Any], name: str, world_size: int) -> None:
    """What can only be said of a configuration without "auto".

    Raises:
        ConfigurationError: nvme without a folder, or groups of ZeRO++ that do not divide the processes.
    """
    for kind in ("optimizer", "param"):
        section = f"{ZERO}.offload_{kind}"
        if get(config, f"{section}.device") == "nvme" and not get(config, f"{section}.nvme_path"):
            raise ConfigurationError(
                f"{name} has {section}.device: nvme without a folder. Give {section}.nvme_path, or "
                f"--offload_{kind}_nvme_path, or "
                f"DeepSpeedPlugin(offload_{kind}_nvme_path=...)."
            )
    group = get(config, f"{ZERO}.zero_hpz_partition_size", 1)
    if isinstance(group, int) and group > 1 and world_size % group:
        raise ConfigurationError(
            f"{name} has {ZERO}.zero_hpz_partition_size: {group}, which does not divide the {world_size} processes. "
            "Set it to the number "
            "of processes on a node."
        )


def _check_names(config: Mapping[str, Any], name: str) -> None:
    for key in config:
        close = difflib.get_close_matches(str(key), _KNOWN, n=1, cutoff=0.85)
        if key not in _KNOWN and close:
            raise ConfigurationError(f"{name} has {key!r}, which DeepSpeed would ignore. Did you mean {close[0]!r}?")


def _check_stage(config: Mapping[str, Any], name: str) -> Any:
    zero = config.get(ZERO)
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if stage is None:
        raise ConfigurationError(
            f"{name} does not say which ZeRO stage to train with: {ZERO} is {zero!r}. Please specify the ZeRO "
            "optimization config in "
            f'it, as in "{ZERO}": {{"stage": 2}}, or pass --zero_stage or DeepSpeedPlugin(zero_stage=...); 0 shards '
            "nothing."
        )
    if stage != AUTO and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        raise ConfigurationError(f"{name} has {ZERO}.stage: {stage!r}, which is not one of 0, 1, 2, 3.")
    return stage


def _check_number(config: Mapping[str, Any], key: str, name: str, least: int, whole: bool) -> None:
    value = config.get(key)
    if value is None or value == AUTO:
        return
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not least <= value < math.inf:
        kind = "an integer" if whole else "a number"
        raise ConfigurationError(
            f'{name} has {key}: {value!r}, which is neither "auto" nor {kind} of at least {least}.'
        )


def _check_offload(config: Mapping[str, Any], name: str, stage: int) -> None:
    for kind, least in (("optimizer", 1), ("param", 3)):
        path = f"{ZERO}.offload_{kind}"
        section = get(config, path)
        if section is None:
            continue
        device = section.get("device", "none") if isinstance(section, Mapping) else section
        if device == AUTO:
            continue
        if device is not None and device not in OFFLOAD_DEVICES:
            raise ConfigurationError(
                f"{name} has {path}.device: {device!r}, which is not one of {', '.join(OFFLOAD_DEVICES)}."
            )
        if device not in (None, "none") and stage < least:
            raise ConfigurationError(
                f"{name} has {path}.device: {device}, which needs ZeRO stage "
                f"{least}{' or more' if least < 3 else ''}, not {stage}. Raise "
                "the stage, or set the device to none."
            )


def _check_plus_plus(config: Mapping[str, Any], name: str, stage: int) -> None:
    zero = config[ZERO]
    for key in _ZERO_PLUS_PLUS:
        if zero.get(key) not in (None, True, False, AUTO):
            raise ConfigurationError(f"{name} has {ZERO}.{key}: {zero[key]!r}, which is neither true nor false.")
    used = [key for key in _ZERO_PLUS_PLUS if zero.get(key) not in (None, False, AUTO)]
    group = zero.get("zero_hpz_partition_size", 1)
    if group != AUTO and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
        raise ConfigurationError(
            f"{name} has {ZERO}.zero_hpz_partition_size: {group!r}, which is not an integer of at least 1."
        )
    used += ["zero_hpz_partition_size"] if group != AUTO and group > 1 else []
    if used and stage != 3:
        raise ConfigurationError(
            f"{name} has {', '.join(used)} of ZeRO++, which extends ZeRO stage 3, not {stage}. Set the stage to 3."
        )
