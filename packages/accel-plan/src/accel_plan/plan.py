"""From a configuration and a model to what each rank of a run holds, sends and reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from accel_bigmodel.estimate.training import DIVISIONS, OPTIMIZER_COPIES, TrainingMemory, memory_of_rank
from accel_state.errors import ConfigurationError
from accel_state.options import Resolution

from .models import model_config
from .pipelines import PipelinePlan, pipeline_of, trace_pipeline
from .record import Collective, Layout, coordinates_of
from .trace import Batch, Measured, Task, trace_blocks
from .zero import HALF, as_copies, stage_of, zero

DEFAULT_LENGTH = 2048


@dataclass(frozen=True)
class Request:
    """What to plan.

    Attributes:
        settings: every option of the launcher, resolved.
        model: one of the known shapes, a ``config.json``, a folder, or a repository on the Hub.
        rank: the rank to show.
        batch_size: samples in the batch of a loader.
        seq_length: tokens in a sample; None: 2,048, or as many as the model takes.
        optimizer: what keeps its state, one of ``OPTIMIZER_COPIES``.
        split_batches: the loader's batch is that of all ranks together.
        all_blocks: take every one of many equal blocks, rather than three.
        trust_remote_code: run model code that comes with the model.
        schedule: of a pipeline, one of ``accel.parallel.pipeline.SCHEDULES``; None: as PipelineParallelConfig has it,
            like the next two.
        num_microbatches: parts that a pipeline divides each rank's batch into.
        stages_per_rank: stages of a pipeline on each of its ranks.
    """

    settings: Resolution
    model: str
    rank: int = 0
    batch_size: int = 1
    seq_length: int | None = None
    optimizer: str = "adamw"
    split_batches: bool = False
    all_blocks: bool = False
    trust_remote_code: bool = False
    schedule: str | None = None
    num_microbatches: int | None = None
    stages_per_rank: int | None = None


@dataclass(frozen=True)
class RankPlan:
    """What one rank of a run holds, sends and reads; bytes, but for ``parameters`` and the numbers of samples and
    tokens.

    Attributes:
        model: the model's name.
        strategy: how it is divided, by its name in the estimate of accel_bigmodel.
        processes: the number of ranks.
        rank: the rank that this is about.
        coordinates: where it is along each axis, with the axis's size.
        parameters: number of values in the whole model.
        memory: what the rank holds.
        collectives: what it sends in an optimizer step.
        batch: what it gets of the data.
        seq_length: tokens in a sample.
        local_length: tokens of a sample that this rank works on.
        steps: micro batches in an optimizer step.
        mixed_precision: of computing.
        optimizer: what keeps its state.
        offloaded: parts of the memory that lie in CPU memory (or on a drive) rather than on the device.
        pipeline: the pipeline that it is in, if any.
    """

    model: str
    strategy: str
    processes: int
    rank: int
    coordinates: Mapping[str, tuple[int, int]]
    parameters: int
    memory: TrainingMemory
    collectives: tuple[Collective, ...]
    batch: Batch
    seq_length: int
    local_length: int
    steps: int
    mixed_precision: str
    optimizer: str
    offloaded: tuple[str, ...] = ()
    pipeline: PipelinePlan | None = None

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        content = asdict(self)
        content["memory"]["total"] = self.memory.total
        content["coordinates"] = {
            name: {"coordinate": place, "size": size} for name, (place, size) in self.coordinates.items()
        }
        return content


def plan(request: Request) -> RankPlan:
    """Check a configuration, and say what it means for one rank.

    Raises:
        ConfigurationError: it cannot train the model on so many processes; the message names the value and what is
            allowed.
        MissingDependencyError: transformers is not installed.
    """
    settings = request.settings
    _check_kind(settings)
    processes = _processes(settings, request.rank)
    config = model_config(request.model, request.trust_remote_code)
    length = _length(request.seq_length, config)
    strategy, layout = strategy_of(settings), layout_of(settings, processes)
    _check_batch(request, layout)
    steps, precision = int(settings["gradient_accumulation_steps"] or 1), settings["mixed_precision"] or "no"
    task = Task(
        config=config,
        rank=request.rank,
        world_size=processes,
        local_world_size=processes // settings["num_machines"],
        variables=settings.environment(),
        layout=layout,
        batch_size=request.batch_size,
        seq_length=length,
        split_batches=request.split_batches,
        trust_remote_code=request.trust_remote_code,
        pipeline=pipeline_of(
            settings,
            schedule=request.schedule,
            num_microbatches=request.num_microbatches,
            stages_per_rank=request.stages_per_rank,
        ),
    )
    pipeline = None
    if task.pipeline is not None:
        traced, batch = trace_pipeline(task, task.pipeline, request.all_blocks)
        memories = [_memory(one, strategy, layout, request.optimizer, precision) for one in traced.measured]
        pipeline = traced.plan(task.pipeline, len(batch.samples), [one.total for one in memories])
        measured, memory = traced.measured[traced.own], memories[traced.own]
        collectives = measured.collectives
    elif settings["use_deepspeed"]:
        task = as_copies(task, precision)
        measured, batch = trace_blocks(task, request.all_blocks)
        memory, collectives = zero(task, measured, strategy, request.optimizer, steps)
    else:
        measured, batch = trace_blocks(task, request.all_blocks)
        memory, collectives = _memory(measured, strategy, layout, request.optimizer, precision), measured.collectives
    sizes = dict(layout)
    return RankPlan(
        model=request.model,
        strategy=strategy,
        processes=processes,
        rank=request.rank,
        coordinates={name: (place, sizes[name]) for name, place in coordinates_of(request.rank, layout).items()},
        parameters=measured.values,
        memory=memory,
        collectives=collectives,
        batch=batch,
        seq_length=length,
        local_length=length // sizes.get("cp", 1) // sizes.get("sp", 1),
        steps=steps,
        mixed_precision=precision,
        optimizer=request.optimizer,
        offloaded=_offloaded(settings),
        pipeline=pipeline,
    )


def _offloaded(settings: Resolution) -> tuple[str, ...]:
    if settings["use_fsdp"] and settings["fsdp_offload_params"]:
        return "weights", "gradients", "optimizer"
    if not settings["use_deepspeed"]:
        return ()
    found = {"weights": "offload_param_device", "optimizer": "offload_optimizer_device"}
    return tuple(part for part, name in found.items() if settings[name] not in (None, "none"))


def _check_kind(settings: Resolution) -> None:
    for name, what in (("use_megatron_lm", "Megatron-LM"), ("tpu", "TPUs")):
        if settings[name]:
            raise ConfigurationError(
                f"{settings.where(name)}: accel plan knows DDP, FSDP, meshes and DeepSpeed's stages, not {what}."
            )
    if settings["use_deepspeed"] and settings["use_parallelism_config"]:
        # The words of an Accelerator that is asked for both.
        raise ConfigurationError(
            "one strategy trains a model, but settings were given for deepspeed, mesh. Pass one of them."
        )
    if settings["mixed_precision"] == "fp8":
        raise ConfigurationError(
            f"{settings.where('mixed_precision')}: layers in 8 bits cannot be traced without values. Plan with "
            "--mixed_precision bf16, "
            "which has the same parameters, gradients and optimizer state."
        )


def _processes(settings: Resolution, rank: int) -> int:
    processes, machines = settings["num_processes"], settings["num_machines"]
    if processes is None:
        raise ConfigurationError("there is no number of processes in the configuration. Give --num_processes.")
    if processes % machines:
        raise ConfigurationError(
            f"num_processes={processes} cannot be spread evenly over num_machines={machines}. Choose a multiple of "
            f"{machines}, or another "
            "--num_machines."
        )
    if not 0 <= rank < processes:
        raise ConfigurationError(f"--rank {rank}: with {processes} process(es), ranks go from 0 to {processes - 1}.")
    return int(processes)


def _length(asked: int | None, config: Any) -> int:
    text = getattr(config, "get_text_config", lambda: config)()
    most = getattr(text, "max_position_embeddings", None)
    if asked is not None and isinstance(most, int) and asked > most:
        raise ConfigurationError(
            f"--seq_length {asked}: the model takes at most max_position_embeddings={most} tokens. Give fewer, or "
            "another configuration."
        )
    return asked if asked is not None else min(DEFAULT_LENGTH, most) if isinstance(most, int) else DEFAULT_LENGTH


def _check_batch(request: Request, layout: Layout) -> None:
    ranks = 1
    for name, size in layout:
        ranks *= size if name.startswith("dp") else 1
    if request.split_batches and request.batch_size % ranks:
        raise ConfigurationError(
            f"--split_batches: a batch of {request.batch_size} samples cannot be shared by {ranks} ranks that get "
            "different data. Allowed: "
            f"multiples of {ranks}, or --batch_size samples for each rank, without --split_batches."
        )


def strategy_of(settings: Resolution) -> str:
    """How the model is divided, by its name in ``accel_bigmodel``'s estimate."""
    if settings["use_deepspeed"]:
        return f"zero{stage_of(settings)}"
    mesh = settings["use_parallelism_config"]
    if (
        mesh
        and settings["parallelism_config_dp_shard_size"]
        * settings["parallelism_config_cp_size"]
        * settings["parallelism_config_sp_size"]
        == 1
    ):
        return "ddp"
    if not settings["use_fsdp"]:
        return "fsdp2" if mesh else "ddp"
    if settings["fsdp_version"] == 2:
        return "fsdp2" if settings["fsdp_reshard_after_forward"] else "fsdp2_no_reshard"
    name = str(settings["fsdp_sharding_strategy"]).lower()
    return "fsdp" if name == "full_shard" else name


def layout_of(settings: Resolution, processes: int) -> Layout:
    """The axes that ranks are laid out along, the innermost last."""
    from accel.parallel.config import AXES

    if settings["use_parallelism_config"]:
        sizes = [(axis, int(settings[f"parallelism_config_{axis}_size"])) for axis in AXES]
        return [(axis, size) for axis, size in sizes if size > 1] or [("dp_replicate", 1)]
    name = strategy_of(settings)
    if name.startswith("hybrid"):
        machines = int(settings["num_machines"])
        return [("dp_replicate", machines), ("dp_shard", processes // machines)]
    return [("dp_replicate" if name in ("ddp", "no_shard", "zero0") else "dp_shard", processes)]


def _memory(measured: Measured, strategy: str, layout: Layout, optimizer: str, precision: str) -> TrainingMemory:
    """What was traced, and for what was not the arithmetic of the estimate.

    The optimizer's state is a multiple of the parameters that this rank updates; what is gathered follows from the
    largest unit.
    """
    sizes = dict(layout)
    shards = sizes.get("dp_shard", 1) * sizes.get("cp", 1) * sizes.get("sp", 1)
    estimate = memory_of_rank(
        strategy,
        measured.weights * (shards if DIVISIONS[strategy].weights else 1),
        shards=shards,
        processes=shards * sizes.get("dp_replicate", 1),
        optimizer=optimizer,
        layer=measured.largest_unit,
        # Units are gathered in the type that they compute in, and their gradients are reduced in float32.
        gathered_share=0.5 if precision in HALF else 1,
    )
    state = measured.weights * measured.trained // measured.values * OPTIMIZER_COPIES[optimizer]
    if measured.stages is not None:
        # A pipeline keeps what it has gathered from one micro batch to the next.
        estimate = replace(estimate, buffers=measured.stages.gathered)
    return replace(
        estimate,
        weights=measured.weights,
        gradients=measured.gradients,
        optimizer=state,
        activations=measured.activations,
    )
