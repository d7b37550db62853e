"""Losses and gradient norms that are not finite or far too large, with the samples of their batches.

Nothing is computed for it: the monitor looks at the losses that ``accelerator.backward`` gets and at the norms that
``accelerator.clip_grad_norm_`` returns, in its own thread, when the loop has gone on. Nothing waits for a device: steps
whose values are not ready are checked later.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .recorder import RECENT_STEPS, Recorder, StepRecord
from .values import is_known, number

TOO_LARGE = 10.0
"""A norm of so many times its running median is reported."""
_MEDIAN_OF, _FEWEST_NORMS = 100, 10
_MOST_EVENTS = 50
_MOST_INDICES = 4096


class NormLimit:
    """The running median of gradient norms, and the norm that is too large."""

    def __init__(self) -> None:
        self.limit: float = math.inf
        self._norms: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._seen = 0

    def is_exceeded(self, norm: float) -> bool:
        """Return True if a norm is not finite or too large, compared with those before it."""
        exceeded = not norm < self.limit
        if math.isfinite(norm):
            self._norms.append(norm)
            self._seen += 1
            # The median of a hundred numbers takes longer than the rest of a measured step.
            if self._seen % _FEWEST_NORMS == 0:
                self.limit = TOO_LARGE * statistics.median(self._norms)
        return exceeded


class BadSteps:
    """Looks through the steps of a recorder.

    Args:
        recorder: whose steps.

    Attributes:
        loss: of the latest step that was checked; None before the first.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.loss: float | None = None
        self._recorder = recorder
        self._taken: StepRecord | None = None
        self._waiting: deque[StepRecord] = deque(maxlen=RECENT_STEPS)  # values of a device may come later
        self._norms = NormLimit()
        self._open: set[str] = set()  # kinds of which the latest value was bad
        self._events = 0

    def check(self) -> list[dict[str, Any]]:
        """Return the bad steps since the last call, as fields of a line.

        Of values that are bad in a row, only the first is among them.
        """
        fresh = self._recorder.latest(after=self._taken)
        if fresh:
            self._taken = fresh[-1]
        waiting = self._waiting
        waiting.extend(fresh)
        found: list[dict[str, Any]] = []
        while waiting and is_known(waiting[0].loss) and is_known(waiting[0].norm):
            record = waiting.popleft()
            loss, norm = number(record.loss), number(record.norm)
            self.loss = loss
            if loss is not None and math.isfinite(loss):
                self._open.discard("loss")
            elif loss is not None:
                found += self._judge(record, "loss", loss, math.inf)
            if norm is None:
                continue
            limit = self._norms.limit
            if self._norms.is_exceeded(norm):
                found += self._judge(record, "norm", norm, limit)
            else:
                self._open.discard("norm")
        return found

    def _judge(self, record: StepRecord, kind: str, value: float, limit: float) -> Iterable[dict[str, Any]]:
        if kind in self._open or self._events >= _MOST_EVENTS:
            return
        self._open.add(kind)
        self._events += 1
        indices = plain_indices(record.indices)
        yield {
            "step": record.step,
            "what": kind,
            "value": value if math.isfinite(value) else str(value),
            "median": limit / TOO_LARGE if kind == "norm" and math.isfinite(limit) else None,
            "group": record.group if kind == "norm" else None,
            "indices": None if indices is None else indices[:_MOST_INDICES],
        }


def plain_indices(batches: Any) -> list[int] | None:
    """Return the indices of all batches of a step as numbers; None if the loader does not tell, or has others."""
    found: list[int] = []
    for batch in batches or ():
        items = batch if isinstance(batch, (list, tuple)) else [batch]
        for item in items:
            try:
                found.append(int(item))
            except (TypeError, ValueError):
                return None
    return found or None


def guilty_group(groups: Sequence[dict[str, Any]]) -> int | None:
    """Return the parameter group with the largest gradient, or the only one with values that are not finite.

    None if unknown.

    Called after the gradients were clipped, which keeps their proportions: a norm that is not a number has made all of
    them so.
    """
    if len(groups) == 1:
        return 0
    norms = []
    for group in groups:
        gradients = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
        if any(type(gradient) is not torch.Tensor for gradient in gradients):
            return None  # shards
        norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()) if gradients else 0.0)
    bad = [index for index, norm in enumerate(norms) if not math.isfinite(norm)]
    if bad:
        return bad[0] if len(bad) == 1 else None
    return max(range(len(norms)), key=norms.__getitem__)
