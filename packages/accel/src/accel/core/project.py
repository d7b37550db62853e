"""Where a project saves its states and logs."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

from accel_state.arguments import check_flags
from accel_state.errors import ConfigurationError
from accel_state.paths import as_location, as_path
from accel_state.storage.url import Location, RemotePath, is_url


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
        upload_to: the URL of a place in object storage, such as "s3://bucket/run", that every complete checkpoint is
            copied to in the background; ``total_limit`` counts there too.
        pack_rank_files: write the random number generators of all ranks into one file, ``random_states.zip``, which
            Accelerate does not read; None: with more than 64 processes.

    Raises:
        ConfigurationError: ``total_limit`` or ``iteration`` is not an integer of 0 or more; ``upload_to`` is no URL;
            ``upload_to`` or ``pack_rank_files`` contradicts another argument.

    Examples:
        >>> configuration = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=3)
        >>> accelerator = Accelerator(cpu=True, project_config=configuration)
        >>> model = accelerator.prepare(model)
        >>> accelerator.save_state().name
        'checkpoint_0'
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    upload_to: str | None = None
    pack_rank_files: bool | None = None

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
        if self.upload_to is not None:
            self._check_upload(place)
        if self.pack_rank_files and self.save_on_each_node:
            raise ConfigurationError(
                "pack_rank_files=True has one process write the small files of all ranks, and with "
                "save_on_each_node=True every node keeps those of its own. Leave one of them out."
            )
        # Trackers write to directories only.
        if self.logging_dir is None and not isinstance(place, RemotePath):
            self.logging_dir = project_dir

    def _check_upload(self, place: Location | None) -> None:
        if not is_url(self.upload_to):
            raise ConfigurationError(
                f"upload_to={self.upload_to!r} must be the URL of a store, such as s3://bucket/run. To save in another "
                "directory, set project_dir."
            )
        if isinstance(place, RemotePath):
            raise ConfigurationError(
                f"upload_to={self.upload_to!r} copies checkpoints of a directory, and project_dir={place} is a store "
                "already. Leave one of them out."
            )
        if self.save_on_each_node:
            raise ConfigurationError(
                "upload_to copies what one process sees, and with save_on_each_node=True every node has other files. "
                "Set project_dir to the URL instead."
            )


def project_settings(project_dir: Any, config: ProjectConfiguration | None) -> ProjectConfiguration:
    """Directories of the project."""
    if config is not None and not isinstance(config, ProjectConfiguration):
        raise ConfigurationError(
            f"project_config={config!r} must be a ProjectConfiguration. For a directory, pass project_dir={config!r}."
        )
    settings = config or ProjectConfiguration(project_dir=project_dir)
    if project_dir is not None and settings.project_dir is None:
        settings.set_directories(project_dir)
    if project_dir is not None and str(settings.project_dir) != str(project_dir):
        raise ConfigurationError(
            f"project_dir={str(project_dir)!r} contradicts project_config.project_dir={settings.project_dir!r}. Pass "
            "one of them."
        )
    return settings
