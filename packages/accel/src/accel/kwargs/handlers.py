"""Settings of autocast, loss scaling, process groups, the profiler and trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch

from accel_state import devices
from accel_state.arguments import check_number
from accel_state.errors import ArgumentTypeError, ConfigurationError
from accel_state.paths import as_path
from accel_track.delivery_queue import Delivery

from .base import KwargsHandler


@dataclass
class AutocastKwargs(KwargsHandler):
    """How ``torch.autocast`` runs, in prepared models and in :meth:`accel.Accelerator.autocast`.

    Args:
        enabled: False computes in full precision.
        cache_enabled: whether autocast caches converted weights until it ends; None takes torch's default.
        outputs_to_fp32: convert a prepared model's half-precision outputs to float32. Turn it off to keep large
            outputs (logits, images) in the precision they were computed in.
    """

    enabled: bool = True
    cache_enabled: bool | None = None
    outputs_to_fp32: bool = True

    def to_autocast(self) -> dict[str, Any]:
        """Return the arguments for ``torch.autocast``."""
        return {"enabled": self.enabled, "cache_enabled": self.cache_enabled}


@dataclass
class GradScalerKwargs(KwargsHandler):
    """How the loss is scaled with ``mixed_precision="fp16"``; see ``torch.amp.GradScaler``.

    Args:
        init_scale: the first loss scale.
        growth_factor: what the scale is multiplied by after ``growth_interval`` steps without overflow.
        backoff_factor: what the scale is multiplied by after an overflow.
        growth_interval: optimizer steps without overflow before the scale grows.
        enabled: False leaves losses and gradients unscaled.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("GradScalerKwargs.init_scale", self.init_scale, above=0)
        check_number("GradScalerKwargs.growth_factor", self.growth_factor, above=1)
        check_number("GradScalerKwargs.backoff_factor", self.backoff_factor, above=0, below=1)
        check_number("GradScalerKwargs.growth_interval", self.growth_interval, at_least=1, whole=True)


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How ``torch.distributed.init_process_group`` is called.

    Args:
        backend: the communication backend. The default takes the one of the device ("gloo" on CPU).
        init_method: the URL of the rendezvous; None takes the launcher's.
        timeout: the longest time of a collective; None takes torch's default.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("backend", "init_method"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ArgumentTypeError(f"InitProcessGroupKwargs({name}={value!r}) must be text, or None.")
        if self.timeout is None:
            return
        if not isinstance(self.timeout, timedelta):
            raise ArgumentTypeError(
                f"InitProcessGroupKwargs(timeout={self.timeout!r}) must be a datetime.timedelta, such as "
                f"timedelta(seconds={self.timeout!r})."
            )
        if self.timeout <= timedelta():
            raise ConfigurationError(f"InitProcessGroupKwargs(timeout={self.timeout!r}) must be longer than 0.")


ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]
_SCHEDULE_KEYS = ("wait", "warmup", "active", "repeat", "skip_first")


@dataclass
class ProfileKwargs(KwargsHandler):
    """What :meth:`accel.Accelerator.profile` records; see ``torch.profiler.profile``.

    Args:
        activities: which activities to record: those of torch.profiler.ProfilerActivity, or the name of a device; None
            records all that are available.
        schedule_option: keys ``wait``, ``warmup``, ``active``, ``repeat``, ``skip_first``: steps of each phase. Call
            ``prof.step()`` after each training step.
        on_trace_ready: called with the profiler whenever a trace is ready.
        record_shapes: record the shapes of operator inputs.
        profile_memory: record memory allocation.
        with_stack: record source lines.
        with_flops: estimate floating point operations of matrix products and convolutions.
        with_modules: record the module hierarchy.
        output_trace_dir: write a Chrome trace of each rank into this directory, as ``profile_<rank>.json``.

    Raises:
        ConfigurationError: (from :meth:`build`) an unknown activity or schedule key.
    """

    activities: list[ProfilerActivity | str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_trace_dir is not None:
            as_path("output_trace_dir", self.output_trace_dir)
        activities, schedule = self.activities, self.schedule_option
        if activities is not None and (isinstance(activities, str) or not isinstance(activities, Iterable)):
            raise ArgumentTypeError(f"ProfileKwargs(activities={activities!r}) must be a list, such as ['cpu'].")
        if schedule is not None and not isinstance(schedule, Mapping):
            raise ArgumentTypeError(
                f"ProfileKwargs(schedule_option={schedule!r}) must be a dictionary, such as {{'active': 2}}."
            )
        if self.on_trace_ready is not None and not callable(self.on_trace_ready):
            raise ArgumentTypeError(f"ProfileKwargs(on_trace_ready={self.on_trace_ready!r}) must be a function.")

    def build(self) -> torch.profiler.profile:
        """Create the profiler without starting it."""
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
    known = {member.lower(): value for member, value in torch.profiler.ProfilerActivity.__members__.items()}
    # torch records all devices of plug-ins as one activity.
    if any(device.name == name and device.is_plug_in() for device in devices.known()):
        name = "privateuse1"
    if name.lower() not in known:
        raise ConfigurationError(
            f"{name!r} is not a profiler activity of this torch. Allowed: {', '.join(sorted(known))}, and the name of "
            f"a device that a package adds to torch (here: {', '.join(found.name for found in devices.available())})."
        )
    return known[name.lower()]


def _schedule(options: dict[str, int]) -> Callable[..., Any]:
    unknown = sorted(set(options) - set(_SCHEDULE_KEYS))
    if unknown:
        raise ConfigurationError(f"schedule_option has unknown keys {unknown}. Allowed: {', '.join(_SCHEDULE_KEYS)}.")
    # torch requires these three.
    return torch.profiler.schedule(**{"wait": 0, "warmup": 0, "active": 1, **options})


@dataclass
class TrackingKwargs(KwargsHandler):
    """How logged values are delivered to trackers, and what happens if one fails; see :class:`accel_track.Delivery`.

    Args:
        strict: raise if a tracker fails. Otherwise it is disabled with a warning, and training continues.
        queue_size: number of ``log`` calls that may be queued for one tracker.
        start_timeout: seconds that ``init_trackers`` waits for a tracker to start.
        stall_timeout: seconds without progress after which a blocking call gives up on a tracker.
        finish_timeout: seconds that ``end_training`` waits for a tracker to finish after the last value.
    """

    strict: bool = False
    queue_size: int = Delivery.queue_size
    start_timeout: float = Delivery.start_timeout
    stall_timeout: float = Delivery.stall_timeout
    finish_timeout: float = Delivery.finish_timeout

    def to_delivery(self) -> Delivery:
        """Return the settings in accel_track's form."""
        return Delivery(**asdict(self))
