"""The monitor of one process, and :func:`attach` for scripts without an Accelerator."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_state import devices
from accel_state.errors import ConfigurationError, check_type
from accel_state.options import CoreOptions
from accel_state.paths import as_path, refuse_link
from accel_state.state import current_rank

from ._torch_compat import PASSES_HIGHER_ORDER, has_compiled_modules, watch_compilation
from .bad_steps import NormLimit, guilty_group
from .device_times import DeviceTimes
from .flops import FlopCount, StepFlops
from .hooks import ModelHooks, watch_loader, watch_optimizer
from .parts import Part
from .recorder import GROUP, LOSS, NORM, Recorder, Snapshot
from .records import FOLDER
from .reporter import Reporter
from .serving import ServerProcess
from .stragglers import OwnParts
from .tracked import TrackedValues
from .values import DeviceValues, value_of

INTERVAL = 2.0
"""Seconds between two reports."""
_SETTLE_SECONDS = 1.0
"""How long the end of a run waits for its last losses, if the device does not compute them."""
_FOR_PART = {"saving": Part.SAVING, "loading": Part.LOADING, "evaluation": Part.EVALUATION, "other": Part.OTHER}


class Monitor:
    """Measures one process and reports it to files in ``<project_dir>/monitor``.

    Args:
        project_dir: the directory of the run, the same for all ranks and all attempts.
        rank: the rank of this process.
        world_size: number of ranks.
        replica: the replica group of this process; None without replica groups.
        device: the device whose memory is reported.
        step: optimizer steps that were done before, if the script has loaded its state already.
        interval: seconds between two reports.
        peak_flops: operations per second that the device can compute in the precision of the run, for the MFU; None if
            it is unknown (``accel_state.hardware`` knows some devices).
        launcher: process id of the launcher of this run; its start counts as the start of the run.

    With ``accel launch --monitor_port``, rank 0 starts a process that serves the run.

    Raises:
        ConfigurationError: the directory is a file or a link, or a number is not allowed.
    """

    def __init__(
        self,
        project_dir: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        replica: int | None = None,
        device: torch.device | str = "cpu",
        step: int = 0,
        interval: float = INTERVAL,
        peak_flops: float | None = None,
        launcher: int | None = None,
    ) -> None:
        directory = as_path("project_dir", project_dir)
        for path in (directory, directory / FOLDER):
            if path.exists() and not path.is_dir():
                raise ConfigurationError(f"project_dir={os.fspath(project_dir)!r}: {path} is a file. Give a directory.")
        refuse_link(directory / FOLDER)
        if not interval > 0:
            raise ConfigurationError(f"interval={interval!r} must be a positive number of seconds.")
        if step < 0:
            raise ConfigurationError(f"step={step!r} must be at least 0: the optimizer steps done before.")
        if peak_flops is not None and not peak_flops > 0:
            raise ConfigurationError(f"peak_flops={peak_flops!r} must be a positive number of operations per second.")
        device = torch.device(device)
        self._peak_flops = peak_flops
        self._recorder = Recorder()
        self._recorder.begin_at(step)
        self._recorder.compares = world_size > 1 and device.type == "cpu"
        identity = {"replica": replica, "rank": rank, "world_size": world_size, "device": str(device), "step": step}
        self._reporter = Reporter(self._recorder, directory, interval, identity, launcher, device)
        self._world_size, self._device = world_size, device
        self._models: list[ModelHooks] = []
        self._device_times: DeviceTimes | None = None
        self._device_values: DeviceValues | None = None
        self._value_of = value_of
        if device.type != "cpu":
            self._measure_on(device)
        self._removals: list[Callable[[], None]] = []
        self._watches_compilation = self._has_compiled = False
        self._counting: Optimizer | None = None
        self._outer_parts: list[int] = []
        self._tracked = TrackedValues(self._recorder, world_size)
        address = CoreOptions.read("monitor_port")
        serves = address is not None and rank == 0 and not replica
        self._server = ServerProcess(directory, address) if serves else None
        self._reporter.start()
        # The script may end by an exception or a signal: that it finished is only known from finish().
        atexit.register(self._end, False)

    def _measure_on(self, device: torch.device) -> None:
        known = devices.of(device)
        if known is not None and known.streams() is not None:
            self._device_times = DeviceTimes(self._recorder, device, self._note_host_times)
            self._device_values = DeviceValues(device)
            self._value_of = self._device_values.take
        else:
            self._note_host_times("it has no events")

    def _note_host_times(self, reason: str) -> None:
        self._device_times = None
        self._reporter.event(
            "note",
            text=f"times are those of the host ({reason}): on {self._device.type} it queues work, and the time is "
            "booked where the loop waits for a result.",
        )
        self._reporter.own_parts = self._own_parts()

    def watch(
        self,
        *,
        loader: Any = None,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        marks_backward: bool = True,
    ) -> None:
        """Measure further objects. The first optimizer counts the steps.

        Args:
            loader: a loader of the training loop, or of an evaluation.
            model: the model that the loop calls, after wrapping.
            optimizer: an optimizer.
            marks_backward: begin the backward pass where the model's forward ends, because nothing else reports it.

        Raises:
            ConfigurationError: an object cannot be measured.
        """
        recorder = self._recorder
        if model is not None:
            check_type(model, nn.Module, "model", "Pass the model that the training loop calls.")
            hooks = ModelHooks(model, recorder, marks_backward)
            self._models.append(hooks)
            if self._world_size > 1 and not hooks.separates_waiting:
                name = type(model).__name__
                self._reporter.event(
                    "note",
                    text=f"waiting for other ranks is part of the forward and backward time of {name}, which "
                    "communicates inside of them.",
                )
            recorder.models.append(model)
            if len(recorder.models) == 1:
                if PASSES_HIGHER_ORDER:
                    recorder.flops = FlopCount(recorder, self._may_count, self._flops_counted)
                else:
                    self._note_uncounted(f"torch {torch.__version__} is too old. Upgrade torch")
            self._reporter.own_parts = self._own_parts()
            self._removals.append(hooks.remove)
        if optimizer is not None:
            inner = getattr(optimizer, "optimizer", optimizer)
            check_type(inner, Optimizer, "optimizer", "Pass an optimizer of torch.")
            counts = self._counting is None
            self._counting = self._counting or inner
            self._removals.append(watch_optimizer(inner, recorder, counts))
        if loader is not None:
            self._removals.append(watch_loader(loader, recorder))
        self._watch_compilation()

    def _may_count(self) -> bool:
        """Return True if a step can be inspected without disturbing it.

        Operators such as ``torch.cond`` compile what they are given in each call, which fails while something looks at
        operators. A compiled module is compiled by then.
        """
        if self._has_compiled and not any(map(has_compiled_modules, self._recorder.models)):
            self._recorder.flops = None
            self._note_uncounted("code outside of compiled modules uses torch.compile")
            return False
        return True

    def _note_uncounted(self, reason: str) -> None:
        self._reporter.event("note", text=f"the floating-point operations of a step are not known: {reason}.")

    def _flops_counted(self, step: StepFlops) -> None:
        self._recorder.flops = None
        if step.uncounted is None:
            if self._peak_flops:
                self._tracked.seconds_at_peak = step.total / self._peak_flops
            if self._has_compiled:
                text = (
                    "operations in kernels that torch.compile writes, such as flex_attention, are not counted in FLOPs."
                )
                self._reporter.event("note", text=text)
            self._reporter.event("flops", operations=step.total, recomputed=step.recomputed, peak=self._peak_flops)
        else:
            self._note_uncounted(f"{step.uncounted} is not counted")

    def _own_parts(self) -> OwnParts:
        separates_waiting = bool(self._models) and all(hooks.separates_waiting for hooks in self._models)
        if self._device.type == "cpu":
            return OwnParts.ALL if separates_waiting else OwnParts.COMPUTE
        return OwnParts.DEVICE if separates_waiting and self._device_times is not None else OwnParts.DATA

    def _watch_compilation(self) -> None:
        if not self._watches_compilation:
            remove = watch_compilation(self._compiling, self._compiled)
            if remove is not None:
                self._watches_compilation = True
                self._removals.append(remove)

    def _compiling(self, *_: Any) -> None:
        self._has_compiled = True
        self._outer_parts.append(self._recorder.part)
        self._recorder.mark(Part.COMPILING)

    def _compiled(self, *_: Any) -> None:
        if self._outer_parts:
            self._recorder.mark(self._outer_parts.pop())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block's time as one part: "saving", "loading", "evaluation" or "other".

        A saved state is also reported with its duration, from which ``accel goodput`` computes how often to save.

        Raises:
            ConfigurationError: another name.
        """
        if name not in _FOR_PART:
            raise ConfigurationError(f"part {name!r} is not one of {', '.join(_FOR_PART)}.")
        recorder = self._recorder
        outer = recorder.part
        recorder.mark(_FOR_PART[name])
        began = perf_counter()
        try:
            yield
        finally:
            recorder.mark(outer)
        if name == "saving":
            self._reporter.event("save", seconds=round(perf_counter() - began, 6), step=recorder.step)

    def loaded(self, step: int) -> None:
        """Report that a state was loaded, and how many optimizer steps it contains."""
        before = self._recorder.step
        self._recorder.begin_at(step)
        self._reporter.event("load", step=step, before=before)

    def timed_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs ``backward(loss, ...)``, measures it, and remembers the loss."""
        recorder, models, now = self._recorder, self._models, perf_counter
        append, also, begins = recorder.append, recorder.also, int(Part.BACKWARD)
        value_of = self._value_of

        def run(loss: Any, **kwargs: Any) -> Any:
            if recorder.is_new_batch:
                recorder.is_new_batch = False
            else:
                # From now on, hooks distinguish the forward passes within a batch.
                for model in models:
                    model.install()
            append(begins)
            append(now())
            if also is not None:
                also(begins)
            try:
                # A call with ** costs more than all that is measured here.
                result = backward(loss, **kwargs) if kwargs else backward(loss)
            except BaseException:
                recorder.mark(recorder.idle)
                raise
            idle = recorder.idle
            append(idle)
            append(now())
            if also is not None:
                also(idle)
            # Read now: the loop may change it, and not every change counts as one (an all-reduce, `.data`).
            value = (value_of(loss),)
            append(LOSS)
            append(value)
            return result

        return run

    def timed_waiting(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs ``collective(...)``, whose time counts as waiting for other ranks."""
        recorder, waiting, evaluation = self._recorder, int(Part.WAITING), int(Part.EVALUATION)

        def run(*args: Any, **kwargs: Any) -> Any:
            outer = recorder.part
            if outer == evaluation:
                return collective(*args, **kwargs)
            recorder.mark(waiting)
            try:
                return collective(*args, **kwargs)
            finally:
                recorder.mark(outer)

        return run

    def timed_clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs ``clip(parameters, ...)``, and remembers the norm that it returns."""
        note, limit, value_of = self._recorder.note, NormLimit(), self._value_of

        def run(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            value = value_of(norm)
            note(NORM, value)
            groups = [] if self._counting is None else self._counting.param_groups
            # A norm on a device is read later, when the gradients of several groups cannot be compared any more.
            is_exceeded = isinstance(value, float) and limit.is_exceeded(value)
            if groups and (is_exceeded or len(groups) == 1):
                note(GROUP, guilty_group(groups))
            return norm

        return run

    def logging(self, log: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs ``log(values, ...)`` and regularly adds ``monitor/...`` to the values."""
        tracked, reporter = self._tracked, self._reporter

        def run(values: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(values, Mapping):
                values = {**tracked.due(reporter.memory, reporter.slow_rank), **values}
            return log(values, *args, **kwargs)

        return run

    def snapshot(self) -> Snapshot:
        """Return the counters now."""
        return self._recorder.snapshot()

    def finish(self) -> None:
        """Report that the run is complete, and end the measurement; the objects are as they were before.

        A process that ends without it reports its last counters too, and the next one continues the same run.
        """
        self._end(True)

    def _end(self, finished: bool) -> None:
        for remove in self._removals:
            remove()
        self._removals.clear()
        if self._device_values is not None and finished:
            self._device_values.settle(_SETTLE_SECONDS)
        self._reporter.finish(finished)
        if self._server is not None:
            self._server.stop()
            self._server = None
        atexit.unregister(self._end)


def attach(
    *,
    loader: Any,
    optimizer: Optimizer,
    model: nn.Module | None = None,
    project_dir: str | os.PathLike[str] = ".",
    step: int = 0,
    interval: float = INTERVAL,
    peak_flops: float | None = None,
) -> Monitor:
    """Measure a training loop. The loop does not change: the objects that are passed report what they do.

    Args:
        loader: the loader of the training loop.
        optimizer: its optimizer.
        model: the model that the loop calls, after wrapping it in DistributedDataParallel or compiling it. Without it,
            forward and backward pass count as "other", and evaluation is not told from training.
        project_dir: the directory of the run, the same for all ranks; files are written to ``monitor/`` in it.
        step: optimizer steps of the checkpoint that was loaded.
        interval: seconds between two reports.
        peak_flops: operations per second that the device can compute, for the MFU; None if it is unknown.

    Returns:
        The monitor. ``with monitor.part("saving")`` marks blocks, and ``monitor.finish()`` ends the run.

    Raises:
        ConfigurationError: an argument cannot be used.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    check_type(inner, Optimizer, "optimizer", "Pass an optimizer of torch.")
    if not hasattr(type(loader), "__iter__"):
        raise ConfigurationError(
            f"loader={type(loader).__name__} object cannot be iterated over. Pass the DataLoader of the training loop."
        )
    rank, world_size = current_rank()
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    monitor = Monitor(
        project_dir,
        rank=rank,
        world_size=world_size,
        device=parameters[0].device,
        step=step,
        interval=interval,
        peak_flops=peak_flops,
    )
    try:
        monitor.watch(loader=loader, model=model, optimizer=optimizer)
    except BaseException:
        monitor._end(False)
        raise
    return monitor
