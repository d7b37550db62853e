"""Where a project keeps its files."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

from accel_state.errors import ConfigurationError


@dataclass
class ProjectConfiguration:
    """Folders and checkpoint naming of a project.

    Args:
        project_dir: the folder of everything that is saved.
        logging_dir: the folder of tracker logs; the project's folder by default.
        automatic_checkpoint_naming: save states as ``checkpoints/checkpoint_<iteration>`` in the project's folder.
        total_limit: how many of those are kept.
        iteration: the number of the next one.
        save_on_each_node: write on the main process of every node, for file systems that the nodes do not share.

    Raises:
        ConfigurationError: ``total_limit`` or ``iteration`` is no whole number, or below 0.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None:
            self.total_limit = _count("total_limit", self.total_limit)
        self.iteration = _count("iteration", self.iteration)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project's folder, and that of the logs where none was chosen."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


def _count(name: str, value: Any) -> int:
    try:
        number = -1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = -1
    if number < 0:
        kept = ", or None to keep all checkpoints" if name == "total_limit" else ""
        raise ConfigurationError(f"ProjectConfiguration({name}={value!r}): give a whole number, 0 or more{kept}.")
    return number
