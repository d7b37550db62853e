"""Where a project saves its states and logs."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index

from accel_state.arguments import check_flags
from accel_state.errors import ConfigurationError
from accel_state.paths import as_location, as_path
from accel_state.storage.url import RemotePath


@dataclass
class ProjectConfiguration:
    """Directories and checkpoint naming of a project.

    Args:
        project_dir: the directory of everything that is saved, or the URL of a place in object storage, such as
            "s3://bucket/run".
        logging_dir: the directory of tracker logs; the project directory by default, if that is not a URL.
        automatic_checkpoint_naming: save states as ``<project_dir>/checkpoints/checkpoint_<iteration>``.
        total_limit: how many automatically named checkpoints to keep; None keeps all.
        iteration: the number of the next one.
        save_on_each_node: write on the main process of every node, for file systems that the nodes do not share.

    Raises:
        ConfigurationError: ``total_limit`` or ``iteration`` is not an integer of 0 or more.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        for name in ("total_limit", "iteration"):
            value = getattr(self, name)
            if value is None and name == "total_limit":
                continue
            try:
                number = -1 if isinstance(value, bool) else index(value)
            except TypeError:
                number = -1
            if number < 0:
                none = ", or None to keep all checkpoints" if name == "total_limit" else ""
                raise ConfigurationError(
                    f"ProjectConfiguration({name}={value!r}) must be a whole number, 0 or more{none}."
                )
            setattr(self, name, number)
        self.set_directories(self.project_dir)
        check_flags(self)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project directory, and the logging directory if none was given."""
        place = None if project_dir is None else as_location("project_dir", project_dir)
        if self.logging_dir is not None:
            as_path("logging_dir", self.logging_dir)
        self.project_dir = project_dir
        # Trackers write to directories only.
        if self.logging_dir is None and not isinstance(place, RemotePath):
            self.logging_dir = project_dir
