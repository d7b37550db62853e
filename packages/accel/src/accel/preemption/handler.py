"""Saving the training when the process is told to end, at a step that all ranks agree on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch

from accel_data import PreparedLoader, loop_hooks
from accel_state.errors import ConfigurationError
from accel_state.preemption import PREEMPTED_EXIT_CODE, Note, launcher_directory, write_note, remove_note

from ..checkpoint.atomic_dir import CheckpointFolder, recover_all
from ..checkpoint.catalog import list_checkpoints, newest_complete, newest_saved
from .eval_rollback import LoopEnd
from .stop_consensus import agreement_of_world

if TYPE_CHECKING:
    from ..accelerator import Accelerator

DEFAULT_SIGNALS = ("SIGTERM", "SIGUSR1")
DEFAULT_FOLDER = "preempted"

SignalName = str | int | signal.Signals


@dataclass(frozen=True)
class SaveOnSignal:
    """How an Accelerator saves when the process is told to end: ``Accelerator(save_on_signal=SaveOnSignal(...))``.

    Attributes:
        signals: names or numbers. Schedulers send SIGTERM before they kill, and SLURM with ``--signal`` one of your
            choice earlier.
        output_dir: the folder of that state. None is a numbered one with automatic naming, and else
            ``<project_dir>/preempted``, where ``load_state("latest")`` finds it.
        exit_code: what the process ends with once it has saved; 1 to 125. 75 means to ``accel launch``, and by an old
            convention (EX_TEMPFAIL) to others, that the same command goes on from there.
        grace_seconds: how long ``accel launch`` lets this process live after the signal.
        meeting_seconds: how long a rank that stopped waits for the others to stop too, before it gives up and ends
            without saving.

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
            raise ConfigurationError("save_on_signal has no signals. Name one, or leave save_on_signal out.")
        if not 1 <= self.exit_code <= 125:
            raise ConfigurationError(
                f"SaveOnSignal(exit_code={self.exit_code}) must be from 1 to 125: others mean success, or a signal."
            )
        for name in ("grace_seconds", "meeting_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"SaveOnSignal({name}={getattr(self, name)}) must be above 0.")

    @property
    def numbers(self) -> tuple[signal.Signals, ...]:
        """The signals."""
        return cast("tuple[signal.Signals, ...]", self.signals)


def _signal(name: SignalName) -> signal.Signals:
    try:
        if isinstance(name, int) and not isinstance(name, bool):
            number = signal.Signals(name)
        else:
            text = str(name).upper()
            number = signal.Signals[text if text.startswith("SIG") else f"SIG{text}"]
    except (ValueError, KeyError):
        allowed = ", ".join(sorted(one.name for one in signal.Signals if one not in _UNCATCHABLE))
        raise ConfigurationError(f"save_on_signal={name!r} is no signal of this system. Allowed: {allowed}.") from None
    if number in _UNCATCHABLE:
        raise ConfigurationError(
            f"save_on_signal={number.name} cannot be used: no process can handle it. Use SIGTERM or SIGUSR1."
        )
    return number


_UNCATCHABLE = {getattr(signal, name) for name in ("SIGKILL", "SIGSTOP") if hasattr(signal, name)}


def resolve(value: Any) -> SaveOnSignal | None:
    """What ``Accelerator(save_on_signal=...)`` means.

    Raises:
        ConfigurationError: it means nothing.
    """
    if value is None or value is False:
        return None
    if value is True:
        return SaveOnSignal()
    if isinstance(value, SaveOnSignal):
        return replace(value)
    if isinstance(value, str | int) or (isinstance(value, Iterable) and not isinstance(value, bytes)):
        return SaveOnSignal(signals=value if not isinstance(value, str | int) else (value,))
    raise ConfigurationError(
        f"save_on_signal={value!r} is not understood. Give True (SIGTERM and SIGUSR1), a signal's name, several of "
        "them, or SaveOnSignal."
    )


class Preempted(SystemExit):
    """The training was saved on a signal, and the process ends. It is raised where the loop asks for its next batch.

    Attributes:
        code: the exit code.
        checkpoint: the state that was saved.
    """

    def __init__(self, code: int, checkpoint: Path) -> None:
        super().__init__(code)
        self.checkpoint = checkpoint


class Preemption:
    """Watches for signals, and ends the run between two steps. It acts on the process, so the newest one takes the
    place of another.

    Args:
        settings: what to do when.
        accelerator: what saves.

    Raises:
        ConfigurationError: there is no folder to save in, or this is not the main thread, where alone Python handles
            signals.
    """

    def __init__(self, settings: SaveOnSignal, accelerator: Accelerator) -> None:
        self.settings = settings
        self.signals = tuple(int(number) for number in settings.numbers)
        self.received: signal.Signals | None = None
        self._accelerator = weakref.ref(accelerator, self._dropped)
        self._former: dict[int, Any] = {}
        self._process = os.getpid()
        self._latest: tuple[weakref.ref[PreparedLoader], int] | None = None
        self._begun = 0
        self._loop_end: LoopEnd | None = None
        self._order: weakref.WeakKeyDictionary[PreparedLoader, int] = weakref.WeakKeyDictionary()
        check_folder(settings, accelerator)
        state = accelerator.process_state
        self._agreement = agreement_of_world(state.process_index, state.num_processes)
        self._install()

    # Handlers

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "save_on_signal works in the main thread only, where Python handles signals; make the Accelerator "
                "there."
            )
        other = loop_hooks.current()
        if isinstance(other, Preemption):
            other.remove()
        for number in self.signals:
            self._former[number] = signal.signal(number, self._handle)
        loop_hooks.set_current(self)
        self._note(saved=None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        former = self._former.get(number)
        if self._accelerator() is None:
            self._hand_over(number, frame, former)
            return
        # Only noted here: a signal comes at any moment, also in the middle of an optimizer step.
        self.received = signal.Signals(number)
        if callable(former) and former is not signal.default_int_handler:
            former(number, frame)

    def _hand_over(self, number: int, frame: FrameType | None, former: Any) -> None:
        """Let a signal do what it did before: the Accelerator was collected in a thread, where the handlers had to
        stay.
        """
        is_ours = signal.getsignal(number) == self._handle
        self.remove()
        if is_ours:
            signal.raise_signal(number)
        elif callable(former):
            former(number, frame)

    def remove(self) -> None:
        """Give the signals back to who handled them before, unless somebody else has taken them since."""
        for number, former in self._former.items():
            # The identity of a bound method changes with every access, its equality does not.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if former is None else former)
        self._former = {}
        if loop_hooks.current() is self:
            loop_hooks.set_current(None)
        folder = launcher_directory()
        # The note of a process is not for a worker that it forked to take back.
        if folder is not None and folder.is_dir() and self._process == os.getpid():
            remove_note(folder)

    def _dropped(self, _: Any) -> None:
        # Nobody is left to save; garbage may be collected in any thread, and only the main one may touch handlers.
        if self._former and threading.current_thread() is threading.main_thread():
            self.remove()

    def _note(self, saved: str | None) -> None:
        folder = launcher_directory()
        if folder is not None and folder.is_dir():
            write_note(
                folder, Note(os.getpid(), self.signals, self.settings.grace_seconds, self.settings.exit_code, saved)
            )

    # Points where the run may end

    def begin(self, loader: PreparedLoader) -> None:
        """A loop begins."""
        self._begun += 1
        accelerator = self._accelerator()
        if self._loop_end is not None and (accelerator is None or _is_training(accelerator)):
            self._loop_end = None
        self._order[loader] = self._begun
        self._latest = weakref.ref(loader), self._begun
        self._pass(loader, begins=True)

    def step(self, loader: PreparedLoader) -> None:
        """A loop asks for its next batch."""
        if loader.end_of_dataloader:
            self._remember_end()
        latest = self._latest
        if latest is None or latest[0]() is not loader:
            order = self._order[loader]
            between = latest is not None and order > latest[1] and self._is_iterating(latest[0]())
            self._latest = weakref.ref(loader), order
            if between:
                # The loop draws from several loaders, and the one before this has handed out what the step is yet to
                # work on.
                return
        self._pass(loader, begins=False)

    def _remember_end(self) -> None:
        accelerator = self._accelerator()
        if accelerator is not None and _is_training(accelerator):
            self._loop_end = LoopEnd(accelerator)

    @staticmethod
    def _is_iterating(loader: PreparedLoader | None) -> bool:
        return loader is not None and loader.is_iterating

    def _pass(self, loader: PreparedLoader, *, begins: bool) -> None:
        if self._agreement is None:
            if self.received is not None:
                self._end(loader, begins)
        elif self._agreement.passes(id(loader), begins=begins, wants_to_stop=self.received is not None):
            self._end(loader, begins)

    def _end(self, loader: PreparedLoader, begins: bool) -> None:
        accelerator = self._accelerator()
        if accelerator is None:
            return
        name = "a signal to another rank" if self.received is None else self.received.name
        missing = [] if self._agreement is None else self._agreement.meet(self.settings.meeting_seconds)
        if missing:
            self._give_up(accelerator, name, missing)
        if not _is_training(accelerator):
            self._leave_evaluation(accelerator, loader, begins)
        target = target_folder(self.settings, accelerator)
        checkpoint = accelerator.save_state(target)
        self._note(saved=str(checkpoint))
        if accelerator.is_main_process:
            print(
                f"accel: {name}: the training was saved to {checkpoint}, and ends with exit code "
                f"{self.settings.exit_code}. "
                "load_state('latest') or resume() goes on from there.",
                file=sys.stderr,
                flush=True,
            )
        raise Preempted(self.settings.exit_code, checkpoint)

    def _leave_evaluation(self, accelerator: Accelerator, loader: PreparedLoader, begins: bool) -> None:
        """Bring the training to where a script can enter it: what an evaluation has seen so far is in the script's
        hands, and lost.
        """
        end = self._loop_end
        if end is not None and end.holds(accelerator):
            end.put_back(accelerator)
        elif not begins:
            # In the middle of a training loop, or after one that was left early: the next evaluation is to see all of
            # its data.
            loader.abandon()

    def _give_up(self, accelerator: Accelerator, name: str, missing: list[int]) -> None:
        print(
            f"accel: {name}: rank {accelerator.process_index} waited {self.settings.meeting_seconds:g} s for rank "
            f"{', '.join(map(str, missing))} to reach the same step, in vain. It ends without saving. Ranks must run "
            "the same loops over "
            "prepared loaders.",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(128 + int(self.received or signal.SIGTERM))


def _is_training(accelerator: Accelerator) -> bool:
    """Whether the loop that runs now trains: it computes gradients, and some model is in training mode."""
    models = accelerator.prepared.models
    return torch.is_grad_enabled() and (not models or any(model.training for model in models))


def check_folder(settings: SaveOnSignal, accelerator: Accelerator) -> None:
    """Raise ConfigurationError if it is not clear where to save."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming and settings.output_dir is not None:
        raise ConfigurationError(
            f"SaveOnSignal(output_dir={str(settings.output_dir)!r}) contradicts automatic_checkpoint_naming, which "
            "chooses the folder. "
            "Leave one of them out."
        )
    if settings.output_dir is None and project.project_dir is None:
        raise ConfigurationError(
            "save_on_signal needs a folder. Give the Accelerator project_dir=..., or SaveOnSignal(output_dir=...)."
        )


def target_folder(settings: SaveOnSignal, accelerator: Accelerator) -> Path | None:
    """Where the state is saved; None for a numbered folder."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        return None
    if settings.output_dir is not None:
        return Path(settings.output_dir)
    assert project.project_dir is not None
    return Path(project.project_dir) / DEFAULT_FOLDER


class Resuming:
    """Saving on signals and going on afterwards, for an Accelerator to inherit."""

    preemption: Preemption | None = None

    def _init_resuming(self, save_on_signal: Any) -> None:
        settings = resolve(save_on_signal)
        self.preemption = None if settings is None else Preemption(settings, cast("Accelerator", self))

    def _stop_watching_signals(self) -> None:
        if self.preemption is not None:
            self.preemption.remove()
            self.preemption = None

    def resume(self) -> bool:
        """Load the newest complete state, if there is one. Call it on every rank, when everything has been prepared and
        registered.

        States are looked for where :meth:`save_state` puts them with automatic naming, else in the project's folder, or
        in that of :class:`SaveOnSignal`. Afterwards a loader's ``iteration`` is the epoch to go on with.

        Returns:
            Whether there was one.

        Raises:
            CheckpointError: it is damaged, or does not fit what was prepared.
            ConfigurationError: there is no folder to look in.
        """
        accelerator = cast("Accelerator", self)
        found: list[str | None] = []
        accelerator._on_all_ranks("looking for a state to resume from", lambda: found.append(_newest(accelerator)))
        newest = accelerator.process_state.collectives.broadcast_object(found[0])
        if newest is None:
            return False
        accelerator.load_state(newest)
        return True


def _newest(accelerator: Accelerator) -> str | None:
    """The newest complete state, as the main process sees it."""
    if not accelerator.process_state.is_main_process:
        return None
    project, preemption = accelerator.project_configuration, accelerator.preemption
    own = None if preemption is None else preemption.settings.output_dir
    if own is not None:
        CheckpointFolder(own).recover()
        return str(own) if Path(own).is_dir() else None
    if project.project_dir is None:
        raise ConfigurationError(
            "resume needs a folder to look in. Give the Accelerator project_dir=..., or SaveOnSignal(output_dir=...)."
        )
    folder = Path(project.project_dir)
    automatic = project.automatic_checkpoint_naming
    if automatic:
        folder = folder / "checkpoints"
    if not folder.is_dir():
        return None
    recover_all(folder)
    # What a killed process left unfinished under a temporary name was never a checkpoint; one that is damaged is worth
    # an error.
    if not any(not info.path.name.startswith(".") for info in list_checkpoints(folder)):
        return None
    return str((newest_complete if automatic else newest_saved)(folder))
