"""The Accelerator's ``save_state`` and ``load_state``."""

from __future__ import annotations

import os
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from accel_state import GradientState, PartialState, get_logger
from accel_state.errors import ConfigurationError

from ..core.prepare import Preparation
from ..core.types import Part
from ..strategies.base import Strategy
from ..training.experiment_tracking import Tracking
from ..training.gradient_accumulation import Accumulation
from . import accumulation_state, weights_io
from .atomic_dir import CheckpointFolder
from .catalog import checkpoint_number, newest_complete, newest_saved
from .contents import collect, copied, custom_part, of_this_rank
from .digests import Workers
from .loader import StateReader
from .names import MANIFEST_NAME, CheckpointError
from .project import ProjectConfiguration
from .rank_consensus import Alone, CollectiveAgreement, StoreAgreement, background_agreement, on_all_ranks
from .staging import HostCopies
from .writer import BackgroundSave, StateWriter

if TYPE_CHECKING:
    from ..core.types import Gathered, Layout

logger = get_logger(__name__)

LATEST = "latest"
"""What to give :meth:`StateSaving.load_state` for the newest complete checkpoint."""

SaveHook = Callable[[list[Any], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[Any], str], None]


class StateSaving(Tracking):
    """Whole states of training, for an Accelerator to inherit; its constructor calls :meth:`_init_state_saving`."""

    process_state: PartialState
    gradient_state: GradientState
    project_configuration: ProjectConfiguration
    prepared: Preparation
    strategy: Strategy
    scaler: torch.amp.GradScaler | None
    _custom_objects: list[Any]
    _accumulation: Accumulation

    def _init_state_saving(self) -> None:
        self._save_state_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_state_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._host_copies = HostCopies()
        self._background_save: BackgroundSave | None = None

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Have a function called by each :meth:`save_state`, before anything is written.

        Args:
            hook: called on every rank as ``hook(models, weights, output_dir)`` with the prepared models, their state
                dicts, and the folder that is being written, which gets its final name later. It may write files there,
                which become part of the checkpoint, and remove from ``weights`` what it has saved itself.

        Returns:
            A handle; its ``remove()`` takes the hook back.
        """
        handle = RemovableHandle(self._save_state_hooks)
        self._save_state_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Have a function called by each :meth:`load_state`, when the files have been verified and before anything is
        loaded.

        Args:
            hook: called on every rank as ``hook(models, input_dir)``. It may remove from ``models`` those that it has
                loaded itself.

        Returns:
            A handle; its ``remove()`` takes the hook back.
        """
        handle = RemovableHandle(self._load_state_hooks)
        self._load_state_hooks[handle.id] = hook
        return handle

    # -- saving ------------------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save everything that training needs to go on exactly as if it had never stopped. Every rank must call it.

        That is: models, optimizers, schedulers, positions of the loaders, the loss scale, the random number generators
        of every rank and the registered objects. The checkpoint appears under its name when it is whole and on the
        disk; if saving fails, one that was there before is still there. With automatic naming, old ones are deleted
        after that, down to ``total_limit``.

        Of accumulation windows that are open, the gradients accumulated so far are saved too.

        Args:
            output_dir: the folder of this checkpoint, which replaces an older one there; None with automatic naming.
            safe_serialization: weights in the safetensors format rather than torch's.
            blocking: return when the checkpoint is in its place. With False, return when the state has been copied into
                host memory (which is kept for the next time: one more copy of the state), and write it while training
                goes on. One save is under way at a time: the next one waits for it, as do :meth:`load_state`,
                :meth:`wait_for_save`, :meth:`end_training` and the end of the process. The first of these raises what
                went wrong.
            **save_model_func_kwargs: for strategies that save models in their own way.

        Returns:
            The checkpoint, or where it will be.

        Raises:
            CheckpointError: saving failed on some rank; or the last save without blocking did.
            ConfigurationError: no folder, or one that cannot be used; with automatic naming, a checkpoint of this
                number exists.
        """
        if save_model_func_kwargs:
            raise ConfigurationError(
                f"save_state got {', '.join(save_model_func_kwargs)}, which {type(self.strategy).__name__} has no use "
                "for. Leave it out."
            )
        if self.strategy.shards_parameters or self.strategy.uses_engine:
            weights_io.refuse_each_node(self.process_state, self.project_configuration.save_on_each_node)
        self.wait_for_save()
        # A path made of the time, say, may differ between ranks.
        chosen = str(self._save_target(output_dir)), f"{time.time_ns()}.{os.getpid()}"
        path, token = self.process_state.collectives.broadcast_object(chosen)
        agreement = None if blocking else background_agreement(self.process_state.collectives, token)
        writer = self._gather_state(Path(path), safe_serialization, copies=None if blocking else self._host_copies)
        if agreement is None:
            writer.finish(CollectiveAgreement(self.process_state.collectives))
            self.project_configuration.iteration += 1
        else:
            self._start_background_save(writer, agreement)
        return Path(path)

    def wait_for_save(self) -> None:
        """Return when the save that was started with ``blocking=False`` has ended; at once if there is none. Every rank
        must call it.

        Raises:
            CheckpointError: it failed on some rank.
        """
        save, self._background_save = self._background_save, None
        if save is None:
            return
        try:
            save.wait()
        except BaseException:
            if not save.writer.committed:
                # The number was not used.
                self.project_configuration.iteration = save.number
            raise

    @property
    def save_in_flight(self) -> bool:
        """Whether a save that was started with ``blocking=False`` is still being written on this rank."""
        return self._background_save is not None and self._background_save.running

    def _start_background_save(self, writer: StateWriter, agreement: StoreAgreement | Alone) -> None:
        # The loop has the processors; files are digested as they come.
        writer.workers = 1
        self._background_save = BackgroundSave(writer, agreement, self.project_configuration.iteration)
        self.project_configuration.iteration += 1

    def _gather_state(self, target: Path, safe_serialization: bool, copies: HostCopies | None) -> StateWriter:
        """Collect, on all ranks, what is to be saved, with a folder to write it to.

        Args:
            target: where the checkpoint will be.
            safe_serialization: see :meth:`save_state`.
            copies: what to copy the state with, if training is to change it before it is written.
        """
        settings, folder = self.project_configuration, CheckpointFolder(target)
        parts: list[Part] = []
        finalizers: list[Callable[[Path], None]] = []
        try:
            self._on_all_ranks(
                f"saving {target}", lambda: self._begin(folder, must_be_new=settings.automatic_checkpoint_naming)
            )
            weights = self._weights_to_save()
            self._on_all_ranks(f"saving {target}", lambda: self._run_save_hooks(folder, weights))
            gathered = self.strategy.gather_state(
                self.prepared.models, weights, [prepared.optimizer for prepared in self.prepared.optimizers]
            )
            # Ranks may talk for it too, so it is no part of what can fail on one of them.
            windows = accumulation_state.capture(self._accumulation, self.prepared.dataloaders, self.prepared.models)
            self._on_all_ranks(
                f"saving {target}",
                lambda: parts.extend(self._collect(weights, gathered, windows, safe_serialization, copies)),
            )
            finalizers.extend(gathered.finalizers if gathered is not None else ())
        except BaseException:
            if self._writes_state:
                folder.abandon()
            raise
        return StateWriter(
            folder=folder,
            is_writer=self._writes_state,
            parts=parts,
            world_size=self.process_state.num_processes,
            counters=self._counters(),
            total_limit=settings.total_limit if settings.automatic_checkpoint_naming else None,
            finalizers=finalizers,
        )

    def _counters(self) -> dict[str, int]:
        steps = self.prepared.optimizers[0].steps_taken if self.prepared.optimizers else 0
        return {
            "iteration": self.project_configuration.iteration + 1,
            "step": self._accumulation.position,
            "optimizer_steps": steps,
        }

    def _save_target(self, output_dir: str | os.PathLike[str] | None) -> Path:
        settings = self.project_configuration
        if not settings.automatic_checkpoint_naming:
            if output_dir is None:
                raise ConfigurationError(
                    "save_state needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)."
                )
            _check_path("output_dir", output_dir)
            return Path(output_dir)
        if output_dir is not None:
            raise ConfigurationError(
                f"output_dir={str(output_dir)!r} contradicts automatic_checkpoint_naming, which chooses the folder. "
                "Call save_state() "
                "without it, or turn automatic naming off in ProjectConfiguration."
            )
        return self._checkpoints() / f"checkpoint_{settings.iteration}"

    def _checkpoints(self) -> Path:
        project_dir = self.project_configuration.project_dir
        if project_dir is None:
            raise ConfigurationError("automatic_checkpoint_naming needs a folder. Give the Accelerator project_dir=...")
        return Path(project_dir) / "checkpoints"

    @property
    def _writes_state(self) -> bool:
        each_node = self.project_configuration.save_on_each_node
        return self.process_state.is_local_main_process if each_node else self.process_state.is_main_process

    def _begin(self, folder: CheckpointFolder, must_be_new: bool) -> None:
        if not self._writes_state:
            return
        if must_be_new and folder.target.exists():
            number = self.project_configuration.iteration
            raise ConfigurationError(
                f"the checkpoint {folder.target} exists already. Load it, or set project_configuration.iteration (now "
                f"{number}) to the "
                "number to go on with."
            )
        folder.begin()

    def _weights_to_save(self) -> list[dict[str, Any]]:
        """The weights of all models; where ranks hold parts of them, they may talk for it."""
        return [self.strategy.weights_to_save(model) for model in self.prepared.models]

    def _run_save_hooks(self, folder: CheckpointFolder, weights: list[dict[str, Any]]) -> None:
        partial, models = folder.partial, list(self.prepared.models)
        if not partial.is_dir():
            raise CheckpointError(
                f"rank {self.process_state.process_index} does not see {partial}, which another rank made. Save to a "
                "file system that all "
                "nodes share, or set ProjectConfiguration(save_on_each_node=True)."
            )
        for model, state in zip(models, weights, strict=True):
            weights_io.refuse_unsavable(model, state)
        with folder.explaining_write_errors():
            for hook in list(self._save_state_hooks.values()):
                hook(models, weights, str(partial))
            self._save_runs(partial)

    def _collect(
        self,
        weights: list[dict[str, Any]],
        gathered: Gathered | None,
        windows: dict[str, Any] | None,
        safe_serialization: bool,
        copies: HostCopies | None,
    ) -> list[Part]:
        parts = of_this_rank(self._parts(weights, gathered, windows, safe_serialization), self._writes_state)
        if copies is None:
            return parts
        copies.start()
        copied_parts = copied(parts, copies.copy)
        copies.finish()
        return copied_parts

    def _parts(
        self,
        weights: list[dict[str, Any]],
        gathered: Gathered | None,
        windows: dict[str, Any] | None,
        safe_serialization: bool,
    ) -> list[Part]:
        prepared = self.prepared
        parts = collect(
            weights if gathered is None else [],
            prepared.optimizers if gathered is None else [],
            prepared.schedulers,
            prepared.dataloaders,
            self.process_state.process_index,
            self._accumulation.position,
            self.scaler,
            safe_serialization,
            with_manifest=True,
        )
        parts += gathered.parts if gathered is not None else []
        if windows is not None:
            parts.append(
                Part(accumulation_state.gradients_file(self.process_state.process_index), windows, each_rank=True)
            )
        return parts + [custom_part(index, obj) for index, obj in enumerate(self._custom_objects)]

    # -- loading -----------------------------------------------------------------------------------------------------

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Put a state of :meth:`save_state` back; the same objects must have been prepared and registered. Every rank
        must call it.

        Training goes on exactly as it would have: a loader that was in the middle of an epoch hands out the rest of it
        in its next iteration, later epochs are whole. Files are verified first, and reading them runs no code.

        Args:
            input_dir: the checkpoint. "latest" is the newest complete one: of automatic naming, or else in the
                project's folder. None is the same, with automatic naming.
            load_kwargs: for ``torch.load`` of everything but weights. ``weights_only=False`` allows code in the files
                to run.
            **load_model_func_kwargs: for ``load_state_dict`` of the models, such as ``strict=False``; and
                ``map_location``, where tensors are read to: "cpu" (the default) or "on_device".

        Raises:
            CheckpointError: files are missing or damaged, or there is another number of some kind of object; on every
                rank, if on one.
            ConfigurationError: there is no such folder, or no checkpoint in it.
        """
        self.wait_for_save()
        found: list[str] = []
        self._on_all_ranks("looking for a state to load", lambda: found.append(str(self._find_state(input_dir))))
        folder = Path(self.process_state.collectives.broadcast_object(found[0]))
        share = self._share_of(folder)
        readers: list[StateReader] = []
        # Where ranks hold parts of models, they may talk to find out which.
        divided = self.strategy.shards_parameters and not self.strategy.uses_engine
        layouts = [self.strategy.layout(model) for model in self.prepared.models] if divided else None
        self._on_all_ranks(
            f"loading {folder}",
            lambda: readers.append(self._read(folder, share, layouts, load_kwargs, load_model_func_kwargs)),
        )
        self._on_all_ranks(f"loading {folder}", lambda: self._apply(folder, readers[0]))

    def _find_state(self, input_dir: str | os.PathLike[str] | None) -> Path:
        automatic = self.project_configuration.automatic_checkpoint_naming
        _check_path("input_dir", input_dir)
        if input_dir is None and not automatic:
            raise ConfigurationError("load_state needs input_dir, because automatic_checkpoint_naming is off.")
        if input_dir is None or (str(input_dir) == LATEST and (automatic or not Path(LATEST).is_dir())):
            # What is newest must be the same for all, so one process looks.
            return self._find_latest() if self.process_state.is_main_process else Path(LATEST)
        if self._writes_state:
            CheckpointFolder(input_dir).recover()
        return Path(input_dir)

    def _find_latest(self) -> Path:
        settings = self.project_configuration
        if settings.automatic_checkpoint_naming:
            return newest_complete(self._checkpoints())
        if settings.project_dir is None:
            raise ConfigurationError(
                f"load_state({LATEST!r}) needs a folder to look in. Give the Accelerator project_dir=..., or a path."
            )
        return newest_saved(Path(settings.project_dir))

    def _share_of(self, folder: Path) -> tuple[int, int]:
        """Which share of the files this process verifies, of as many as there are processes that see the same ones."""
        seen = self.process_state.collectives.all_gather_object(_identity(folder / MANIFEST_NAME))
        rank = self.process_state.process_index
        return seen[:rank].count(seen[rank]), seen.count(seen[rank])

    def _read(
        self,
        folder: Path,
        share: tuple[int, int],
        layouts: list[Layout] | None,
        load_kwargs: dict[str, Any] | None,
        load_model_func_kwargs: dict[str, Any],
    ) -> StateReader:
        options = dict(load_model_func_kwargs)
        reader = StateReader(folder, self.process_state.process_index, options.pop("map_location", None), load_kwargs)
        models, hooks = list(self.prepared.models), list(self._load_state_hooks.values())
        # Files are read while they are verified; nothing of it is used before both are done.
        with Workers() as workers:
            conclude = reader.start_verification(workers, share)
            if not hooks:
                self._read_objects(reader, models, layouts, options)
        conclude()
        if hooks:
            for hook in hooks:
                hook(models, str(folder))
            self._read_objects(reader, models, layouts, options)
        return reader

    def _read_objects(
        self, reader: StateReader, models: list[Any], layouts: list[Layout] | None, options: dict[str, Any]
    ) -> None:
        prepared = self.prepared
        chosen = (
            None
            if layouts is None
            else [layout for layout, own in zip(layouts, prepared.models, strict=True) if own in models]
        )
        reader.read_all(
            models,
            prepared.optimizers,
            prepared.schedulers,
            prepared.dataloaders,
            self.scaler,
            options,
            self.strategy,
            chosen,
        )
        reader.read_custom(self._custom_objects)
        reader.read_windows(prepared.dataloaders, prepared.models, self.strategy)
        reader.check_unread()

    def _apply(self, folder: Path, reader: StateReader) -> None:
        reader.apply()
        self._load_runs(folder)
        accumulation_state.restore(self._accumulation, reader.windows, self.prepared.dataloaders, self.prepared.models)
        self._continue_numbering(folder, reader)
        reader.restore_rng()
        self.strategy.share_generators()

    def _continue_numbering(self, folder: Path, reader: StateReader) -> None:
        number = checkpoint_number(folder)
        if reader.manifest is not None:
            self.project_configuration.iteration = reader.manifest.counters["iteration"]
            for optimizer in self.prepared.optimizers[:1]:
                optimizer.steps_taken = reader.manifest.counters.get("optimizer_steps", 0)
        elif number is not None:
            self.project_configuration.iteration = number + 1

    def _on_all_ranks(self, what: str, action: Callable[[], Any]) -> None:
        on_all_ranks(self.process_state.collectives, what, action)


def _identity(path: Path) -> tuple[Any, ...]:
    """The same for two processes only if they see the same file."""
    try:
        found = path.stat()
    except OSError:
        return os.getpid(), socket.gethostname()
    return socket.gethostname(), found.st_dev, found.st_ino, found.st_mtime_ns


def _check_path(name: str, value: Any) -> None:
    """Refuse what names no folder; the empty text would be the working folder."""
    if value is not None and (not isinstance(value, str | os.PathLike) or not os.fspath(value)):
        raise ConfigurationError(f"{name}={value!r} is not the path of a folder.")
