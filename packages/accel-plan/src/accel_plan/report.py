"""Formats a plan as text."""

from __future__ import annotations

from accel_state.humanize import convert_bytes, counted

from .changes import Changes
from .memory import ACTIVATIONS, CATEGORIES, GRADIENTS, OPTIMIZER, PARAMETERS
from .peak import PeakMemory
from .pipelines import StagePlan
from .plan import RankPlan
from .record import POINT_TO_POINT, Traffic
from .timing import FITTED_ON

_SHOWN_SAMPLES = 8


def as_text(plan: RankPlan, changes: Changes | None = None) -> str:
    """Return the report of ``accel plan``.

    Args:
        plan: what to report.
        changes: for a plan that does not fit in the memory of the device.
    """
    memory = [*_memory(plan), *(_changes(changes) if changes is not None else [])]
    parts = [_head(plan), memory, _report_of_time(plan), _pipeline(plan), _traffic(plan), _data(plan)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _head(plan: RankPlan) -> list[str]:
    coordinates = ", ".join(f"{name} {value} of {size}" for name, (value, size) in plan.coordinates.items())
    lines = [
        f"{plan.model}: {plan.parameters:,} parameters, {plan.strategy} on {counted(plan.processes, 'process')}, "
        f"mixed precision: {plan.mixed_precision}",
        f"rank {plan.rank}: {coordinates}",
    ]
    pipeline = plan.pipeline
    if pipeline is not None:
        stage = next(stage for stage in pipeline.stages if stage.rank == plan.rank)
        samples = len(plan.batch.samples) // pipeline.micro_batches
        lines.append(
            f"pipeline: {_stage_name(stage)} of {pipeline.blocks}; {pipeline.schedule}, {pipeline.micro_batches} "
            f"micro batches of {samples} sample(s), at most {pipeline.in_flight} in flight on this rank"
        )
    return lines


def _stage_name(stage: StagePlan) -> str:
    plural = "s" if len(stage.stages) > 1 else ""
    blocks = ", ".join(f"{first} to {last}" for first, last in stage.blocks)
    return f"stage{plural} {', '.join(map(str, stage.stages))}, blocks {blocks}"


def _pipeline(plan: RankPlan) -> list[str]:
    if plan.pipeline is None:
        return []
    total = "total bytes" if plan.peak is None else "bytes at the peak"
    lines = [f"ranks of this pipeline (bytes of parameters, {total}):"]
    width = max(len(_stage_name(stage)) for stage in plan.pipeline.stages)
    for stage in plan.pipeline.stages:
        start = f"  {'rank ' + str(stage.rank):<11}{_stage_name(stage):<{width}}"
        note = "  largest" if stage.rank == plan.pipeline.fullest else ""
        lines.append(f"{start}{stage.parameters:>20,}{stage.total:>20,}  {convert_bytes(stage.total):>11}{note}")
    return lines


def _memory(plan: RankPlan) -> list[str]:
    lines = [*_peak(plan, plan.peak), *_verdict(plan)] if plan.peak is not None else _estimate(plan)
    if plan.offloads_activations:
        lines.append(
            "  The inputs of checkpointed blocks count as if the device kept them. They are offloaded: it needs less."
        )
    return lines


def _estimate(plan: RankPlan) -> list[str]:
    memory = plan.memory
    lines = ["memory at the end of a backward pass (bytes):"]
    for name, part, note in (
        ("parameters", "weights", ""),
        ("gradients", "gradients", ""),
        ("optimizer state", "optimizer", plan.optimizer),
        ("gathered or in flight", "buffers", ""),
        ("activations", "activations", _tokens(plan)),
    ):
        notes = [note, "offloaded" if part in plan.offloaded else ""]
        lines.append(_row(name, getattr(memory, part), ", ".join(filter(None, notes))))
    lines.append(_row("total", memory.total, ""))
    if plan.offloaded:
        lines.append(_row("on the device", memory.total - sum(getattr(memory, part) for part in plan.offloaded), ""))
    lines.append(f"  The memory of a step {plan.unfollowed} is not followed: the peak is higher.")
    if plan.memory_limit is not None:
        lines.append(f"  Whether it fits in {convert_bytes(plan.memory_limit)} is therefore not known.")
    return lines


def _tokens(plan: RankPlan) -> str:
    return f"{len(plan.batch.samples)} sample(s) of {plan.local_length:,} tokens"


def _peak(plan: RankPlan, peak: PeakMemory) -> list[str]:
    held = {PARAMETERS: plan.memory.weights, GRADIENTS: plan.memory.gradients, OPTIMIZER: plan.memory.optimizer}
    notes = {OPTIMIZER: f"{plan.optimizer}, {plan.implementation}", ACTIVATIONS: _tokens(plan)}
    lines = [f"memory (bytes):{'held':>29}{'at the peak':>22}"]
    for name in CATEGORIES:
        value = peak.categories[name]
        if name in held or value:
            start = f"  {name:<20}{held[name]:>22,}" if name in held else f"  {name:<20}{'':>22}"
            lines.append(f"{start}{value:>22,}  {convert_bytes(value):>11}  {notes.get(name, '')}".rstrip())
    lines.append(f"  {'total':<20}{sum(held.values()):>22,}{peak.total:>22,}  {convert_bytes(peak.total):>11}")
    lines.append(f"  The peak is {peak.moment.describe()}.")
    phases = [f"{name} {convert_bytes(value)}" for name, value in peak.phases.items()]
    lines += [f"  Largest in each phase: {', '.join(phases)}.", "", "largest tensors at the peak (bytes):"]
    for item in peak.tensors:
        what = " ".join(filter(None, (item.group.operation, item.group.module)))
        lines.append(f"  {item.describe():<38}{item.bytes:>20,}  {convert_bytes(item.bytes):>11}  {what}")
    return lines


def verdict(plan: RankPlan) -> str:
    """Return whether the peak fits in the device's memory; empty without a peak or a limit."""
    limit = plan.memory_limit
    if limit is None or plan.peak is None:
        return ""
    rest = limit - plan.needed
    if rest < 0:
        return f"does not fit in {convert_bytes(limit)}: {convert_bytes(-rest)} too much"
    spare = "" if plan.reserve is not None else " for the device's context and allocator"
    return f"fits in {convert_bytes(limit)}, with {convert_bytes(rest)} left{spare}"


def _verdict(plan: RankPlan) -> list[str]:
    found, reserve = verdict(plan), plan.reserve
    if not found:
        return []
    lines = [""]
    if reserve is not None:
        lines += [
            f"reserve on {plan.hardware} (bytes):",
            _row("context", reserve.context, "of the driver and of libraries"),
            _row("communication", reserve.communication, "buffers of communicators"),
            _row("allocator", reserve.allocator, "cached by torch, but not in use"),
            _row("peak and reserve", plan.needed, ""),
            "",
        ]
    return [*lines, found]


def _report_of_time(plan: RankPlan) -> list[str]:
    time = plan.time
    if time is None:
        return [f"time: that of a step {plan.untimed} is not modelled."] if plan.untimed and plan.hardware else []
    lines = [f"time of a step on {time.hardware}, {'compiled' if time.compiled else 'eager'} (seconds):"]
    for name, seconds in time.parts.items():
        lines.append(f"  {name:<44}{seconds:>12.6f}{seconds / time.seconds:>8.1%}")
    lines.append(f"  {'total':<44}{time.seconds:>12.6f}")
    lines.append(f"  {time.tokens:,.0f} tokens per second and device, {time.utilization:.1%} model FLOPs utilization")
    lines.append(f"  {time.bottleneck}")
    if not time.compared:
        lines.append(
            f"  Shares of the peak were fitted on {FITTED_ON}, and are not compared with runs on {time.hardware}."
        )
    return lines


def _changes(changes: Changes) -> list[str]:
    if not changes.fits:
        lines = ["  No change of those that were tried makes it fit. All that help, together:"]
    elif changes.together:
        lines = ["  It fits with all of these changes (memory needed with each and those before it):"]
    else:
        lines = ["  It fits with any of these changes, the cheapest first:"]
    return lines + [f"    {one.description:<60}{convert_bytes(one.total):>11}" for one in changes.changes]


def _row(name: str, value: int, note: str) -> str:
    return f"  {name:<22}{value:>22,}  {convert_bytes(value):>11}  {note}".rstrip()


def _traffic(plan: RankPlan) -> list[str]:
    if not plan.collectives:
        return ["communication: none, there is only one rank"]
    passes = f" of {plan.steps} micro batches" if plan.steps > 1 else ""
    lines = [f"sent per optimizer step{passes} (bytes):"]
    for item in plan.collectives:
        start = f"  {item.kind:<15}{item.axis:<16}{item.ranks:>5} ranks {item.calls:>6} calls"
        lines.append(f"{start} {item.sent:>20,}  {convert_bytes(item.sent):>11}  = {_formula(item)}")
    total = sum(item.sent for item in plan.collectives)
    lines.append(f"  {'total':<49}{total:>20,}  {convert_bytes(total):>11}")
    return lines


def _formula(item: Traffic) -> str:
    if item.kind in POINT_TO_POINT and item.payload % item.calls == 0:
        return f"{item.calls} x {item.payload // item.calls:,}"
    if item.kind == "broadcast" or item.kind in POINT_TO_POINT:
        return f"{item.payload:,}"
    twice = "2 x " if item.kind == "all-reduce" else ""
    return f"{twice}{item.payload:,} x {item.ranks - 1}/{item.ranks}"


def _data(plan: RankPlan) -> list[str]:
    batch = plan.batch
    shown = [str(sample) for sample in batch.samples[:_SHOWN_SAMPLES]]
    if len(batch.samples) > _SHOWN_SAMPLES:
        shown.append("...")
    lines = [
        f"data: data rank {batch.rank} of {batch.ranks}; samples {', '.join(shown)} of the first {batch.global_size:,} "
        "(unshuffled)"
    ]
    if plan.local_length != plan.seq_length:
        lines.append(f"  {plan.local_length:,} of each sample's {plan.seq_length:,} tokens")
    if plan.steps > 1:
        lines.append(f"  {batch.global_size * plan.steps:,} samples per optimizer step ({plan.steps} micro batches)")
    return lines
