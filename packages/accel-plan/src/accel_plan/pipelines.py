"""Plans the ranks of one pipeline, from traces of some of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from accel.parallel.axis_settings import PipelineParallelConfig
from accel.parallel.pipeline import block_ranges
from accel_state.errors import ConfigurationError
from accel_state.options import Resolution

from .models import build_model
from .peak import peak_of
from .stages import SharedSplit
from .trace import TRACED_BLOCKS, RankBatch, RankTrace, TraceTask, extrapolate, trace, with_blocks


class PipelineOptions(PipelineParallelConfig):
    """Settings of a pipeline that come from the command line: messages name its options."""

    def label(self, name: str, value: Any = None) -> str:
        """Return the option and its value."""
        return f"--pp_{name} {getattr(self, name) if value is None else value}"


@dataclass(frozen=True)
class StagePlan:
    """A rank of the pipeline, with its stage or stages."""

    rank: int  # the global rank
    stages: tuple[int, ...]  # their indices
    blocks: tuple[tuple[int, int], ...]  # indices of the first and the last block of each stage
    parameters: int  # bytes
    total: int  # bytes at the peak of a step


@dataclass(frozen=True)
class PipelinePlan:
    """The pipeline of the requested rank."""

    schedule: str
    micro_batches: int
    in_flight: int  # largest number of micro batches between forward and backward on the rank
    blocks: int  # of the full model
    stages: tuple[StagePlan, ...]  # all ranks, in stage order
    fullest: int  # the rank that holds most


@dataclass(frozen=True)
class TracedPipeline:
    """The traces of the ranks of one pipeline."""

    position: int  # of the requested rank in the pipeline
    ranks: tuple[int, ...]  # the global ranks, in stage order
    stages: tuple[tuple[int, ...], ...]  # the indices of each rank's stages
    blocks: tuple[range, ...]  # of each stage
    traces: tuple[RankTrace, ...]  # of each rank

    def peaks(self) -> list[int]:
        """Return the largest memory of a step on each rank, in bytes.

        Ranks that were not followed are between two that were, and have blocks only: each has one micro batch in
        flight less than the one before.
        """
        steps = {index: peak_of(item.step) for index, item in enumerate(self.traces) if item.step is not None}
        peaks = []
        for index in range(len(self.traces)):
            before = max(position for position in steps if position <= index)
            after = min(position for position in steps if position >= index)
            share = (index - before) / max(after - before, 1)
            # The peak may be in another phase from some rank on, so each phase is interpolated by itself.
            pairs = [(largest, steps[after].phases[phase]) for phase, largest in steps[before].phases.items()]
            pairs.append((steps[before].between_steps, steps[after].between_steps))
            peaks.append(max(round(first + share * (second - first)) for first, second in pairs))
        return peaks

    def plan(self, settings: PipelineParallelConfig, samples: int, totals: list[int]) -> PipelinePlan:
        """Return the plan of the pipeline, given the bytes that each rank holds."""
        plans = []
        for rank, stages, traced, total in zip(self.ranks, self.stages, self.traces, totals, strict=True):
            blocks = tuple((self.blocks[stage][0], self.blocks[stage][-1]) for stage in stages)
            plans.append(StagePlan(rank, stages, blocks, traced.weights, total))
        memory = self.traces[self.position].stages
        return PipelinePlan(
            schedule=settings.schedule,
            micro_batches=settings.check_batch(samples, len(self.ranks)),
            in_flight=0 if memory is None else len(memory.activations),
            blocks=sum(map(len, self.blocks)),
            stages=tuple(plans),
            fullest=max(plans, key=lambda plan: plan.total).rank,
        )


def pipeline_settings(settings: Resolution, **options: Any) -> PipelineParallelConfig | None:
    """Return the settings of the pipeline; None without one."""
    given = {name: value for name, value in options.items() if value is not None}
    if settings["use_parallelism_config"] and settings["parallelism_config_pp_size"] > 1:
        return PipelineOptions(**given)
    if given:
        raise ConfigurationError(
            f"--pp_{next(iter(given))} requires a pipeline. Add --use_parallelism_config and "
            "--parallelism_config_pp_size 2 or more, or remove the option."
        )
    return None


def trace_pipeline(
    task: TraceTask, settings: PipelineParallelConfig, all_blocks: bool = False
) -> tuple[TracedPipeline, RankBatch]:
    """Trace the ranks of a pipeline.

    Only the first stage, the last one, the requested one and one in between are traced, with two blocks and with
    three: all figures of a rank grow by the same amount with each block. Interleaved stages are traced on all ranks.
    """
    size = task.axes["pp"]
    stride, stage_count = task.world_size // size, size * (settings.stages_per_rank or 1)
    model = build_model(task.config, task.trust_remote_code)
    _, blocks = block_ranges(model, stage_count)
    values = sum(parameter.numel() for parameter in model.parameters())
    del model
    position = task.rank // stride
    ranks = tuple(task.rank % stride + index * stride for index in range(size))
    traced = None if all_blocks else _trace_few_blocks(task, settings, ranks, blocks, values)
    if traced is None:
        shared = SharedSplit()
        traced = {index: trace(replace(task, rank=rank), shared) for index, rank in enumerate(ranks)}
    stages = tuple(tuple(settings.stages_of(index, size)) for index in range(size))
    traces = tuple(traced[index][0] for index in range(size))
    return TracedPipeline(position, ranks, stages, blocks, traces), traced[position][1]


def _trace_few_blocks(
    task: TraceTask, settings: PipelineParallelConfig, ranks: tuple[int, ...], blocks: tuple[range, ...], values: int
) -> dict[int, tuple[RankTrace, RankBatch]] | None:
    """Traces by pipeline rank, extrapolated from stages of few blocks; None if that does not give ``values``."""
    size, stage_count, block_count = len(ranks), len(blocks), sum(map(len, blocks))
    interleaved = stage_count > size
    if max(map(len, blocks)) <= TRACED_BLOCKS or not hasattr(task.config, "num_hidden_layers"):
        return None
    if interleaved and block_count % stage_count:
        return None
    positions = sorted({0, 1, ranks.index(task.rank), max(size - 2, 0), size - 1})
    if interleaved:
        positions = list(range(size))
    smaller: dict[int, tuple[RankTrace, RankBatch]] = {}
    larger: dict[int, tuple[RankTrace, RankBatch]] = {}
    for number, traced in ((TRACED_BLOCKS - 1, smaller), (TRACED_BLOCKS, larger)):
        config, shared = with_blocks(task.config, number * stage_count), SharedSplit()
        for position in positions:
            traced[position] = trace(replace(task, config=config, rank=ranks[position]), shared)
    few, more = smaller[0][0].values, larger[0][0].values
    if more + (block_count - TRACED_BLOCKS * stage_count) * (more - few) // stage_count != values:
        return None
    results = {}
    for position in range(size):
        source = position if position in larger else 1
        result = extrapolate(smaller[source][0], larger[source][0], len(blocks[position]) - TRACED_BLOCKS)
        if result is None:
            return None
        trained = values * larger[source][0].trained // more
        result = replace(result, values=values, trained=trained)
        if position not in larger and settings.schedule == "1f1b" and result.stages is not None:
            # A later stage has fewer micro batches in flight: as many as stages from its own to the last.
            activations = result.stages.activations[: size - position]
            stages = replace(result.stages, activations=activations)
            result = replace(result, activations=max(activations), stages=stages)
        if position not in larger:
            result = replace(result, step=None)
        results[position] = result, smaller[source][1]
    return results
