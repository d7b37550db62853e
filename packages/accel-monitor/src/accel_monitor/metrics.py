"""A run as metrics in the text format of Prometheus, version 0.0.4. Torch-free.

https://prometheus.io/docs/instrumenting/exposition_formats/ specifies the format: a few lines of text, for which a
client library would be one more thing to install.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from .ledger import make_ledger
from .page import rows_of
from .parts import NAMES
from .records import Run

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "accel_monitor_"


class _Metrics:
    """Samples by metric, because those of one metric must follow each other."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def add(self, name: str, kind: str, text: str, value: float | None, labels: Mapping[str, object]) -> None:
        """Add a sample; a value of None is unknown, and left out."""
        if value is None:
            return
        head = [f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"]
        shown = ",".join(f'{key}="{_escaped(str(label))}"' for key, label in labels.items())
        labels_text = f"{{{shown}}}" if shown else ""
        self._lines.setdefault(name, head).append(f"{_PREFIX}{name}{labels_text} {_number(value)}")

    def lines(self) -> Iterator[str]:
        """Yield all lines."""
        for of_metric in self._lines.values():
            yield from of_metric


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else f"{value:+}".replace("inf", "Inf")


def metrics(run: Run, now: float | None = None) -> str:
    """Return the metrics of all ranks, in the format of Prometheus.

    Args:
        run: a run that was just read.
        now: see :func:`accel_monitor.page.rows_of`.
    """
    found = _Metrics()
    for row in rows_of(run, now):
        attempt = run.attempts[row.slot][-1]
        last = attempt.samples[-1] if attempt.samples else None
        rank = {"replica": row.slot[0], "rank": row.slot[1], "host": row.host}
        found.add("state", "gauge", "1 for the state of the rank.", 1, {**rank, "state": row.state})
        found.add("step", "gauge", "Optimizer steps, with those of a loaded state.", row.step, rank)
        found.add("own_step_seconds", "gauge", "Seconds of a step that the rank works itself.", row.own, rank)
        found.add("samples_per_second", "gauge", "Samples for training, between the last reports.", row.rate, rank)
        found.add("memory_bytes", "gauge", "Memory in use on the device, or of the process.", row.memory, rank)
        loss = None if row.loss is None else float(row.loss)
        found.add("loss", "gauge", "The latest loss.", loss, rank)
        found.add("flops_per_second", "gauge", "Floating-point operations, without those done again.", row.flops, rank)
        found.add("mfu_ratio", "gauge", "Share of what the device can compute.", row.mfu, rank)
        bad = len(attempt.bad_steps)
        found.add("bad_steps_total", "counter", "Losses and gradient norms that were reported as bad.", bad, rank)
        if last is not None:
            text = "Samples for training since the start of the process."
            found.add("samples_total", "counter", text, last.samples, rank)
            found.add("tokens_total", "counter", "Tokens for training, likewise.", last.tokens, rank)
            for name, seconds in zip(NAMES, last.parts, strict=True):
                text = "Time since the process was measured, by part."
                found.add("part_seconds_total", "counter", text, seconds, {**rank, "part": name})
        for slow in attempt.stragglers:
            if slow.last == math.inf:
                labels = {"replica": row.slot[0], "rank": slow.rank, "part": slow.part}
                found.add("slow_rank", "gauge", "1 for a rank that the others wait for.", 1, labels)
    ledger = make_ledger(run)
    for cause, seconds in ledger.seconds.items():
        text = "Time of all ranks over all restarts, by cause, in rank-seconds."
        found.add("ledger_seconds", "gauge", text, seconds, {"cause": cause.value})
    found.add("goodput_ratio", "gauge", "Share of the time in productive steps.", ledger.goodput, {})
    found.add("interruptions", "gauge", "How often processes ended before the run did.", ledger.failures, {})
    return "\n".join(found.lines()) + "\n"
