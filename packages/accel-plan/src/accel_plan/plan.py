"""Plans a run: what each rank of a configuration holds, sends and reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from accel.parallel.axis_settings import PipelineParallelConfig
from accel_bigmodel.estimate.training import DIVISIONS, OPTIMIZER_COPIES, TrainingMemory, memory_of_rank
from accel_state.errors import ConfigurationError
from accel_state.hardware import HardwareProfile
from accel_state.options import Resolution

from ._torch_compat import has_meta_collectives
from .memory import StepMemory
from .models import build_model, model_config
from .operations import Passes
from .peak import PeakMemory, peak_of
from .pipelines import PipelinePlan, pipeline_settings, trace_pipeline
from .planners import plan_by
from .record import Axes, Traffic, coordinates_of
from .reserve import Reserve, reserve_of
from .schedules import TIMED_SCHEDULES
from .timing import FP8, Speeds, StepTime, bubble_seconds, step_time
from .trace import RankBatch, RankTrace, TraceTask, data_ranks, trace_blocks
from .zero import HALF_PRECISION, stage_of, without_deepspeed, zero_memory_and_traffic

DEFAULT_SEQ_LENGTH = 2048
MAX_PROCESSES = 1_000_000


@dataclass(frozen=True)
class PlanRequest:
    """What to plan; the options of ``accel plan``."""

    settings: Resolution  # the resolved options of accel launch
    model: str
    rank: int = 0
    batch_size: int = 1  # of the loader
    seq_length: int | None = None  # None: 2,048, or the model's maximum if it is smaller
    optimizer: str = "adamw"
    implementation: str | None = None  # of the optimizer; None: torch's default on the device
    memory_limit: int | None = None  # bytes of the device
    hardware: HardwareProfile | None = None  # None: without the time of a step
    split_batches: bool = False
    all_blocks: bool = False
    trust_remote_code: bool = False
    # Of a pipeline; None: the default of PipelineParallelConfig.
    schedule: str | None = None
    num_microbatches: int | None = None
    stages_per_rank: int | None = None


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds, sends and reads."""

    model: str
    strategy: str  # a key of accel_bigmodel.estimate.training.DIVISIONS, or that of a planner
    processes: int  # number of ranks
    rank: int
    coordinates: Mapping[str, tuple[int, int]]  # on each mesh axis, with the size of the axis
    parameters: int  # number of elements in the full model
    memory: TrainingMemory  # in bytes
    collectives: tuple[Traffic, ...]  # of an optimizer step
    batch: RankBatch
    seq_length: int  # tokens per sample
    local_length: int  # tokens per sample that this rank processes
    steps: int  # micro batches per optimizer step
    mixed_precision: str
    optimizer: str
    offloaded: tuple[str, ...] = ()  # the parts of memory in CPU memory or on a drive
    offloads_activations: bool = False  # whether inputs of checkpointed blocks, counted here, are in CPU memory
    pipeline: PipelinePlan | None = None
    peak: PeakMemory | None = None  # None if the memory of a step is not followed
    unfollowed: str = ""  # what of the configuration is the reason
    implementation: str = ""  # of the optimizer in that step
    memory_limit: int | None = None  # bytes of the device
    time: StepTime | None = None  # None without hardware, or if it is not modelled
    untimed: str = ""  # what of the configuration is the reason
    hardware: str = ""  # the name of its profile
    operations: Passes = field(default=(), repr=False)  # what the time is made of
    step: StepMemory | None = field(default=None, repr=False, compare=False)  # what the peak is one of
    reserve: Reserve | None = None  # None without a peak, or if the hardware's profile has none

    @property
    def total(self) -> int:
        """Bytes at the peak of a step; without one, at the end of a backward pass."""
        return self.memory.total if self.peak is None else self.peak.total

    @property
    def needed(self) -> int:
        """Bytes that the device must have: the total and the reserve."""
        return self.total + (0 if self.reserve is None else self.reserve.total)

    def as_dict(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        content = asdict(replace(self, operations=(), step=None))
        del content["operations"], content["step"]
        content["memory"]["total"] = self.memory.total
        content["needed"] = None if self.peak is None else self.needed
        content["coordinates"] = {
            name: {"coordinate": coordinate, "size": size} for name, (coordinate, size) in self.coordinates.items()
        }
        return content


def make_plan(request: PlanRequest) -> RankPlan:
    """Check a configuration, and compute what one rank holds, sends and reads.

    Raises:
        ConfigurationError: the configuration cannot train the model on these ranks; the message names the value and
            what is allowed.
        MissingDependencyError: transformers is not installed.
    """
    if request.settings["strategy"]:
        raise ConfigurationError(
            f"{request.settings.where('strategy')}: accel plan does not know what strategies of that option hold and "
            "send. Leave it out; it supports DDP, FSDP, meshes, DeepSpeed and Megatron-LM by options of their own."
        )
    if request.settings["use_megatron_lm"]:
        return _plan_megatron(request)
    if not has_meta_collectives():
        raise ConfigurationError(
            f"a plan needs a newer torch than {torch.__version__}, whose collectives refuse tensors without values. "
            "Upgrade torch; 2.13 works."
        )
    settings = request.settings
    _check_supported(settings, request.hardware)
    task = _trace_task(request)
    strategy, axes, optimizer = strategy_of(settings), task.axes, request.optimizer
    steps, precision = int(settings["gradient_accumulation_steps"] or 1), settings["mixed_precision"] or "no"
    pipeline_plan: PipelinePlan | None = None
    ranks: tuple[Passes, ...] = ()  # of a pipeline
    # Blocks of which only some are checkpointed are not alike.
    every = (settings["fsdp_activation_checkpointing_every"], settings["activation_checkpointing_every"] or 1)
    all_blocks = request.all_blocks or max(every) > 1
    if task.pipeline is not None:
        traced, batch = trace_pipeline(task, task.pipeline, all_blocks)
        memories = [_memory_of(item, strategy, axes, optimizer, precision) for item in traced.traces]
        totals = traced.peaks() if task.follow else [memory.total for memory in memories]
        pipeline_plan = traced.plan(task.pipeline, len(batch.samples), totals)
        result, memory = traced.traces[traced.position], memories[traced.position]
        ranks = tuple(item.operations for item in traced.traces)
        traffic = result.traffic
    elif settings["use_deepspeed"]:
        task = without_deepspeed(task, precision)
        result, batch = trace_blocks(task, all_blocks)
        memory, traffic = zero_memory_and_traffic(task, result, strategy, optimizer, steps)
    else:
        result, batch = trace_blocks(task, all_blocks)
        memory, traffic = _memory_of(result, strategy, axes, optimizer, precision), result.traffic
    peak = None if result.step is None else peak_of(result.step)
    return RankPlan(
        model=request.model,
        strategy=strategy,
        processes=task.world_size,
        rank=request.rank,
        coordinates={name: (value, axes[name]) for name, value in coordinates_of(request.rank, axes).items()},
        parameters=result.values,
        memory=memory,
        collectives=traffic,
        batch=batch,
        seq_length=task.seq_length,
        local_length=task.seq_length // axes.get("cp", 1) // axes.get("sp", 1),
        steps=steps,
        mixed_precision=precision,
        optimizer=optimizer,
        offloaded=_offloaded_parts(settings),
        offloads_activations=_offloads_activations(settings),
        pipeline=pipeline_plan,
        peak=peak,
        reserve=None if peak is None else reserve_of(request.hardware, traffic, task.world_size, peak.total),
        unfollowed=_unfollowed(settings, task.pipeline),
        implementation=result.implementation,
        memory_limit=request.memory_limit,
        operations=result.operations,
        step=result.step,
        time=_time_of(request, task, result.operations, ranks, batch, steps),
        untimed=_untimed(settings, task.pipeline),
        hardware=request.hardware.key if request.hardware is not None else "",
    )


def _time_of(
    request: PlanRequest,
    task: TraceTask,
    operations: Passes,
    ranks: tuple[Passes, ...],  # of a pipeline
    batch: RankBatch,
    steps: int,
) -> StepTime | None:
    settings, hardware = request.settings, request.hardware
    if hardware is None or not operations:
        return None
    precision = settings["mixed_precision"] or "no"
    overlaps = bool(settings["parallelism_config_enable_async_tp"])
    speeds = Speeds(hardware, is_compiled(settings), fp8=precision == FP8, overlaps_products=overlaps)
    bubble = 0.0
    if task.pipeline is not None:
        position = ranks.index(operations)
        count = task.pipeline.check_batch(len(batch.samples), len(ranks))
        stages = task.pipeline.stages_per_rank or 1
        bubble = bubble_seconds(ranks, position, task.pipeline.schedule, count, stages, speeds)
    dtype = {"no": "fp32", FP8: "bf16"}.get(precision, precision)
    tokens = batch.global_size * steps * task.seq_length
    return step_time(operations, speeds, tokens, task.world_size, dtype, bubble)


def is_compiled(settings: Resolution) -> bool:
    """Return True if torch.compile compiles the model."""
    return str(settings["dynamo_backend"] or "no").lower() != "no"


def _untimed(settings: Resolution, pipeline: PipelineParallelConfig | None) -> str:
    """Why the time of a step is not modelled; empty if it is."""
    if settings["use_deepspeed"]:
        return f"of {strategy_of(settings)}"  # computed from the trace of a replica
    if _offloaded_parts(settings):
        return "with offloaded parts"  # transfers to and from the host are not traced
    if _offloads_activations(settings):
        return "with activations in host memory"
    if pipeline is not None and pipeline.schedule not in TIMED_SCHEDULES:
        return f"in the schedule {pipeline.schedule}"
    return ""


def _plan_megatron(request: PlanRequest) -> RankPlan:
    """Return the plan of accel-megatron's own planner."""
    settings, processes = request.settings, _process_count(request.settings, request.rank)
    config = model_config(request.model, request.trust_remote_code)
    length = _sequence_length(request.seq_length, config)
    given = {name: getattr(request, name) for name in ("rank", "batch_size", "optimizer", "split_batches")}
    model = build_model(config, request.trust_remote_code)
    planned = plan_by("megatron", settings, model, processes=processes, seq_length=length, **given)
    return RankPlan(
        model=request.model,
        processes=processes,
        rank=request.rank,
        seq_length=length,
        steps=int(settings["gradient_accumulation_steps"] or 1),
        mixed_precision=settings["mixed_precision"] or "no",
        optimizer=request.optimizer,
        memory_limit=request.memory_limit,
        unfollowed=f"of {planned['strategy']}",
        untimed=f"of {planned['strategy']}",
        hardware=request.hardware.key if request.hardware is not None else "",
        **planned,
    )


def _trace_task(request: PlanRequest) -> TraceTask:
    """Return what to trace, after a check of the numbers."""
    settings = request.settings
    processes = _process_count(settings, request.rank)
    config = model_config(request.model, request.trust_remote_code)
    seq_length, axes = _sequence_length(request.seq_length, config), axes_of(settings, processes)
    ranks = data_ranks(axes)
    if request.split_batches and request.batch_size % ranks:
        raise ConfigurationError(
            f"--split_batches: a batch of {request.batch_size} samples cannot be divided over {ranks} data-parallel "
            f"ranks. Allowed: multiples of {ranks}, or --batch_size per rank without --split_batches."
        )
    pipeline = pipeline_settings(
        settings,
        schedule=request.schedule,
        num_microbatches=request.num_microbatches,
        stages_per_rank=request.stages_per_rank,
    )
    return TraceTask(
        config=config,
        rank=request.rank,
        world_size=processes,
        local_world_size=processes // settings["num_machines"],
        variables=_traced_variables(settings),
        axes=axes,
        batch_size=request.batch_size,
        seq_length=seq_length,
        split_batches=request.split_batches,
        trust_remote_code=request.trust_remote_code,
        pipeline=pipeline,
        optimizer=request.optimizer,
        implementation=request.implementation or ("for_loop" if settings["cpu"] else None),
        on_cpu=bool(settings["cpu"]),
        follow=not _unfollowed(settings, pipeline),
        timed=request.hardware is not None and not _untimed(settings, pipeline),
    )


def _unfollowed(settings: Resolution, pipeline: PipelineParallelConfig | None) -> str:
    """Why the memory of a step is not followed; empty if it is."""
    if settings["use_deepspeed"]:
        return f"of {strategy_of(settings)}"  # not traced
    if _offloaded_parts(settings):
        return "with offloaded parts"  # on the CPU here like all others
    if pipeline is not None and strategy_of(settings) != "ddp":
        return "of a pipeline with sharded parameters"  # real ranks took up to 10% more than was followed
    if settings["use_parallelism_config"] and settings["parallelism_config_ep_size"] > 1:
        return "with distributed experts"  # real ranks took up to a fifth more than was followed
    return ""


def _offloaded_parts(settings: Resolution) -> tuple[str, ...]:
    if _uses_fsdp(settings) and settings["fsdp_offload_params"]:
        return "weights", "gradients", "optimizer"
    if not settings["use_deepspeed"]:
        return ()
    devices = {"weights": "offload_param_device", "optimizer": "offload_optimizer_device"}
    return tuple(part for part, name in devices.items() if settings[name] not in (None, "none"))


def _offloads_activations(settings: Resolution) -> bool:
    """Return True if inputs of checkpointed blocks are kept in host memory."""
    if _uses_fsdp(settings):
        return bool(settings["fsdp_activation_checkpointing"] and settings["fsdp_activation_checkpointing_offload"])
    return bool(settings["activation_checkpointing"] and settings["activation_checkpointing_offload"])


def _traced_variables(settings: Resolution) -> dict[str, str]:
    """Return the launcher's variables; a step in 8 bits is traced in bf16, which has the same messages.

    Products that overlap with their communication are traced without: their operators hide what they send.
    """
    variables = settings.environment()
    if settings["parallelism_config_enable_async_tp"]:
        variables["PARALLELISM_CONFIG_ENABLE_ASYNC_TP"] = "false"
    return {**variables, "ACCELERATE_MIXED_PRECISION": "bf16"} if settings["mixed_precision"] == FP8 else variables


def _check_supported(settings: Resolution, hardware: HardwareProfile | None) -> None:
    if settings["tpu"]:
        raise ConfigurationError(
            f"{settings.where('tpu')}: accel plan does not support TPUs. It supports DDP, FSDP, meshes, DeepSpeed and "
            "Megatron-LM."
        )
    if settings["use_deepspeed"] and settings["use_parallelism_config"]:
        raise ConfigurationError(
            "settings were given for deepspeed, mesh, but the two do not combine: one strategy trains a model. Pass "
            "the settings of one of them."
        )
    if settings["mixed_precision"] == FP8 and hardware is None:
        raise ConfigurationError(
            f"{settings.where('mixed_precision')}: fp8 layers cannot be traced without values. Plan with "
            "--mixed_precision bf16, which has the same parameters, gradients and optimizer state, or add --hardware: "
            "the time is that of products in 8 bits, and the rest of the report that of bf16."
        )


def _process_count(settings: Resolution, rank: int) -> int:
    processes, machines = settings["num_processes"], settings["num_machines"]
    if processes is None:
        raise ConfigurationError("the configuration does not set the number of processes. Set --num_processes.")
    if processes > MAX_PROCESSES:
        raise ConfigurationError(f"{settings.where('num_processes')}: a plan is for up to {MAX_PROCESSES} processes.")
    if processes % machines:
        raise ConfigurationError(
            f"num_processes={processes} is not divisible by num_machines={machines}. Set --num_processes to a "
            f"multiple of {machines}, or change --num_machines."
        )
    if not 0 <= rank < processes:
        raise ConfigurationError(f"--rank {rank}: with {processes} process(es), ranks go from 0 to {processes - 1}.")
    return int(processes)


def _sequence_length(requested: int | None, config: Any) -> int:
    text_config = getattr(config, "get_text_config", lambda: config)()
    maximum = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(maximum, int):
        return DEFAULT_SEQ_LENGTH if requested is None else requested
    if requested is not None and requested > maximum:
        raise ConfigurationError(
            f"--seq_length {requested}: the model takes at most max_position_embeddings={maximum} tokens. Set a "
            "smaller number, or use another configuration."
        )
    return min(DEFAULT_SEQ_LENGTH, maximum) if requested is None else requested


def _uses_fsdp(settings: Resolution) -> bool:
    """Return True if FSDP shards the model: one process trains without it, with a warning."""
    return bool(settings["use_fsdp"]) and settings["num_processes"] != 1


def strategy_of(settings: Resolution) -> str:
    """Return how the model is sharded, as a key of ``accel_bigmodel.estimate.training.DIVISIONS``."""
    if settings["use_deepspeed"]:
        return f"zero{stage_of(settings)}"
    if settings["use_parallelism_config"]:
        shards = 1
        for axis in ("dp_shard", "cp", "sp"):
            shards *= settings[f"parallelism_config_{axis}_size"]
        if shards == 1:
            return "ddp"
    if not _uses_fsdp(settings):
        return "fsdp2" if settings["use_parallelism_config"] else "ddp"
    if settings["fsdp_version"] == 2:
        return "fsdp2" if settings["fsdp_reshard_after_forward"] else "fsdp2_no_reshard"
    name = str(settings["fsdp_sharding_strategy"]).lower()
    return "fsdp" if name == "full_shard" else name


def axes_of(settings: Resolution, processes: int) -> Axes:
    """Return the mesh of a configuration, without axes of size 1."""
    from accel.parallel.axes import AXES

    if settings["use_parallelism_config"]:
        sizes = {axis: int(settings[f"parallelism_config_{axis}_size"]) for axis in AXES}
        return {axis: size for axis, size in sizes.items() if size > 1} or {"dp_replicate": 1}
    name = strategy_of(settings)
    if name.startswith("hybrid"):
        machines = int(settings["num_machines"])
        return {"dp_replicate": machines, "dp_shard": processes // machines}
    return {"dp_replicate" if name in ("ddp", "no_shard", "zero0") else "dp_shard": processes}


def _memory_of(result: RankTrace, strategy: str, axes: Axes, optimizer: str, precision: str) -> TrainingMemory:
    """Return a rank's memory: traced figures, and formulas for optimizer state and gathered units."""
    shards = axes.get("dp_shard", 1) * axes.get("cp", 1) * axes.get("sp", 1)
    estimate = memory_of_rank(
        strategy,
        result.weights * (shards if DIVISIONS[strategy].weights else 1),
        shards=shards,
        processes=shards * axes.get("dp_replicate", 1),
        optimizer=optimizer,
        layer=result.largest_unit,
        # Units are gathered in the compute dtype, and their gradients are reduced in float32.
        gathered_share=0.5 if precision in HALF_PRECISION else 1,
    )
    state = result.weights * result.trained // result.values * OPTIMIZER_COPIES[optimizer]
    if result.stages is not None:
        # Gathered parameters of a pipeline stay for several micro batches, so they are measured.
        estimate = replace(estimate, buffers=result.stages.gathered)
    return replace(
        estimate, weights=result.weights, gradients=result.gradients, optimizer=state, activations=result.activations
    )
