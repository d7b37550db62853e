"""Logging a run to any number of trackers without blocking the training loop."""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any, Final

from accel_state.arguments import check_number
from accel_state.errors import ConfigurationError, check_type
from accel_state.paths import as_path
from accel_state.secrets import hide_values

from .base import GeneralTracker, Silence, TrackerError
from .delivery_queue import Delivery, DeliveryQueue
from .log_with import filter_trackers
from .rank_info import is_main_process
from .snapshot import Snapshot

logger: Final = logging.getLogger(__name__)
_DELIVERY: Final = Delivery()

Settings = Mapping[str, Mapping[str, Any]] | None


class TrackerRun:
    """Logs a run to trackers from the main process, without blocking the training loop.

    Each tracker has a queue and a thread. :meth:`log` copies the values and returns; the threads deliver them in order.
    :meth:`finish` empties the queues, and so does the end of the script, even by an exception.
    ``init_kwargs`` and ``log_kwargs`` of its methods are further arguments for single trackers, by the tracker's name.

        with TrackerRun(["tensorboard", "jsonl"], logging_dir="runs") as run:
            run.init_trackers("digits", config={"lr": 0.1})
            run.log({"loss": loss}, step=step)

    Args:
        log_with: a name, a LoggerType, a tracker class or object, "all", or a list of those.
        logging_dir: directory for trackers that write files.
        strict: raise TrackerError when a tracker fails, instead of disabling it with a warning.
        delivery: queue size and timeouts; ``strict`` is added to it.
        owner: an object that uses it. The run is finished when the owner is gone; at the latest when another run
            starts, if the script asked for a tracker and may still use it.

    Attributes:
        log_with: the tracker classes and objects that were selected.
        owner_pid: process that started the run; forked processes do not log.

    Raises:
        ConfigurationError: an unknown name, an object that is not a tracker, or a missing ``logging_dir``.
        MissingDependencyError: the library of a tracker is not installed.
    """

    def __init__(
        self,
        log_with: Any = None,
        logging_dir: str | os.PathLike[str] | None = None,
        *,
        strict: bool = False,
        delivery: Delivery | None = None,
        owner: Any = None,
    ) -> None:
        if logging_dir is not None:
            as_path("logging_dir", logging_dir)
        self.logging_dir = logging_dir  # as it was given: trackers may expect text
        self.log_with: list[Any] = [] if log_with is None else filter_trackers(log_with, logging_dir)
        self.owner_pid: int = os.getpid()
        self._delivery = delivery or _DELIVERY
        if strict:
            self._delivery = replace(self._delivery, strict=True)
        self._queues: list[DeliveryQueue] = []
        self._not_created: set[str] = set()
        self._to_resume: dict[str, dict[str, Any]] = {}
        self._resumed: dict[str, dict[str, Any]] = {}
        self._config: dict[str, Any] | None = None
        self._last_step: int | None = None
        self._warned: set[str] = set()
        self._owner = None if owner is None else weakref.ref(owner)
        self._trackers_in_use = False  # whether the script asked for a tracker

    def __getstate__(self) -> dict[str, Any]:
        # Queues and threads belong to this object: a copy logs nothing until init_trackers is called on it.
        return {**self.__dict__, "_queues": [], "_owner": None}

    # Logging

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Settings = None) -> None:
        """Start a run in every tracker, after ending the one in progress, if any.

        Args:
            project_name: name of the project or experiment.
            config: hyperparameters to store with the run: a dictionary, a namespace or a data class, with values of any
                type.

        Raises:
            ConfigurationError: ``config`` has another type.
            TrackerError: in strict mode, a tracker failed to start.
        """
        check_type(project_name, str, "init_trackers(project_name=...)", "Pass the name of the project as text.")
        check_type(
            init_kwargs or {}, Mapping, "init_trackers(init_kwargs=...)", "Pass arguments by the tracker's name."
        )
        self.finish()
        _finish_abandoned()
        self._config = _to_store(config)
        self.owner_pid, self._last_step, self._trackers_in_use = os.getpid(), None, False
        self._not_created.clear()
        # A loaded state is resumed once; later calls start new runs.
        self._resumed, self._to_resume = self._to_resume, {}
        main = is_main_process()
        for tracker in self.log_with:
            if main or not getattr(tracker, "main_process_only", True):
                self._start(tracker, project_name, dict((init_kwargs or {}).get(str(tracker.name), {})))
        self._wait_for_start()

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Settings = None) -> None:
        """Log the current values to every tracker.

        Returns at once, unless the queue of a tracker is full: then when it has room, or the tracker was disabled.

        Args:
            values: names to numbers, tensors (on any device), strings, or what else the trackers accept.

        Raises:
            ConfigurationError: ``values`` is not a mapping, or ``step`` is not a whole number.
            TrackerError: in strict mode, a tracker failed since the last call.
        """
        queues = self._queues
        if step is not None:
            step = int(check_number("step", step, whole=True))
        _check_values(values)
        if not queues or os.getpid() != self.owner_pid:
            self._explain_silence()
            return
        snapshot = self._snapshot(values)
        if snapshot is None:
            return
        if step is not None and (self._last_step is None or step > self._last_step):
            self._last_step = step
        for queue in queues:
            kwargs = log_kwargs.get(queue.name, {}) if log_kwargs else {}
            queue.submit("log", partial(_log, queue.tracker, snapshot, step, kwargs))

    def log_images(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Settings = None) -> None:
        """Log images to every tracker that supports them.

        Args:
            values: names to images or lists of them: tensors (channels first), arrays (channels last), or PIL images;
                bytes, or numbers from 0 to 1.
        """
        _check_values(values)
        snapshot = self._snapshot(values) if self._queues else None
        if snapshot is not None:
            self._submit(
                "log_images", lambda method, kwargs: method(snapshot.values(), step=step, **kwargs), log_kwargs
            )

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: Settings = None,
    ) -> None:
        """Log a table to every tracker that supports them.

        Args:
            table_name: name of the table.
            columns: names of the columns.
            data: rows.
            dataframe: a pandas data frame, instead of ``columns`` and ``data``.
        """
        check_type(table_name, str, "log_table", "Pass the name of the table as text.")
        table = {"columns": columns, "data": data, "dataframe": dataframe}
        snapshot = self._snapshot(table) if self._queues else None
        if snapshot is not None:
            self._submit(
                "log_table",
                lambda method, kwargs: method(table_name, **snapshot.values(), step=step, **kwargs),
                log_kwargs,
            )

    def log_artifact(
        self, local_path: str | os.PathLike[str], artifact_path: str | None = None, log_kwargs: Settings = None
    ) -> None:
        """Store a file with the run, in every tracker that supports files; it may be deleted after the call.

        Args:
            local_path: the file.
            artifact_path: directory among the run's files to store it in.

        Raises:
            ConfigurationError: there is no such file.
        """
        path = as_path("local_path", local_path)
        if not self._queues:
            return
        if not path.is_file():
            raise ConfigurationError(f"file not found: {str(path)!r}. Write it on the main process before logging it.")
        self._submit(
            "log_artifact", lambda method, kwargs: method(str(path), artifact_path=artifact_path, **kwargs), log_kwargs
        )
        self.flush()

    def flush(self) -> None:
        """Wait until every tracker has received what was logged; one that makes no progress is disabled.

        Raises:
            TrackerError: in strict mode, a tracker failed.
        """
        if os.getpid() == self.owner_pid:
            for queue in self._queues:
                queue.wait()

    def finish(self, failed: bool = False) -> None:
        """Empty the queues and end the run in every tracker. Waits while there is progress, and reports what is lost.

        Args:
            failed: mark the run as failed, in trackers that support it.

        Raises:
            TrackerError: in strict mode, a tracker failed.
        """
        queues, self._queues = self._queues, []
        _open.pop(id(self), None)
        if os.getpid() != self.owner_pid:
            return
        for queue in queues:
            queue.close(partial(_finish, queue.tracker, failed))
        errors = []
        for queue in queues:
            try:
                queue.join()
            except TrackerError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> TrackerRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(failed=kind is not None)

    # Access to the trackers

    @property
    def is_abandoned(self) -> bool:
        """True if its owner is gone."""
        return self._owner is not None and self._owner() is None

    @property
    def has_trackers(self) -> bool:
        """True if trackers were started in this process."""
        return bool(self._queues)

    @property
    def trackers(self) -> list[Any]:
        """The enabled trackers in this process, once they have received everything that was logged."""
        self.flush()
        self._trackers_in_use = True
        return [queue.tracker for queue in self._queues if queue.error is None]

    def replace_trackers(self, trackers: Iterable[Any]) -> None:
        """Log to these trackers, which have been started, from now on.

        Trackers that are left out receive what was logged before, and their runs stay open.
        """
        self.flush()
        kept = {id(queue.tracker): queue for queue in self._queues}
        queues = [
            kept.pop(id(tracker)) if id(tracker) in kept else DeliveryQueue(tracker, self._delivery)
            for tracker in trackers
        ]
        for queue in kept.values():
            queue.close(_no_op)
        self._queues = queues
        if queues:
            self.owner_pid = os.getpid()
            _finish_at_exit(self)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name, once it has received everything that was logged.

        Args:
            name: the tracker's name.
            unwrap: return the object of the tracker's library.

        Returns:
            The tracker; on ranks that do not log, and for a disabled tracker, an object whose methods do nothing.

        Raises:
            ConfigurationError: no tracker of that name was started.
        """
        for queue in self._queues:
            if queue.name == str(name):
                if os.getpid() != self.owner_pid:
                    return Silence(queue.name)
                queue.wait()
                self._trackers_in_use = True
                tracker: Any = Silence(queue.name) if queue.error else queue.tracker
                return tracker.tracker if unwrap else tracker
        selected = any(tracker.name == name for tracker in self.log_with)
        if str(name) in self._not_created or (selected and not is_main_process()):
            return Silence(str(name))
        started = ", ".join(queue.name for queue in self._queues) or "none"
        raise ConfigurationError(
            f"no tracker {str(name)!r} was started; started: {started}. Add it to log_with and call init_trackers "
            "first."
        )

    # Resuming runs

    def state_dict(self) -> dict[str, Any]:
        """Return what a later job needs to continue the runs: plain data to save with a checkpoint."""
        runs = {**self._resumed, **self._to_resume}
        for queue in self._queues:
            run_id = getattr(queue.tracker, "run_id", None)
            if run_id is not None:
                step = self._last_step if self._last_step is not None else runs.get(queue.name, {}).get("step")
                runs[queue.name] = {"run_id": str(run_id), "step": step}
        return {"trackers": runs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the runs of a :meth:`state_dict`.

        Before :meth:`init_trackers`, this makes it continue the runs where they stopped. After it, the new runs are
        ended (and deleted, if they are empty and the back end can do so) and replaced by the earlier ones.

        Args:
            state: result of :meth:`state_dict`.

        Raises:
            TrackerError: in strict mode, a tracker failed.
        """
        runs = {str(name): dict(run) for name, run in state["trackers"].items()}
        if not self._queues:
            self._to_resume = runs
            return
        self._resumed = runs
        is_empty = self._last_step is None
        for queue in self._queues:
            run = runs.get(queue.name)
            if run is not None:
                queue.submit("resume", partial(_switch_run, queue.tracker, run, is_empty, self._config))
        self._wait_for_start()

    # Helpers

    def _start(self, selected: Any, project_name: str, arguments: dict[str, Any]) -> None:
        try:
            tracker = selected
            if isinstance(selected, type):
                if selected.requires_logging_directory:  # type: ignore[attr-defined]
                    directory = arguments.setdefault("logging_dir", self.logging_dir)
                    if directory is not None:
                        os.makedirs(directory, exist_ok=True)
                tracker = selected(project_name, **arguments)
            run = self._resumed.get(str(tracker.name))
            if run is not None and hasattr(tracker, "resume"):
                tracker.resume(run["run_id"], run.get("step"))
            queue = DeliveryQueue(tracker, self._delivery, partial(self._last_call, tracker))
        except Exception as error:
            message = f"The tracker {str(selected.name)!r} could not be created"
            if self._delivery.strict:
                raise TrackerError(f"{message}: {error}") from error
            self._not_created.add(str(selected.name))
            logger.warning("%s and is disabled: %s: %s. The run continues.", message, type(error).__name__, error)
            return
        self._queues.append(queue)
        _finish_at_exit(self)
        queue.submit("start", getattr(tracker, "start", _no_op))
        if self._config is not None:
            queue.submit("store_init_configuration", partial(tracker.store_init_configuration, dict(self._config)))

    def _last_call(self, tracker: Any) -> Callable[[], Any] | None:
        unused = self.is_abandoned and not self._trackers_in_use
        return partial(_finish, tracker, False) if unused else None

    def _wait_for_start(self) -> None:
        left = self._delivery.start_timeout
        for queue in self._queues:
            started = queue.wait(max(left, 0.001), disable=self._delivery.strict)
            left -= queue.waited
            if not started:
                logger.warning(
                    "The tracker %r has not started after %g s. The run continues, and up to %d calls are queued for "
                    "it.",
                    queue.name,
                    self._delivery.start_timeout,
                    self._delivery.queue_size,
                )

    def _submit(self, method: str, call: Callable[[Any, Mapping[str, Any]], Any], log_kwargs: Settings) -> None:
        """Queue a call for every tracker that has the method."""
        if os.getpid() != self.owner_pid:
            self._explain_silence()
            return
        for queue in self._queues:
            function = getattr(queue.tracker, method, None)
            if function is None:
                self._warn_once(f"The tracker {queue.name!r} does not support {method}().")
            else:
                queue.submit(method, partial(call, function, (log_kwargs or {}).get(queue.name, {})))

    def _snapshot(self, values: Mapping[str, Any]) -> Snapshot | None:
        try:
            return Snapshot(values)
        except Exception as error:
            if self._delivery.strict:
                raise TrackerError(
                    f"The values of {', '.join(map(str, values))} could not be copied: {error}"
                ) from error
            self._warn_once(f"The values of log() are dropped: {type(error).__name__}: {error}")
            return None

    def _explain_silence(self) -> None:
        """Warn that nothing is logged, if that is probably a mistake."""
        if os.getpid() != self.owner_pid:
            self._warn_once(
                "log() was called in a process forked from the one that started the run, and has no effect there.",
                os.getpid(),
            )
        elif self.log_with and not self._not_created and is_main_process():
            self._warn_once("log() was called before init_trackers() or after the end of the run, and has no effect.")

    def _warn_once(self, message: str, key: Any = None) -> None:
        if f"{key}{message}" not in self._warned:
            self._warned.add(f"{key}{message}")
            logger.warning(message)


def _to_store(config: Any) -> dict[str, Any] | None:
    """Return a configuration as a dictionary without its secrets: trackers store it where others read it."""
    if config is None:
        return None
    is_dataclass_instance = is_dataclass(config) and not isinstance(config, type)
    if isinstance(config, Mapping):
        given = dict(config)
    elif is_dataclass_instance or isinstance(config, (argparse.Namespace, types.SimpleNamespace)):
        given = dict(vars(config))
    else:
        raise ConfigurationError(
            f"config={config!r} is of type {type(config).__name__}. Pass a dictionary, a namespace or a data class."
        )
    shown = hide_values(given)
    hidden = [str(name) for name, value in given.items() if shown[name] is not value]
    if hidden:
        logger.warning("Trackers do not get the secrets in %s of their configuration.", ", ".join(hidden))
    return shown


def _check_values(values: Any) -> None:
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f"log() got {values!r} of type {type(values).__name__}. Pass a dictionary of names to values."
        )


def _no_op() -> None:
    """Stands in for a missing ``start`` or ``finish``."""


def _log(tracker: Any, snapshot: Snapshot, step: int | None, kwargs: Mapping[str, Any]) -> None:
    tracker.log(snapshot.values(), step=step, **kwargs)


def _finish(tracker: Any, failed: bool) -> None:
    if isinstance(tracker, GeneralTracker):
        tracker.failed = failed
    getattr(tracker, "finish", _no_op)()


def _switch_run(tracker: Any, run: Mapping[str, Any], is_empty: bool, config: dict[str, Any] | None) -> None:
    """End the tracker's run, and continue another one."""
    if tracker.run_id == run["run_id"]:
        return
    tracker.discard() if is_empty else tracker.finish()
    tracker.resume(run["run_id"], run.get("step"))
    tracker.start()
    if config is not None:
        tracker.store_init_configuration(dict(config))


# In the order of their start. The references keep a run alive whose object the script has dropped.
_open: dict[int, TrackerRun] = {}
_registered_in: list[int] = []


def _finish_at_exit(run: TrackerRun) -> None:
    """Finish ``run`` at the end of this process, unless it is finished before."""
    _open[id(run)] = run
    if os.getpid() not in _registered_in:
        _registered_in.append(os.getpid())
        # Called before the interpreter joins its threads and runs atexit callbacks, in which libraries close
        # themselves, and also in multiprocessing children, where atexit callbacks do not run.
        getattr(threading, "_register_atexit", atexit.register)(_finish_all)


def _finish_abandoned() -> None:
    """Finish the runs whose owner is gone, such as the Accelerator of an earlier trial in a search of parameters."""
    if _open:
        gc.collect()  # owners are parts of cycles
    for run in list(_open.values()):
        if run.is_abandoned:
            run.finish()


def _finish_all() -> None:
    """Finish the runs of this process, but not copies inherited by a fork."""
    failed = getattr(sys, "last_value", None) is not None
    for run in list(_open.values()):
        if run.owner_pid == os.getpid():
            try:
                run.finish(failed=failed)
            except Exception as error:
                logger.error("%s", error)
