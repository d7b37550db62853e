"""Settings of the profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from accel_state.errors import ConfigurationError

from .base import KwargsHandler

ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]
_SCHEDULE_KEYS = ("wait", "warmup", "active", "repeat", "skip_first")


@dataclass
class ProfileKwargs(KwargsHandler):
    """What :meth:`accel.Accelerator.profile` records; see ``torch.profiler.profile``.

    Args:
        activities: which activities to record; None records all that this machine has.
        schedule_option: keys ``wait``, ``warmup``, ``active``, ``repeat``, ``skip_first``: steps of each phase. Call
            ``prof.step()`` after each training step.
        on_trace_ready: called with the profiler whenever a trace is ready.
        record_shapes: record the shapes of operator inputs.
        profile_memory: record memory allocation.
        with_stack: record source lines.
        with_flops: estimate floating point operations of matrix products and convolutions.
        with_modules: record the module hierarchy.
        output_trace_dir: write a Chrome trace of each rank into this folder, as ``profile_<rank>.json``.

    Raises:
        ConfigurationError: (from :meth:`build`) an activity or schedule key that is not known.
    """

    activities: list[ProfilerActivity] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """Make the profiler; it is not started."""
        return torch.profiler.profile(
            activities=None if self.activities is None else [_activity(name) for name in self.activities],
            schedule=None if self.schedule_option is None else _schedule(self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def _activity(name: str) -> torch.profiler.ProfilerActivity:
    known = {key: value for key, value in torch.profiler.ProfilerActivity.__members__.items()}
    if name.upper() not in known:
        raise ConfigurationError(f"{name!r} is not a profiler activity of this torch. Allowed: {', '.join(sorted(known)).lower()}.")
    return known[name.upper()]


def _schedule(options: dict[str, int]) -> Callable[..., Any]:
    unknown = sorted(set(options) - set(_SCHEDULE_KEYS))
    if unknown:
        raise ConfigurationError(f"schedule_option has unknown keys {unknown}. Allowed: {', '.join(_SCHEDULE_KEYS)}.")
    # torch requires these three; nothing to wait for or to warm up is what their absence means.
    return torch.profiler.schedule(**{"wait": 0, "warmup": 0, "active": 1, **options})
