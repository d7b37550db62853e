"""The Accelerator's methods that write weights and objects, and read them back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from accel_state import ConfigurationError, PartialState

from ..strategies.base import Strategy
from . import weights_io
from .project import ProjectConfiguration


class Saving:
    """Saving weights and objects."""

    process_state: PartialState
    project_configuration: ProjectConfiguration
    strategy: Strategy
    _custom_objects: list[Any]

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object once, on the main process; see :func:`accel.utils.save`."""
        weights_io.save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def load(self, f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        """Load what :meth:`save` wrote, without running code from the file; see :func:`accel.utils.load`."""
        return weights_io.load(f, map_location, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The weights of a prepared model, under the names of the model that was prepared.

        Args:
            model: a prepared model.
            unwrap: whether to leave out what wrapping and compiling put around the names.
        """
        return self.strategy.state_dict(model, unwrap)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights, from which it can be loaded without accel.

        Args:
            model: a prepared model.
            save_directory: the folder; it is made if needed.
            max_shard_size: largest file, in bytes or as text such as "5GB"; larger models are split, with an index.
            safe_serialization: the safetensors format rather than torch's.

        Raises:
            ConfigurationError: the folder is a file, a weight has no values, or each of several nodes is to save a
                model that they share.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise ConfigurationError(
                f"save_directory={str(folder)!r} is a file. Give a folder to put the weights into."
            )
        if self.strategy.shards_parameters:
            weights_io.refuse_each_node(self.process_state, self.project_configuration.save_on_each_node)
        state_dict = self.get_state_dict(model)
        weights_io.refuse_unsavable(model, state_dict)
        process = self.process_state
        each_node = self.project_configuration.save_on_each_node
        if process.is_local_main_process if each_node else process.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            weights_io.save_model_weights(state_dict, folder, max_shard_size, safe_serialization)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects in saved states.

        Raises:
            ConfigurationError: one has no ``state_dict`` and ``load_state_dict``; none is registered then.
        """
        wrong = [obj for obj in objects if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"))]
        if wrong:
            raise ConfigurationError(
                f"{', '.join(repr(obj) for obj in wrong)} cannot be part of a checkpoint: objects need the methods "
                "state_dict and "
                "load_state_dict. Register only such objects, or wrap these in one."
            )
        self._custom_objects.extend(objects)
