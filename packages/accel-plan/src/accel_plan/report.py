"""A plan as text."""

from __future__ import annotations

from accel_state.humanize import convert_bytes

from .pipelines import StagePlan
from .plan import RankPlan
from .record import POINT_TO_POINT, Collective

_SHOWN_SAMPLES = 8


def as_text(plan: RankPlan) -> str:
    """What a rank holds, sends and reads, for people."""
    parts = [_head(plan), _memory(plan), _stages(plan), _sent(plan), _batch(plan)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _head(plan: RankPlan) -> list[str]:
    place = ", ".join(f"{name} {one} of {size}" for name, (one, size) in plan.coordinates.items())
    lines = [
        f"{plan.model}: {plan.parameters:,} parameters, {plan.strategy} on {plan.processes:,} processes, mixed "
        "precision: "
        f"{plan.mixed_precision}",
        f"rank {plan.rank}: {place}",
    ]
    if plan.pipeline is not None:
        own = next(stage for stage in plan.pipeline.stages if stage.rank == plan.rank)
        samples = len(plan.batch.samples) // plan.pipeline.micro_batches
        lines.append(
            f"pipeline: {_named(own)} of {plan.pipeline.blocks}; {plan.pipeline.schedule}, "
            f"{plan.pipeline.micro_batches} micro batches of "
            f"{samples} sample(s), at most {plan.pipeline.in_flight} in flight on this rank"
        )
    return lines


def _named(stage: StagePlan) -> str:
    many = "s" if len(stage.stages) > 1 else ""
    blocks = ", ".join(f"{first} to {last}" for first, last in stage.blocks)
    return f"stage{many} {', '.join(map(str, stage.stages))}, blocks {blocks}"


def _stages(plan: RankPlan) -> list[str]:
    if plan.pipeline is None:
        return []
    lines = ["ranks of this pipeline, in bytes of parameters and in all:"]
    width = max(len(_named(stage)) for stage in plan.pipeline.stages)
    for stage in plan.pipeline.stages:
        start = f"  {'rank ' + str(stage.rank):<11}{_named(stage):<{width}}"
        note = "  the fullest" if stage.rank == plan.pipeline.fullest else ""
        lines.append(f"{start}{stage.parameters:>20,}{stage.total:>20,}  {convert_bytes(stage.total):>10}{note}")
    return lines


def _memory(plan: RankPlan) -> list[str]:
    memory = plan.memory
    tokens = f"{len(plan.batch.samples)} sample(s) of {plan.local_length:,} tokens"
    rows = [
        ("parameters", "weights", ""),
        ("gradients", "gradients", ""),
        ("optimizer state", "optimizer", plan.optimizer),
        ("gathered or in flight", "buffers", ""),
        ("activations", "activations", tokens),
    ]
    lines = ["holds, in bytes:"]
    for name, part, note in rows:
        lines.append(
            _row(
                name,
                getattr(memory, part),
                ", ".join(filter(None, [note, "offloaded" if part in plan.offloaded else ""])),
            )
        )
    lines.append(_row("total", memory.total, ""))
    if plan.offloaded:
        lines.append(_row("on the device", memory.total - sum(getattr(memory, part) for part in plan.offloaded), ""))
    return lines


def _row(name: str, value: int, note: str) -> str:
    return f"  {name:<22}{value:>22,}  {convert_bytes(value):>10}  {note}".rstrip()


def _sent(plan: RankPlan) -> list[str]:
    if not plan.collectives:
        return ["sends nothing: there is no other rank"]
    passes = f" of {plan.steps} micro batches" if plan.steps > 1 else ""
    lines = [f"sends in an optimizer step{passes}, in bytes:"]
    for one in plan.collectives:
        start = f"  {one.kind:<15}{one.axis:<16}{one.ranks:>5} ranks {one.calls:>6} calls"
        lines.append(f"{start} {one.sent:>20,}  {convert_bytes(one.sent):>10}  = {_formula(one)}")
    total = sum(one.sent for one in plan.collectives)
    lines.append(f"  {'total':<49}{total:>20,}  {convert_bytes(total):>10}")
    return lines


def _formula(one: Collective) -> str:
    if one.kind in POINT_TO_POINT and one.payload % one.calls == 0:
        return f"{one.calls} x {one.payload // one.calls:,}"
    if one.kind == "broadcast" or one.kind in POINT_TO_POINT:
        return f"{one.payload:,}"
    twice = "2 x " if one.kind == "all-reduce" else ""
    return f"{twice}{one.payload:,} x {one.ranks - 1}/{one.ranks}"


def _batch(plan: RankPlan) -> list[str]:
    batch = plan.batch
    shown = ", ".join(map(str, batch.samples[:_SHOWN_SAMPLES])) + (
        ", ..." if len(batch.samples) > _SHOWN_SAMPLES else ""
    )
    lines = [
        f"reads: data rank {batch.rank} of {batch.ranks}; of the first {batch.global_size:,} samples (unshuffled) "
        f"{shown}",
    ]
    if plan.local_length != plan.seq_length:
        lines.append(f"  {plan.local_length:,} of each sample's {plan.seq_length:,} tokens")
    if plan.steps > 1:
        lines.append(f"  {batch.global_size * plan.steps:,} samples in an optimizer step ({plan.steps} micro batches)")
    return lines
