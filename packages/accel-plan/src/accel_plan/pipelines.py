"""The ranks of one pipeline: what each holds, from traces of some of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from accel.parallel.pipeline import PipelineParallelConfig
from accel.parallel.pipeline_split import plan_cut
from accel_state.errors import ConfigurationError
from accel_state.options import Resolution

from .models import build_model
from .stages import Passed
from .trace import TRACED_BLOCKS, Batch, Measured, Task, extended, trace, with_blocks


@dataclass(frozen=True)
class StagePlan:
    """A rank of the pipeline, with its stage or stages.

    Attributes:
        rank: among all ranks.
        stages: their numbers.
        blocks: for each, the numbers of its first and its last block.
        parameters: bytes of parameters on the rank.
        total: bytes that it holds, activations included.
    """

    rank: int
    stages: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    parameters: int
    total: int


@dataclass(frozen=True)
class PipelinePlan:
    """How the pipeline of the rank works.

    Attributes:
        schedule: its name.
        micro_batches: parts that the rank's batch is divided into.
        in_flight: forward passes of micro batches whose backward pass is still to come, on the rank, at most.
        blocks: of the whole model.
        stages: every rank of the pipeline, the first stage's first.
        fullest: the rank that holds most.
    """

    schedule: str
    micro_batches: int
    in_flight: int
    blocks: int
    stages: tuple[StagePlan, ...]
    fullest: int


@dataclass(frozen=True)
class Traced:
    """The ranks of one pipeline.

    Attributes:
        own: the place in the pipeline of the rank that was asked for.
        ranks: every rank of the pipeline.
        numbers: the stages of each.
        ranges: the blocks of each stage.
        measured: what each rank holds and sends.
    """

    own: int
    ranks: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]
    ranges: tuple[range, ...]
    measured: tuple[Measured, ...]

    def plan(self, settings: PipelineParallelConfig, samples: int, totals: list[int]) -> PipelinePlan:
        """With the bytes that each rank holds, what there is to say of the pipeline."""
        stages = []
        for rank, numbers, measured, total in zip(self.ranks, self.numbers, self.measured, totals, strict=True):
            blocks = tuple((self.ranges[number][0], self.ranges[number][-1]) for number in numbers)
            stages.append(StagePlan(rank, numbers, blocks, measured.weights, total))
        kept = self.measured[self.own].stages
        return PipelinePlan(
            schedule=settings.schedule,
            micro_batches=settings.check_batch(samples, len(self.ranks)),
            in_flight=0 if kept is None else len(kept.alive),
            blocks=sum(map(len, self.ranges)),
            stages=tuple(stages),
            fullest=max(stages, key=lambda stage: stage.total).rank,
        )


def pipeline_of(settings: Resolution, **given: Any) -> PipelineParallelConfig | None:
    """How the pipeline works; None without one.

    Args:
        settings: every option of the launcher, resolved.
        **given: settings of a pipeline; None where it has its default.

    Raises:
        ConfigurationError: a setting of a pipeline where there is none, or values that contradict each other.
    """
    named = {name: value for name, value in given.items() if value is not None}
    if settings["use_parallelism_config"] and settings["parallelism_config_pp_size"] > 1:
        return PipelineParallelConfig(**named)
    if named:
        raise ConfigurationError(
            f"--pp_{next(iter(named))}: there is no pipeline. Give --use_parallelism_config and "
            "--parallelism_config_pp_size 2 or more, or "
            "leave the option out."
        )
    return None


def trace_pipeline(task: Task, settings: PipelineParallelConfig, whole: bool = False) -> tuple[Traced, Batch]:
    """Trace the ranks of a pipeline that differ, and say what the others hold.

    The first stage, the last one and those in between differ, and have different numbers of blocks; all numbers of a
    rank grow by the same amount with every further block, so stages of two and three blocks say what one of ten needs.
    Interleaved stages are all traced.

    Args:
        task: what to trace.
        settings: how the pipeline works.
        whole: take every block.
    """
    size = dict(task.layout)["pp"]
    stride, count = task.world_size // size, size * (settings.stages_per_rank or 1)
    model = build_model(task.config, task.trust_remote_code)
    ranges = plan_cut(model, count).ranges
    values = sum(item.numel() for item in model.parameters())
    del model
    ranks = tuple(task.rank % stride + place * stride for place in range(size))
    found = None if whole else _by_few(task, settings, ranks, ranges, values)
    if found is None:
        found = {}
        for place, rank in enumerate(ranks):
            found[place] = trace(replace(task, rank=rank, incoming=_passed(found)))
    numbers = tuple(tuple(range(place, count, size)) for place in range(size))
    own = task.rank // stride
    return Traced(own, ranks, numbers, ranges, tuple(found[place][0] for place in range(size))), found[own][1]


def _passed(found: dict[int, tuple[Measured, Batch]]) -> Passed | None:
    first = found.get(0)
    return None if first is None or first[0].stages is None else first[0].stages.passed


def _by_few(
    task: Task, settings: PipelineParallelConfig, ranks: tuple[int, ...], ranges: tuple[range, ...], values: int
) -> dict[int, tuple[Measured, Batch]] | None:
    """The same, from stages of few blocks; None where these do not say what more of them need."""
    size, count, blocks = len(ranks), len(ranges), sum(map(len, ranges))
    per_rank = count // size
    if (
        max(map(len, ranges)) <= TRACED_BLOCKS
        or (per_rank > 1 and blocks % count)
        or not hasattr(task.config, "num_hidden_layers")
    ):
        return None
    own = ranks.index(task.rank)
    places = sorted({0, 1, own, size - 1}) if per_rank == 1 else list(range(size))
    pairs: dict[int, list[tuple[Measured, Batch]]] = {}
    for number in (TRACED_BLOCKS - 1, TRACED_BLOCKS):
        config = with_blocks(task.config, number * count)
        traced: dict[int, tuple[Measured, Batch]] = {}
        for place in places:
            traced[place] = trace(replace(task, config=config, rank=ranks[place], incoming=_passed(traced)))
            pairs.setdefault(place, []).append(traced[place])
    few, more = (pair[0].values for pair in pairs[0])
    if more + (blocks - TRACED_BLOCKS * count) * (more - few) // count != values:
        return None
    found = {}
    for place in range(size):
        pair = pairs[place] if place in pairs else pairs[1]
        (first, batch), (second, _) = pair
        measured = extended(first, second, len(ranges[place]) - TRACED_BLOCKS)
        measured = replace(measured, values=values, trained=values * second.trained // second.values)
        found[place] = (measured if place in pairs else _earlier_back(measured, settings, size - place)), batch
    return found


def _earlier_back(measured: Measured, settings: PipelineParallelConfig, stages: int) -> Measured:
    """A rank further back in the pipeline, with so many stages from its own to the last: with 1F1B that many are in
    flight there.
    """
    assert measured.stages is not None
    alive = measured.stages.alive[:stages] if settings.schedule == "1f1b" else measured.stages.alive
    return replace(measured, activations=max(alive), stages=replace(measured.stages, alive=alive))
