"""``accel plan --html``: a page with the memory and the work of a step over time, and the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from itertools import accumulate

from accel_state.charts.page import Cell, Curve, chart, charts, document, facts, table
from accel_state.hardware import HardwareProfile
from accel_state.humanize import convert_bytes, counted

from .memory import CATEGORIES, StepMemory
from .peak import PeakMemory
from .plan import RankPlan
from .report import as_text, verdict
from .timing import Span, Speeds, simulate

_POINTS = 1500
"""Number of instants that a chart shows: of those in between, the one with most memory."""


def as_html(plan: RankPlan, hardware: HardwareProfile | None) -> str:
    """Return the page of a plan.

    Args:
        plan: what to show.
        hardware: of its time, if it has one.
    """
    title = f"{plan.model} on {counted(plan.processes, 'process')}"
    parts = [f"<h1>{escape(title)}</h1>", facts(_headline(plan))]
    # One chart a row: a step has thousands of instants.
    if plan.step is not None:
        parts.append(charts([_memory_chart(plan, plan.step)]))
    if plan.time is not None and hardware is not None:
        fp8 = plan.mixed_precision == "fp8"
        speeds = Speeds(hardware, plan.time.compiled, fp8, plan.time.overlaps_products)
        parts.append(charts([_time_chart(simulate(plan.operations, speeds, timeline=True).spans)]))
    if plan.peak is not None:
        parts += ["<h2>Largest tensors at the peak</h2>", _tensors(plan.peak)]
    if plan.time is not None:
        parts += ["<h2>Time</h2>", _seconds(plan)]
    parts += ["<h2>Mesh</h2>", _mesh(plan, hardware)]
    report = f"<details><summary>The report as text</summary><pre>{escape(as_text(plan))}</pre></details>"
    return document(f"accel plan: {title}", *parts, report)


def _headline(plan: RankPlan) -> dict[str, str]:
    """Return whether the plan fits, how fast it is, and what limits it."""
    fits = verdict(plan)
    found = {"memory": fits[0].upper() + fits[1:] if fits else f"{convert_bytes(plan.total)} on rank {plan.rank}"}
    if plan.memory_limit is not None and not fits:
        found["memory"] = f"More than {convert_bytes(plan.total)}; whether it fits is not known"
    if plan.time is not None:
        found["speed"] = f"{plan.time.tokens:,.0f} tokens per second and device"
        found["model FLOPs utilization (MFU)"] = f"{plan.time.utilization:.1%}"
        found["bottleneck"] = plan.time.bottleneck
    return found


def _memory_chart(plan: RankPlan, step: StepMemory) -> str:
    """Return bytes by category after each allocation, with the limit, and the peak in the title."""
    changes = {name: [0] * len(step.events) for name in CATEGORIES}
    start = dict.fromkeys(CATEGORIES, 0)
    for group, count in step.start.items():
        start[group.category] += group.bytes * count
    for index, event in enumerate(step.events):
        changes[event.group.category][index] = event.group.bytes * event.count
    series = {name: list(accumulate(changes[name], initial=start[name])) for name in CATEGORIES}
    total = [sum(values) for values in zip(*series.values(), strict=True)]
    shown = _highest(total)
    used = [name for name in CATEGORIES if any(series[name])]
    # The first area is the highest: what a rank holds all the time is at the bottom.
    curves = [
        Curve(name, [(index, series[name][index]) for index in shown], color, stacked=True)
        for color, name in reversed(list(enumerate(used)))
    ]
    peak = max(total)
    when = total.index(peak)
    curves.append(Curve("all", [(index, total[index]) for index in shown], None, width=1))
    curves.append(Curve("peak", [(when, peak)], None, marked=True))
    if plan.memory_limit is not None:
        reserve = 0 if plan.reserve is None else plan.reserve.total
        name = f"limit: {convert_bytes(plan.memory_limit)}"
        name += f" less a reserve of {convert_bytes(reserve)}" if reserve else ""
        curves.append(Curve(name, [(index, plan.memory_limit - reserve) for index in shown], None, dashed=True))
    where = "" if plan.peak is None else f" {plan.peak.moment.describe()}"
    return chart(f"Memory: {convert_bytes(peak)} at the peak{where}", curves, "allocations", unit="B")


def _tensors(peak: PeakMemory) -> str:
    """Return the largest tensors by module."""
    columns = {"module": "module", "use": "use", "made": "made by", "tensors": "tensors", "bytes": "memory"}
    rows = []
    for item in peak.tensors:
        group = item.group
        name = group.module or "(the whole model)"
        made = "" if group.operation == group.category else group.operation
        row = _texts(module=name, use=group.category, made=made, tensors=item.describe())
        rows.append({**row, "bytes": Cell(convert_bytes(item.bytes), item.bytes)})
    return table(columns, rows)


def _texts(**texts: str) -> dict[str, Cell]:
    return {key: Cell(text, text) for key, text in texts.items()}


def _highest(total: list[int]) -> list[int]:
    """Return the index of the largest value in each of at most ``_POINTS`` parts."""
    width = max(math.ceil(len(total) / _POINTS), 1)
    parts = (range(first, min(first + width, len(total))) for first in range(0, len(total), width))
    return [max(part, key=total.__getitem__) for part in parts]


def _time_chart(spans: Iterable[Span]) -> str:
    """Return a line for the computation and one for each lane of messages, interrupted while it is idle."""
    lanes: dict[str, list[Span]] = {}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    curves = []
    for number, (lane, found) in enumerate(sorted(lanes.items())):
        points: list[tuple[float, float]] = []
        for span in found:
            points += [(1e3 * span.start, number), (1e3 * span.end, number)]
        curves.append(Curve(lane, _joined(points), number, width=14))
    return chart("When computation and communication are busy", curves, "ms", sorted(lanes))


def _joined(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Pairs of begin and end as a line, without interruptions shorter than a two-thousandth of the whole."""
    shortest, joined = points[-1][0] / 2000, points[:2]
    for begin, end in zip(points[2::2], points[3::2], strict=True):
        if begin[0] - joined[-1][0] > shortest:
            # A chart has one value for each x: the interruption has its own.
            joined += [(math.nextafter(joined[-1][0], math.inf), math.nan), begin, end]
        else:
            joined[-1] = end
    return joined


def _mesh(plan: RankPlan, hardware: HardwareProfile | None) -> str:
    columns = {"axis": "axis", "size": "ranks", "coordinate": f"rank {plan.rank}", "distance": "distance"}
    if hardware is not None:
        columns["link"] = "link"
    rows, distance = [], 1
    for name, (coordinate, size) in reversed(list(plan.coordinates.items())):
        group = range(0, size * distance, distance)
        node = 1 if hardware is None else hardware.devices_per_node
        row = _texts(axis=name, link="in a node" if group[-1] // node == 0 else "between nodes")
        numbers = {"size": size, "coordinate": coordinate, "distance": distance}
        rows.append({**row, **{key: Cell(f"{number:,}", number) for key, number in numbers.items()}})
        distance *= size
    return table(columns, rows)


def _seconds(plan: RankPlan) -> str:
    assert plan.time is not None
    columns = {"part": "part", "seconds": "seconds", "share": "share"}
    rows = []
    for name, seconds in plan.time.parts.items():
        share = Cell(f"{seconds / plan.time.seconds:.1%}", seconds)
        rows.append({**_texts(part=name), "seconds": Cell(f"{seconds:.4f}", seconds), "share": share})
    return table(columns, rows)
