"""The Accelerator's ``save_state`` and ``load_state``."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from accel_state import GradientState, PartialState, get_logger
from accel_state.errors import ConfigurationError

from . import saving
from .accumulation import Accumulation
from .agreement import on_all_ranks
from .checkpoint_files import CheckpointError
from .checkpoint_folder import CheckpointFolder, checkpoint_number, newest_complete, rotate
from .checkpointing import save_accelerator_state, save_custom_state
from .manifest import write_manifest
from .preparation import Preparation
from .project import ProjectConfiguration
from .state_reading import StateReader
from .strategies.base import Strategy

logger = get_logger(__name__)

SaveHook = Callable[[list[Any], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[Any], str], None]


class StateSaving:
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

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Have a function called by each :meth:`save_state`, before anything is written.

        Args:
            hook: called on every rank as ``hook(models, weights, output_dir)`` with the prepared models, their state dicts, and the
                folder that is being written, which gets its final name later. It may write files there, which become part of the
                checkpoint, and remove from ``weights`` what it has saved itself.

        Returns:
            A handle; its ``remove()`` takes the hook back.
        """
        handle = RemovableHandle(self._save_state_hooks)
        self._save_state_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Have a function called by each :meth:`load_state`, when the files have been verified and before anything is loaded.

        Args:
            hook: called on every rank as ``hook(models, input_dir)``. It may remove from ``models`` those that it has loaded itself.

        Returns:
            A handle; its ``remove()`` takes the hook back.
        """
        handle = RemovableHandle(self._load_state_hooks)
        self._load_state_hooks[handle.id] = hook
        return handle

    # -- saving ------------------------------------------------------------------------------------------------------

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        """Save everything that training needs to go on exactly as if it had never stopped. Every rank must call it.

        That is: models, optimizers, schedulers, positions of the loaders, the loss scale, the random number generators of every rank
        and the registered objects. The checkpoint appears under its name when it is whole and on the disk; if saving fails, one that
        was there before is still there. With automatic naming, old ones are deleted after that, down to ``total_limit``.

        Save between optimizer steps: gradients that are being accumulated are no part of a state.

        Args:
            output_dir: the folder of this checkpoint, which replaces an older one there; None with automatic naming.
            safe_serialization: weights in the safetensors format rather than torch's.
            **save_model_func_kwargs: for strategies that save models in their own way.

        Returns:
            The checkpoint.

        Raises:
            CheckpointError: saving failed on some rank.
            ConfigurationError: no folder, or one that cannot be used; with automatic naming, a checkpoint of this number exists.
        """
        if save_model_func_kwargs:
            raise ConfigurationError(
                f"save_state got {', '.join(save_model_func_kwargs)}, which {type(self.strategy).__name__} has no use for. Leave it out."
            )
        if not self.gradient_state.sync_gradients:
            logger.warning(
                "The state is saved within an accumulation window. Its gradients are no part of it: a resumed run starts a new one."
            )
        # A path made of the time, say, may differ between ranks.
        target = Path(self.process_state.collectives.broadcast_object(str(self._save_target(output_dir))))
        folder, automatic = CheckpointFolder(target), self.project_configuration.automatic_checkpoint_naming
        try:
            self._on_all_ranks(f"saving {target}", lambda: self._begin(folder, must_be_new=automatic))
            self._on_all_ranks(f"saving {target}", lambda: self._write(folder, safe_serialization))
            self._on_all_ranks(f"saving {target}", lambda: self._commit(folder))
        except BaseException:
            if self._writes_state:
                folder.abandon()
            raise
        self.project_configuration.iteration += 1
        if automatic:
            self._on_all_ranks(f"deleting old checkpoints beside {target}", lambda: self._rotate(folder.target))
        return target

    def _save_target(self, output_dir: str | os.PathLike[str] | None) -> Path:
        settings = self.project_configuration
        if not settings.automatic_checkpoint_naming:
            if output_dir is None:
                raise ConfigurationError("save_state needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True).")
            return Path(output_dir)
        if output_dir is not None:
            raise ConfigurationError(
                f"output_dir={str(output_dir)!r} contradicts automatic_checkpoint_naming, which chooses the folder. Call save_state() "
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
                f"the checkpoint {folder.target} exists already. Load it, or set project_configuration.iteration (now {number}) to the "
                "number to go on with."
            )
        folder.begin()

    def _write(self, folder: CheckpointFolder, safe_serialization: bool) -> None:
        partial = folder.partial
        if not partial.is_dir():
            raise CheckpointError(
                f"rank {self.process_state.process_index} does not see {partial}, which another rank made. Save to a file system that all "
                "nodes share, or set ProjectConfiguration(save_on_each_node=True)."
            )
        models = list(self.prepared.models)
        weights = [self.strategy.state_dict(model) for model in models]
        for model, state in zip(models, weights, strict=True):
            saving.refuse_unsavable(model, state)
        for hook in list(self._save_state_hooks.values()):
            hook(models, weights, str(partial))
        with folder.explaining_write_errors():
            self._write_parts(partial, weights, safe_serialization)

    def _write_parts(self, partial: Path, weights: list[dict[str, Any]], safe_serialization: bool) -> None:
        prepared, each_node = self.prepared, self.project_configuration.save_on_each_node
        save_accelerator_state(
            partial,
            weights,
            prepared.optimizers,
            prepared.schedulers,
            prepared.dataloaders,
            self.process_state.process_index,
            self._accumulation.position,
            self.scaler,
            each_node,
            safe_serialization,
        )
        for index, obj in enumerate(self._custom_objects):
            save_custom_state(obj, partial, index, each_node)

    def _commit(self, folder: CheckpointFolder) -> None:
        if self._writes_state:
            counters = {"iteration": self.project_configuration.iteration + 1, "step": self._accumulation.position}
            with folder.explaining_write_errors():
                write_manifest(folder.partial, self.process_state.num_processes, counters)
                folder.commit()

    def _rotate(self, newest: Path) -> None:
        limit = self.project_configuration.total_limit
        if self._writes_state and limit is not None:
            deleted = rotate(newest.parent, limit, newest)
            if deleted:
                logger.info("Deleted %s: total_limit=%d.", ", ".join(path.name for path in deleted), limit)

    # -- loading -----------------------------------------------------------------------------------------------------

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Put a state of :meth:`save_state` back; the same objects must have been prepared and registered. Every rank must call it.

        Training goes on exactly as it would have: a loader that was in the middle of an epoch hands out the rest of it in its next
        iteration, later epochs are whole. Files are verified first, and reading them runs no code.

        Args:
            input_dir: the checkpoint; None takes the newest complete one of automatic naming.
            load_kwargs: for ``torch.load`` of everything but weights. ``weights_only=False`` allows code in the files to run.
            **load_model_func_kwargs: for ``load_state_dict`` of the models, such as ``strict=False``; and ``map_location``, where
                tensors are read to: "cpu" (the default) or "on_device".

        Raises:
            CheckpointError: files are missing or damaged, or there is another number of some kind of object; on every rank, if on one.
            ConfigurationError: there is no such folder, or no checkpoint in it.
        """
        found: list[str] = []
        self._on_all_ranks("looking for a state to load", lambda: found.append(str(self._find_state(input_dir))))
        folder = Path(self.process_state.collectives.broadcast_object(found[0]))
        self._on_all_ranks(f"loading {folder}", lambda: self._read(folder, load_kwargs, load_model_func_kwargs))

    def _find_state(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            if self._writes_state:
                CheckpointFolder(input_dir).recover()
            return Path(input_dir)
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ConfigurationError("load_state needs input_dir, because automatic_checkpoint_naming is off.")
        folder = self._checkpoints()
        # What is newest must be the same for all, so one process looks.
        return newest_complete(folder) if self.process_state.is_main_process else folder

    def _read(self, folder: Path, load_kwargs: dict[str, Any] | None, load_model_func_kwargs: dict[str, Any]) -> None:
        map_location = load_model_func_kwargs.pop("map_location", None)
        reader = StateReader(folder, self.process_state.process_index, map_location, load_kwargs)
        reader.verify()
        models, prepared = list(self.prepared.models), self.prepared
        for hook in list(self._load_state_hooks.values()):
            hook(models, str(folder))
        reader.read_all(models, prepared.optimizers, prepared.schedulers, prepared.dataloaders, self.scaler, load_model_func_kwargs)
        reader.read_custom(self._custom_objects)
        reader.apply()
        # The micro batches of an open window are not counted on, since their gradients are gone.
        self._continue_numbering(folder, reader)
        reader.restore_rng()

    def _continue_numbering(self, folder: Path, reader: StateReader) -> None:
        number = checkpoint_number(folder)
        if reader.manifest is not None:
            self.project_configuration.iteration = reader.manifest.counters["iteration"]
        elif number is not None:
            self.project_configuration.iteration = number + 1

    def _on_all_ranks(self, what: str, action: Callable[[], Any]) -> None:
        on_all_ranks(self.process_state.collectives, what, action)
