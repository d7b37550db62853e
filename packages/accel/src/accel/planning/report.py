"""A plan as text."""

from __future__ import annotations

from accel_state.units import convert_bytes

from .plan import RankPlan

_SHOWN_SAMPLES = 8


def as_text(plan: RankPlan) -> str:
    """What a rank holds, sends and reads, for people."""
    return "\n\n".join(["\n".join(_head(plan)), "\n".join(_memory(plan)), "\n".join(_sent(plan)), "\n".join(_batch(plan))])


def _head(plan: RankPlan) -> list[str]:
    place = ", ".join(f"{name} {one} of {size}" for name, (one, size) in plan.coordinates.items())
    return [
        f"{plan.model}: {plan.parameters:,} parameters, {plan.strategy} on {plan.processes:,} processes, mixed precision: "
        f"{plan.mixed_precision}",
        f"rank {plan.rank}: {place}",
    ]


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
        lines.append(_row(name, getattr(memory, part), ", ".join(filter(None, [note, "offloaded" if part in plan.offloaded else ""]))))
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
        lines.append(f"{start} {one.sent:>20,}  {convert_bytes(one.sent):>10}  = {_formula(one.kind, one.payload, one.ranks)}")
    total = sum(one.sent for one in plan.collectives)
    lines.append(f"  {'total':<49}{total:>20,}  {convert_bytes(total):>10}")
    return lines


def _formula(kind: str, payload: int, ranks: int) -> str:
    if kind == "broadcast":
        return f"{payload:,}"
    twice = "2 x " if kind == "all-reduce" else ""
    return f"{twice}{payload:,} x {ranks - 1}/{ranks}"


def _batch(plan: RankPlan) -> list[str]:
    batch = plan.batch
    shown = ", ".join(map(str, batch.samples[:_SHOWN_SAMPLES])) + (", ..." if len(batch.samples) > _SHOWN_SAMPLES else "")
    lines = [
        f"reads: data rank {batch.rank} of {batch.ranks}; of the first {batch.global_size:,} samples (unshuffled) {shown}",
    ]
    if plan.local_length != plan.seq_length:
        lines.append(f"  {plan.local_length:,} of each sample's {plan.seq_length:,} tokens")
    if plan.steps > 1:
        lines.append(f"  {batch.global_size * plan.steps:,} samples in an optimizer step ({plan.steps} micro batches)")
    return lines
