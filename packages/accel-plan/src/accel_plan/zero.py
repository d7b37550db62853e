"""DeepSpeed's ZeRO stages, computed from a trace of an unsharded replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from accel_bigmodel.estimate.meta_model import size_of_model
from accel_bigmodel.estimate.training import TrainingMemory, memory_of_rank
from accel_state.errors import ConfigurationError
from accel_state.options import Resolution
from accel_state.options.deepspeed import read_deepspeed_file

from .models import build_model
from .record import Traffic, sent_bytes
from .trace import RankTrace, TraceTask

HALF_PRECISION: Mapping[str, str] = {"fp16": "float16", "bf16": "bfloat16"}
"""The dtype of each half precision."""


def stage_of(settings: Resolution) -> int:
    """Return the ZeRO stage, of the DeepSpeed configuration file if there is one."""
    path = settings["deepspeed_config_file"]
    if path is None:
        return 2 if settings["zero_stage"] is None else int(settings["zero_stage"])
    content = read_deepspeed_file(path, settings.where("deepspeed_config_file"))
    stage = (content.get("zero_optimization") or {}).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigurationError(f"{path}: zero_optimization.stage={stage!r} is not one of 0, 1, 2, 3.")
    return int(stage)


def without_deepspeed(task: TraceTask, precision: str) -> TraceTask:
    """Return the task with an unsharded replica on each rank, in the dtype that DeepSpeed keeps the model in."""
    variables = {name: value for name, value in task.variables.items() if "DEEPSPEED" not in name}
    variables["ACCELERATE_MIXED_PRECISION"] = "no"
    return replace(task, variables=variables, dtype=HALF_PRECISION.get(precision))


def zero_memory_and_traffic(
    task: TraceTask, replica: RankTrace, strategy: str, optimizer: str, steps: int
) -> tuple[TrainingMemory, tuple[Traffic, ...]]:
    """Return the memory and the communication of a rank.

    Stage 0 all-reduces the gradients once per step. Stages 1 and 2 reduce-scatter them (stage 2 in every micro batch)
    and all-gather the new parameters. Stage 3 all-gathers the parameters in each forward and each backward pass, and
    reduce-scatters the gradients of every micro batch.
    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7.
    """
    ranks, weights = task.world_size, replica.weights
    model = build_model(task.config, task.trust_remote_code)
    in_float32 = 4 * replica.values
    memory = memory_of_rank(
        strategy,
        weights,
        shards=ranks,
        processes=ranks,
        optimizer=optimizer,
        master_bytes=in_float32 if task.dtype is not None else 0,
        layer=size_of_model("", "transformers", model).largest_layer * weights / in_float32,
        activations=replica.activations,
    )
    calls = {
        "zero0": {"all-reduce": 1},
        "zero1": {"reduce-scatter": 1, "all-gather": 1},
        "zero2": {"reduce-scatter": steps, "all-gather": 1},
        "zero3": {"reduce-scatter": steps, "all-gather": 2 * steps},
    }[strategy]
    axis = "dp_replicate" if strategy == "zero0" else "dp_shard"
    traffic = tuple(
        Traffic(kind, axis, ranks, times, times * weights, times * sent_bytes(kind, weights, ranks))
        for kind, times in calls.items()
    )
    return memory, traffic if ranks > 1 else ()
