"""DeepSpeed's stages, by arithmetic: what copies of a model hold is traced, and then divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from accel_bigmodel.estimate.meta_model import size_of_model
from accel_bigmodel.estimate.training import TrainingMemory, memory_of_rank
from accel_state.errors import ConfigurationError
from accel_state.options import Resolution
from accel_state.options.deepspeed_file import read_deepspeed_file

from .models import build_model
from .record import Collective, sent_bytes
from .trace import Measured, Task

HALF: Mapping[str, str] = {"fp16": "float16", "bf16": "bfloat16"}
"""The type of half precision by its name."""


def stage_of(settings: Resolution) -> int:
    """DeepSpeed's stage: that of its own file where there is one.

    Raises:
        ConfigurationError: the file cannot be read, or has another stage.
    """
    path = settings["deepspeed_config_file"]
    if path is None:
        return 2 if settings["zero_stage"] is None else int(settings["zero_stage"])
    content = read_deepspeed_file(path, settings.where("deepspeed_config_file"))
    stage = (content.get("zero_optimization") or {}).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigurationError(f"{path}: zero_optimization.stage={stage!r} is not one of 0, 1, 2, 3.")
    return int(stage)


def as_copies(task: Task, precision: str) -> Task:
    """The task without DeepSpeed: a copy on each rank, in the type that DeepSpeed keeps the model in."""
    variables = {name: value for name, value in task.variables.items() if "DEEPSPEED" not in name}
    return replace(task, variables={**variables, "ACCELERATE_MIXED_PRECISION": "no"}, dtype=HALF.get(precision))


def zero(
    task: Task, measured: Measured, strategy: str, optimizer: str, steps: int
) -> tuple[TrainingMemory, tuple[Collective, ...]]:
    """What a rank holds and sends.

    With S the bytes of the parameters in the type that the model computes in: stage 0 all-reduces the gradients once a
    step; stages 1 and 2 reduce-scatter them (stage 2 with every micro batch) and gather the new parameters; stage 3
    gathers the parameters in each forward and each backward, and reduce-scatters the gradients of every micro batch.
    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7.

    Args:
        task: what was traced.
        measured: a copy.
        strategy: "zero0" to "zero3".
        optimizer: what keeps its state.
        steps: micro batches in an optimizer step.
    """
    ranks, own = task.world_size, measured.weights
    model = build_model(task.config, task.trust_remote_code)
    width = 0.5 if task.dtype is not None else 1.0
    memory = memory_of_rank(
        strategy,
        own,
        shards=ranks,
        processes=ranks,
        optimizer=optimizer,
        master_bytes=own / width if task.dtype is not None else 0,
        layer=size_of_model("", "transformers", model).largest_layer * width,
        activations=measured.activations,
    )
    wanted = {
        "zero0": {"all-reduce": 1},
        "zero1": {"reduce-scatter": 1, "all-gather": 1},
        "zero2": {"reduce-scatter": steps, "all-gather": 1},
        "zero3": {"reduce-scatter": steps, "all-gather": 2 * steps},
    }[strategy]
    axis = "dp_replicate" if strategy == "zero0" else "dp_shard"
    sent = [
        Collective(kind, axis, ranks, times, times * own, times * sent_bytes(kind, own, ranks))
        for kind, times in wanted.items()
    ]
    return memory, tuple(sent if ranks > 1 else ())
