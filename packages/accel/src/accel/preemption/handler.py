"""Saving the training when a signal asks the process to end, at a step that all ranks agree on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NoReturn, cast

import torch

from accel_data import PreparedLoader, loop_hooks
from accel_state.env import parse_flag_from_env
from accel_state.errors import ConfigurationError
from accel_state.paths import as_location
from accel_state.preemption import PREEMPTED_EXIT_CODE, Note, launcher_directory, remove_note, write_note
from accel_state.storage.url import Location

from ..core.project import ProjectConfiguration
from .eval_rollback import LoopEnd
from .stop_consensus import stop_agreement

DEFAULT_SIGNALS = ("SIGTERM", "SIGUSR1")
DEFAULT_FOLDER = "preempted"

SignalName = str | int | signal.Signals


@dataclass(frozen=True)
class SaveOnSignal:
    """How an Accelerator saves when a signal arrives: ``Accelerator(save_on_signal=SaveOnSignal(...))``.

    Attributes:
        signals: names or numbers. Schedulers send SIGTERM before they kill a job; SLURM sends another signal earlier
            with ``--signal``.
        output_dir: the directory to save in. By default a numbered one with automatic naming, else
            ``<project_dir>/preempted``, where ``load_state("latest")`` finds it.
        exit_code: exit code of the process after it has saved, 1 to 125. 75 (EX_TEMPFAIL) tells ``accel launch`` that
            running the same command again continues the training.
        grace_seconds: seconds that ``accel launch`` waits for this process to end after the signal.
        meeting_seconds: seconds that a rank that stopped waits for the other ranks to stop; after that it exits without
            saving.

    Raises:
        ConfigurationError: a value that is not allowed.
    """

    signals: Iterable[SignalName] = DEFAULT_SIGNALS
    output_dir: str | os.PathLike[str] | None = None
    exit_code: int = PREEMPTED_EXIT_CODE
    grace_seconds: float = 300.0
    meeting_seconds: float = 60.0

    def __post_init__(self) -> None:
        names = (self.signals,) if isinstance(self.signals, str | int) else tuple(self.signals)
        object.__setattr__(self, "signals", tuple(_signal(name) for name in names))
        if not names:
            raise ConfigurationError("save_on_signal has no signals. Name at least one, or leave save_on_signal out.")
        if not 1 <= self.exit_code <= 125:
            raise ConfigurationError(
                f"SaveOnSignal(exit_code={self.exit_code}) must be 1 to 125: other codes mean success, or a signal."
            )
        for name in ("grace_seconds", "meeting_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"SaveOnSignal({name}={getattr(self, name)}) must be above 0.")

    @property
    def numbers(self) -> tuple[signal.Signals, ...]:
        """The signals as numbers."""
        return cast("tuple[signal.Signals, ...]", self.signals)


def _signal(name: SignalName) -> signal.Signals:
    try:
        if isinstance(name, int) and not isinstance(name, bool):
            number = signal.Signals(name)
        else:
            text = str(name).upper()
            number = signal.Signals[text if text.startswith("SIG") else f"SIG{text}"]
    except (ValueError, KeyError):
        allowed = ", ".join(sorted(known.name for known in signal.Signals if known not in _UNCATCHABLE))
        raise ConfigurationError(
            f"save_on_signal={name!r} is not a signal of this system. Allowed: {allowed}."
        ) from None
    if number in _UNCATCHABLE:
        raise ConfigurationError(
            f"save_on_signal={number.name} cannot be used: no process can handle it. Use SIGTERM or SIGUSR1."
        )
    return number


_UNCATCHABLE = {getattr(signal, name) for name in ("SIGKILL", "SIGSTOP") if hasattr(signal, name)}


def resolve(value: Any) -> SaveOnSignal:
    """Return the settings for the argument ``save_on_signal`` of the Accelerator, which is not off."""
    if value is True:
        return SaveOnSignal()
    if isinstance(value, SaveOnSignal):
        return replace(value)
    if isinstance(value, str | int) or (isinstance(value, Iterable) and not isinstance(value, bytes)):
        return SaveOnSignal(signals=value if not isinstance(value, str | int) else (value,))
    raise ConfigurationError(
        f"save_on_signal={value!r} is not allowed. Pass True (for SIGTERM and SIGUSR1), the name of a signal, several "
        "names, or SaveOnSignal."
    )


class Preempted(SystemExit):
    """The training was saved because of a signal, and the process exits.

    It is raised where the loop asks for its next batch.

    Attributes:
        code: the exit code.
        checkpoint: the state that was saved.
    """

    def __init__(self, code: int, checkpoint: Location) -> None:
        super().__init__(code)
        self.checkpoint = checkpoint


class PreemptionHandler:
    """Handles signals, and ends the run between two steps; a new handler replaces the process's previous one.

    Args:
        settings: what ends the run, and where it is saved.
        run: the Accelerator.
    """

    def __init__(self, settings: SaveOnSignal, run: Any) -> None:
        self.settings = settings
        self.signals: tuple[int, ...] = tuple(int(number) for number in settings.numbers)
        self.received: signal.Signals | None = None
        self._run = weakref.ref(run, self._dropped)
        self._former: dict[int, Any] = {}
        self._pid = os.getpid()
        self._is_leaving = False
        # The loader that a loop last asked for a batch, and the number of its loop.
        self._latest: tuple[weakref.ref[PreparedLoader], int] | None = None
        self._loops_begun = 0
        self._loop_numbers: weakref.WeakKeyDictionary[PreparedLoader, int] = weakref.WeakKeyDictionary()
        self._loop_end: LoopEnd | None = None
        check_directory(settings, run.project_configuration)
        self._agreement = stop_agreement(run.process_state.process_index, run.process_state.num_processes)
        self._install()

    # -- signals -----------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "save_on_signal works in the main thread only, where Python handles signals. Make the Accelerator "
                "there."
            )
        previous = loop_hooks.current()
        if isinstance(previous, PreemptionHandler):
            previous.remove()
        for number in self.signals:
            self._former[number] = signal.signal(number, self._handle)
        loop_hooks.set_current(self)
        self._leave_note(saved=None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        former = self._former.get(number)
        if self._run() is None:
            # The Accelerator was collected in a thread, which could not remove the handlers: do what was done before.
            is_installed = signal.getsignal(number) == self._handle
            self.remove()
            if is_installed:
                signal.raise_signal(number)
            elif callable(former):
                former(number, frame)
            return
        # Only noted here: a signal arrives at any moment, also in the middle of an optimizer step.
        self.received = signal.Signals(number)
        if callable(former) and former is not signal.default_int_handler:
            former(number, frame)
        if self._agreement is None or self._is_leaving or self._pid != os.getpid():
            return
        if not self._agreement.answers():
            # The kernel may send the signal once more, for each thread of a launcher that was killed.
            self._is_leaving = True
            self._exit_without_store()

    def _exit_without_store(self) -> None:
        """Exit at once: without the store, ranks cannot agree on a step to save at."""
        run, name = self._run(), signal.Signals(self.received or signal.SIGTERM)
        if run is not None and run.process_state.is_local_main_process:
            holder = "the launcher" if parse_flag_from_env("TORCHELASTIC_USE_AGENT_STORE") else "rank 0"
            print(
                f"accel: {name.name}: {holder} is gone, and with it the store through which ranks agree on a step to "
                "save at. The ranks exit without saving.",
                file=sys.stderr,
                flush=True,
            )
        exit_from_signal(128 + name)

    def remove(self) -> None:
        """Restore the previous signal handlers, unless others have been installed since."""
        for number, former in self._former.items():
            # A bound method is a new object at every access; comparing by equality is intended.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if former is None else former)
        self._former = {}
        if loop_hooks.current() is self:
            loop_hooks.set_current(None)
        directory = launcher_directory()
        # A forked worker must not remove the note of its parent.
        if directory is not None and directory.is_dir() and self._pid == os.getpid():
            remove_note(directory)

    def _dropped(self, _: Any) -> None:
        # Garbage is collected in any thread, and only the main one may change handlers.
        if self._former and threading.current_thread() is threading.main_thread():
            self.remove()

    def _leave_note(self, saved: str | None) -> None:
        """Tell the launcher how long to wait after a signal, and which state was saved."""
        directory = launcher_directory()
        if directory is not None and directory.is_dir():
            note = Note(os.getpid(), self.signals, self.settings.grace_seconds, self.settings.exit_code, saved)
            write_note(directory, note)

    # -- points where the run may end --------------------------------------------------------------------------------

    def begin(self, loader: PreparedLoader) -> None:
        self._loops_begun += 1
        run = self._run()
        if self._loop_end is not None and (run is None or _is_training(run)):
            self._loop_end = None
        self._loop_numbers[loader] = self._loops_begun
        self._latest = weakref.ref(loader), self._loops_begun
        self._stop_if_agreed(loader, begins=True)

    def step(self, loader: PreparedLoader) -> None:
        """Begin a step: a loop asks the loader for its next batch."""
        run = self._run()
        if loader.end_of_dataloader and run is not None and _is_training(run):
            self._loop_end = LoopEnd(run.prepared, run._custom_objects, run.process_state.device_backend)
        latest = self._latest
        if latest is None or latest[0]() is not loader:
            number = self._loop_numbers[loader]
            self._latest = weakref.ref(loader), number
            if latest is not None and number > latest[1]:
                previous = latest[0]()
                if previous is not None and previous.is_iterating:
                    # The loop draws from several loaders, and has not used the batch of the previous one yet.
                    return
        self._stop_if_agreed(loader, begins=False)

    def _stop_if_agreed(self, loader: PreparedLoader, *, begins: bool) -> None:
        stops = self.received is not None
        if self._agreement is not None:
            stops = self._agreement.passes(id(loader), begins=begins, wants_to_stop=stops)
        if stops:
            self._stop(loader, begins)

    def _stop(self, loader: PreparedLoader, begins: bool) -> None:
        run = self._run()
        if run is None:
            return
        name = "a signal to another rank" if self.received is None else self.received.name
        seconds = self.settings.meeting_seconds
        missing = [] if self._agreement is None else self._agreement.meet(seconds)
        if missing and self._agreement is not None and self._agreement.lost:
            self._exit_without_store()
        if missing:
            print(
                f"accel: {name}: rank {run.process_state.process_index} timed out after {seconds:g} s waiting for rank "
                f"{', '.join(map(str, missing))} to reach the same step. It exits without saving. Ranks must run the "
                "same loops over prepared loaders.",
                file=sys.stderr,
                flush=True,
            )
            raise SystemExit(128 + int(self.received or signal.SIGTERM))
        if not _is_training(run):
            # What an evaluation has computed so far is in the script's variables, and lost.
            if self._loop_end is not None and self._loop_end.is_current(run.prepared):
                self._loop_end.restore(run.prepared)
            elif not begins:
                # Within a training loop, or after one that was left early: the next evaluation sees all of its data.
                loader.abandon()
        project, target = run.project_configuration, None  # a numbered directory
        if not project.automatic_checkpoint_naming and self.settings.output_dir is not None:
            target = as_location("output_dir", self.settings.output_dir)
        elif not project.automatic_checkpoint_naming:
            target = as_location("project_dir", project.project_dir) / DEFAULT_FOLDER
        checkpoint = run.save_state(target)
        self._leave_note(saved=str(checkpoint))
        if run.process_state.is_main_process:
            print(
                f"accel: {name}: the training was saved to {checkpoint}, and ends with exit code "
                f"{self.settings.exit_code}. resume() continues from there.",
                file=sys.stderr,
                flush=True,
            )
        raise Preempted(self.settings.exit_code, checkpoint)


def _is_training(run: Any) -> bool:
    """Return True if the current loop trains: it computes gradients, and some model is in training mode."""
    models = run.prepared.models
    return torch.is_grad_enabled() and (not models or any(model.training for model in models))


def check_directory(settings: SaveOnSignal, project: ProjectConfiguration) -> None:
    """Raise ConfigurationError if it is not clear where to save."""
    if project.automatic_checkpoint_naming and settings.output_dir is not None:
        raise ConfigurationError(
            f"SaveOnSignal(output_dir={str(settings.output_dir)!r}) contradicts automatic_checkpoint_naming, which "
            "chooses the path. Leave one of them out."
        )
    if settings.output_dir is None and project.project_dir is None:
        raise ConfigurationError(
            "save_on_signal needs a directory. Give the Accelerator project_dir=..., or SaveOnSignal(output_dir=...)."
        )


def exit_from_signal(code: int) -> NoReturn:
    """Raise SystemExit from a signal handler, and exit at once where Python would drop it.

    A signal can arrive inside a finalizer, for example of a generator: Python ignores what is raised there, and the
    rank would go on to fail in its next collective.
    """
    leaving, former = SystemExit(code), sys.unraisablehook

    def exit_from_finalizer(ignored: sys.UnraisableHookArgs) -> None:
        if ignored.exc_value is not leaving:
            former(ignored)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    sys.unraisablehook = exit_from_finalizer
    raise leaving
