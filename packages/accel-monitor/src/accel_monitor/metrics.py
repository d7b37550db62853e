"""A run as metrics in the text format of Prometheus, version 0.0.4. Torch-free.

https://prometheus.io/docs/instrumenting/exposition_formats/ specifies the format: a few lines of text, for which a
client library would be one more thing to install.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .ledger import make_ledger
from .page import rows_of
from .parts import NAMES
from .records import Run

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "accel_monitor_"


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
    found: dict[str, list[str]] = {}  # by metric, because the samples of one must follow each other

    def add(name: str, kind: str, text: str, value: float | None, labels: Mapping[str, object]) -> None:
        if value is None:  # unknown
            return
        head = [f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"]
        shown = ",".join(f'{key}="{_escaped(str(label))}"' for key, label in labels.items())
        labels_text = f"{{{shown}}}" if shown else ""
        found.setdefault(name, head).append(f"{_PREFIX}{name}{labels_text} {_number(value)}")

    for row in rows_of(run, now):
        attempt = run.attempts[row.slot][-1]
        last = attempt.samples[-1] if attempt.samples else None
        rank = {"replica": row.slot[0], "rank": row.slot[1], "host": row.host}
        add("state", "gauge", "1 for the state of the rank.", 1, {**rank, "state": row.state})
        add("step", "gauge", "Optimizer steps, with those of a loaded state.", row.step, rank)
        add("own_step_seconds", "gauge", "Seconds of a step that the rank works itself.", row.own, rank)
        add("samples_per_second", "gauge", "Samples for training, between the last reports.", row.rate, rank)
        add("memory_bytes", "gauge", "Memory in use on the device, or of the process.", row.memory, rank)
        loss = None if row.loss is None else float(row.loss)
        add("loss", "gauge", "The latest loss.", loss, rank)
        add("flops_per_second", "gauge", "Floating-point operations, without those done again.", row.flops, rank)
        add("mfu_ratio", "gauge", "Share of what the device can compute.", row.mfu, rank)
        bad = len(attempt.bad_steps)
        add("bad_steps_total", "counter", "Losses and gradient norms that were reported as bad.", bad, rank)
        if last is not None:
            text = "Samples for training since the start of the process."
            add("samples_total", "counter", text, last.samples, rank)
            add("tokens_total", "counter", "Tokens for training, likewise.", last.tokens, rank)
            for name, seconds in zip(NAMES, last.parts, strict=True):
                text = "Time since the process was measured, by part."
                add("part_seconds_total", "counter", text, seconds, {**rank, "part": name})
        for slow in attempt.stragglers:
            if slow.last == math.inf:
                labels = {"replica": row.slot[0], "rank": slow.rank, "part": slow.part}
                add("slow_rank", "gauge", "1 for a rank that the others wait for.", 1, labels)
    ledger = make_ledger(run)
    for cause, seconds in ledger.seconds.items():
        text = "Time of all ranks over all restarts, by cause, in rank-seconds."
        add("ledger_seconds", "gauge", text, seconds, {"cause": cause.value})
    add("goodput_ratio", "gauge", "Share of the time in productive steps.", ledger.goodput, {})
    add("interruptions", "gauge", "How often processes ended before the run did.", ledger.failures, {})
    return "".join(f"{line}\n" for of_metric in found.values() for line in of_metric)
