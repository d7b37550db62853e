"""The Accelerator's ``save_state`` and ``load_state``."""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from accel_state import PartialState, get_logger
from accel_state.collectives.single import Collectives
from accel_state.errors import AccelError, ConfigurationError

from . import saving
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
    project_configuration: ProjectConfiguration
    prepared: Preparation
    strategy: Strategy
    scaler: torch.amp.GradScaler | None
    _custom_objects: list[Any]

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

        Args:
            output_dir: the folder of this checkpoint, replaced if it exists; None with automatic naming.
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
        collectives = self.process_state.collectives
        # Paths made of the time, say, may differ between ranks.
        target = Path(collectives.broadcast_object(str(self._save_target(output_dir))))
        if not self.process_state.is_main_process and not self._writes:
            pass
        if self.prepared.models and not self._accumulation_is_closed:
            logger.warning(
                "The state is saved within an accumulation window; gradients are no part of it, so a resumed run begins a new one."
            )
        folder = CheckpointFolder(target)
        try:
            on_all_ranks(collectives, f"saving {target}", lambda: self._begin(folder, must_be_new=output_dir is None))
            on_all_ranks(collectives, f"saving {target}", lambda: self._write(folder, safe_serialization))
            on_all_ranks(collectives, f"saving {target}", lambda: self._commit(folder))
        except BaseException:
            if self._writes:
                folder.abandon()
            raise
        self.project_configuration.iteration += 1
        if output_dir is None:
            on_all_ranks(collectives, f"deleting old checkpoints beside {target}", lambda: self._rotate(folder.target))
        return target
