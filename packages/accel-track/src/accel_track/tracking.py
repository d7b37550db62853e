"""A run in any number of trackers, for any script: the loop logs, and goes on."""

from __future__ import annotations

import argparse
import logging
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError

from . import atexit
from .base import GeneralTracker, Silence, TrackerError
from .delivery_queue import Channel, Delivery
from .log_with import filter_trackers
from .rank_info import is_main_process
from .snapshot import Snapshot

logger = logging.getLogger(__name__)

Settings = Mapping[str, Mapping[str, Any]] | None


class Tracking:
    """Logs a run to trackers, from the main process, without the training loop waiting for them.

    Each tracker has a queue and a thread of its own. :meth:`log` takes the values as they are at that moment and
    returns; the threads deliver them in order. :meth:`finish` empties the queues, and so does the end of the script,
    also by an exception.

        with Tracking(["tensorboard", "jsonl"], logging_dir="runs") as tracking:
            tracking.init_trackers("digits", config={"lr": 0.1})
            tracking.log({"loss": loss}, step=step)

    Args:
        log_with: a name, a LoggerType, a tracker class or object, "all", or a list of those.
        logging_dir: the folder for trackers that write files.
        strict: raise TrackerError when a tracker fails, rather than warn and go on without it.
        delivery: sizes of queues and time limits; ``strict`` is added to it.

    Attributes:
        log_with: the classes and objects that were asked for.

    Raises:
        ConfigurationError: a name that is not known, an object that is no tracker, or a missing folder for logs.
        MissingDependencyError: the library of a tracker is not installed.
    """

    def __init__(
        self,
        log_with: Any = None,
        logging_dir: str | os.PathLike[str] | None = None,
        *,
        strict: bool = False,
        delivery: Delivery | None = None,
    ) -> None:
        self.logging_dir = logging_dir
        self.log_with = filter_trackers(log_with, logging_dir)
        self._delivery = delivery or Delivery()
        if strict:
            self._delivery = Delivery(**{**asdict(self._delivery), "strict": True})
        self._channels: list[Channel] = []
        self._unstarted: set[str] = set()
        self._to_resume: dict[str, dict[str, Any]] = {}
        self._resumed: dict[str, dict[str, Any]] = {}
        self._config: dict[str, Any] | None = None
        self._last_step: int | None = None
        self._pid = os.getpid()
        self._said: set[str] = set()

    # -- the run -----------------------------------------------------------------------------------------------------

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Settings = None) -> None:
        """Start a run in every tracker, and end the one that was in progress, if any.

        Args:
            project_name: name of the project or experiment.
            config: hyperparameters to keep with the run: a dictionary, a namespace of argparse, or a data class; values
                of any kind.
            init_kwargs: further arguments for a tracker's constructor, by the tracker's name.

        Raises:
            ConfigurationError: a config of another kind.
            TrackerError: in strict mode, a tracker failed to start.
        """
        self.finish()
        self._config = _dictionary(config)
        self._pid, self._last_step = os.getpid(), None
        self._unstarted.clear()
        # Once: a further run is a new one.
        self._resumed, self._to_resume = self._to_resume, {}
        main = is_main_process()
        for tracker in self.log_with:
            if main or not getattr(tracker, "main_process_only", True):
                self._open(tracker, project_name, dict((init_kwargs or {}).get(str(tracker.name), {})))
        self._wait_for_start()

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Settings = None) -> None:
        """Log values to every tracker, as they are now.

        Returns at once, unless the queue of a tracker is full: then when there is room, or the tracker has been set
        aside.

        Args:
            values: names to numbers, tensors (on any device), texts, or what else the trackers take.
            step: the step they belong to.
            log_kwargs: further arguments for a tracker's ``log``, by the tracker's name.

        Raises:
            ConfigurationError: ``values`` is no dictionary.
            TrackerError: in strict mode, a tracker failed since the last call.
        """
        channels = self._channels
        if not channels or os.getpid() != self._pid:
            self._explain_silence()
            return
        snapshot = self._snapshot(values)
        if snapshot is None:
            return
        if step is not None:
            step = int(step)
            if self._last_step is None or step > self._last_step:
                self._last_step = step
        for channel in channels:
            kwargs = log_kwargs.get(channel.name, {}) if log_kwargs else {}
            channel.submit("log", partial(_log, channel.tracker, snapshot, step, kwargs))

    def log_images(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Settings = None) -> None:
        """Log images to every tracker that keeps images.

        Args:
            values: names to images or lists of them: tensors (channels first), arrays (channels last), or images of
                PIL. Bytes, or numbers from 0 to 1.
            step: the step they belong to.
            log_kwargs: further arguments for a tracker's ``log_images``, by the tracker's name.
        """
        snapshot = self._snapshot(values) if self._channels else None
        if snapshot is not None:
            self._call("log_images", lambda method, kwargs: method(snapshot.values(), step=step, **kwargs), log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: Settings = None,
    ) -> None:
        """Log a table to every tracker that keeps tables.

        Args:
            table_name: its name.
            columns: names of the columns.
            data: rows.
            dataframe: a data frame of pandas, instead of ``columns`` and ``data``.
            step: the step it belongs to.
            log_kwargs: further arguments for a tracker's ``log_table``, by the tracker's name.
        """
        table = {"columns": columns, "data": data, "dataframe": dataframe}
        snapshot = self._snapshot(table) if self._channels else None
        if snapshot is not None:
            self._call(
                "log_table",
                lambda method, kwargs: method(table_name, **snapshot.values(), step=step, **kwargs),
                log_kwargs,
            )

    def log_artifact(
        self, local_path: str | os.PathLike[str], artifact_path: str | None = None, log_kwargs: Settings = None
    ) -> None:
        """Keep a file with the run, in every tracker that keeps files. Returns when they have it, so that it may be
        deleted.

        Args:
            local_path: the file.
            artifact_path: the folder of the run's files to put it into.
            log_kwargs: further arguments for a tracker's ``log_artifact``, by the tracker's name.

        Raises:
            ConfigurationError: there is no such file.
        """
        if not self._channels:
            return
        if not Path(local_path).is_file():
            raise ConfigurationError(
                f"there is no file {str(local_path)!r} to log. Write it before, on the main process."
            )
        path = str(local_path)
        self._call(
            "log_artifact", lambda method, kwargs: method(path, artifact_path=artifact_path, **kwargs), log_kwargs
        )
        self.flush()

    def flush(self) -> None:
        """Wait until every tracker has been given what was logged; one that makes no progress is set aside.

        Raises:
            TrackerError: in strict mode, a tracker failed.
        """
        if os.getpid() == self._pid:
            for channel in self._channels:
                channel.wait()

    def finish(self, failed: bool = False) -> None:
        """Empty the queues and end the run in every tracker. Waits as long as there is progress; says what is lost, if
        anything.

        Args:
            failed: mark the run as failed, in trackers that have a mark for it.

        Raises:
            TrackerError: in strict mode, a tracker failed.
        """
        channels, self._channels = self._channels, []
        atexit.forget(self)
        if os.getpid() != self._pid:
            return
        for channel in channels:
            channel.close(partial(_finish, channel.tracker, failed))
        errors = [error for channel in channels if (error := _join(channel)) is not None]
        if errors:
            raise errors[0]

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(failed=kind is not None)

    # -- the trackers ------------------------------------------------------------------------------------------------

    @property
    def trackers(self) -> list[Any]:
        """The trackers that run here, when they have been given everything that was logged."""
        self.flush()
        return [channel.tracker for channel in self._channels if channel.error is None]

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name, when it has been given everything that was logged.

        Args:
            name: the tracker's name.
            unwrap: return the object of the tracker's own library.

        Returns:
            The tracker; where it does not run (on ranks that do not log, and after it was set aside) an object whose
            methods do nothing.

        Raises:
            ConfigurationError: no tracker of that name was started.
        """
        for channel in self._channels:
            if channel.name == str(name):
                if os.getpid() != self._pid:
                    return Silence(channel.name)
                channel.wait()
                tracker: Any = Silence(channel.name) if channel.error else channel.tracker
                return tracker.tracker if unwrap else tracker
        if name in self._unstarted or (
            any(tracker.name == name for tracker in self.log_with) and not is_main_process()
        ):
            return Silence(str(name))
        started = ", ".join(channel.name for channel in self._channels) or "none"
        raise ConfigurationError(
            f"no tracker {str(name)!r} was started; started: {started}. Name it in log_with and call init_trackers "
            "first."
        )

    # -- going on with a run -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a later job needs to continue the runs: plain data, to be saved with a checkpoint."""
        runs = {**self._resumed, **self._to_resume}
        for channel in self._channels:
            run_id = getattr(channel.tracker, "run_id", None)
            if run_id is not None:
                step = self._last_step if self._last_step is not None else runs.get(channel.name, {}).get("step")
                runs[channel.name] = {"run_id": str(run_id), "step": step}
        return {"trackers": runs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the runs of a :meth:`state_dict`.

        Before :meth:`init_trackers`, that starts them where they stopped. After it, the runs that it began are ended
        (and deleted, where the back end can, if nothing was logged to them), and the earlier ones are continued
        instead.

        Args:
            state: of :meth:`state_dict`.

        Raises:
            TrackerError: in strict mode, a tracker failed.
        """
        runs = {str(name): dict(run) for name, run in state["trackers"].items()}
        if not self._channels:
            self._to_resume = runs
            return
        self._resumed = runs
        nothing_logged = self._last_step is None
        for channel in self._channels:
            run = self._resumed.get(channel.name)
            if run is not None:
                channel.submit("resume", partial(_switch, channel.tracker, run, nothing_logged, self._config))
        self._wait_for_start()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _open(self, tracker: Any, project_name: str, arguments: dict[str, Any]) -> None:
        try:
            made = tracker
            if isinstance(tracker, type):
                if tracker.requires_logging_directory:  # type: ignore[attr-defined]
                    arguments.setdefault("logging_dir", self.logging_dir)
                made = tracker(project_name, **arguments)
            run = self._resumed.get(str(made.name))
            if run is not None and hasattr(made, "resume"):
                made.resume(run["run_id"], run.get("step"))
            channel = Channel(made, self._delivery)
        except Exception as error:
            if self._delivery.strict:
                raise TrackerError(f"The tracker {str(tracker.name)!r} could not be made: {error}") from error
            self._unstarted.add(str(tracker.name))
            logger.warning(
                "The tracker %r could not be made and is set aside: %s: %s. The run goes on.",
                tracker.name,
                type(error).__name__,
                error,
            )
            return
        self._channels.append(channel)
        atexit.remember(self)
        channel.submit("start", getattr(made, "start", _nothing))
        if self._config is not None:
            channel.submit("store_init_configuration", partial(made.store_init_configuration, dict(self._config)))

    def _wait_for_start(self) -> None:
        left = self._delivery.start_timeout
        for channel in self._channels:
            started = channel.wait(max(left, 0.001), set_aside=self._delivery.strict)
            left -= channel.waited
            if not started:
                logger.warning(
                    "The tracker %r has not started after %g s. The run goes on; what is logged waits for it (up to "
                    "%d calls).",
                    channel.name,
                    self._delivery.start_timeout,
                    self._delivery.queue_size,
                )

    def _call(self, method: str, call: Callable[[Any, Mapping[str, Any]], Any], log_kwargs: Settings) -> None:
        """Have a method called in every tracker that has it."""
        if os.getpid() != self._pid:
            self._explain_silence()
            return
        for channel in self._channels:
            function = getattr(channel.tracker, method, None)
            if function is None:
                self._warn_once(
                    f"The tracker {channel.name!r} has no {method}(), so it is not given what {method}() logs."
                )
            else:
                channel.submit(method, partial(call, function, (log_kwargs or {}).get(channel.name, {})))

    def _snapshot(self, values: Mapping[str, Any]) -> Snapshot | None:
        if not isinstance(values, Mapping):
            raise ConfigurationError(
                f"log() got {values!r}, a {type(values).__name__}. Give a dictionary of names to values."
            )
        try:
            return Snapshot(values)
        except Exception as error:
            if self._delivery.strict:
                raise TrackerError(
                    f"The values of {', '.join(map(str, values))} could not be taken: {error}"
                ) from error
            self._warn_once(f"What log() was given is left out: {type(error).__name__}: {error}")
            return None

    def _explain_silence(self) -> None:
        """Say why nothing is logged, unless that is as it should be."""
        if os.getpid() != self._pid:
            self._warn_once(
                "log() was called in a process forked from the one that tracks the run, and has no effect there.",
                os.getpid(),
            )
        elif self.log_with and not self._unstarted and is_main_process():
            self._warn_once("log() was called before init_trackers() or after the end of the run, and has no effect.")

    def _warn_once(self, message: str, key: Any = None) -> None:
        if f"{key}{message}" not in self._said:
            self._said.add(f"{key}{message}")
            logger.warning(message)


def _dictionary(config: Any) -> dict[str, Any] | None:
    if config is None:
        return None
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, (argparse.Namespace, types.SimpleNamespace)) or (
        is_dataclass(config) and not isinstance(config, type)
    ):
        return dict(vars(config))
    raise ConfigurationError(
        f"config={config!r} is a {type(config).__name__}. Give a dictionary, a namespace or a data class."
    )


def _nothing() -> None:
    """What a tracker without ``start`` or ``finish`` does there."""


def _log(tracker: Any, snapshot: Snapshot, step: int | None, kwargs: Mapping[str, Any]) -> None:
    tracker.log(snapshot.values(), step=step, **kwargs)


def _finish(tracker: Any, failed: bool) -> None:
    if isinstance(tracker, GeneralTracker):
        tracker.failed = failed
    getattr(tracker, "finish", _nothing)()


def _join(channel: Channel) -> TrackerError | None:
    try:
        channel.join()
    except TrackerError as error:
        return error
    return None


def _switch(tracker: Any, run: Mapping[str, Any], nothing_logged: bool, config: dict[str, Any] | None) -> None:
    """End the run that a tracker is in, and continue another one."""
    if tracker.run_id == run["run_id"]:
        return
    tracker.discard() if nothing_logged else tracker.finish()
    tracker.resume(run["run_id"], run.get("step"))
    tracker.start()
    if config is not None:
        tracker.store_init_configuration(dict(config))
