"""Aim."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from ..images import named_images
from ..sdk_tracker import SdkTracker
from ..serialize import as_number, flatten, to_plain


class AimTracker(SdkTracker):
    """Logs an ``aim.Run`` to a repository in a directory or on a server (``aim://host:port``).

    Args:
        run_name: name of the run.
        logging_dir: the repository.
        **kwargs: arguments of ``aim.Run``.
    """

    writer: Any
    name = "aim"
    requires_logging_directory = True
    module: ClassVar[str] = "aim"
    handle: ClassVar[str] = "writer"
    id_attribute: ClassVar[str] = "hash"
    finish_method: ClassVar[str] = "close"
    offline = "Pass a directory as logging_dir to store the run locally."

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path: str | None = None if logging_dir is None else str(logging_dir)

    def start(self) -> None:
        kwargs = {"repo": self.aim_repo_path, "experiment": self.run_name, **self._kwargs}
        if self._resumed_id is not None:
            kwargs.setdefault("run_hash", self._resumed_id)
        if str(kwargs["repo"]).startswith("aim://"):
            self._require_server(str(kwargs["repo"]))
        self.writer = self._sdk().Run(**kwargs)
        self.writer.name = self.run_name

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = to_plain(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of a step; ``kwargs`` go to ``aim.Run.track`` (``context``, ``epoch``)."""
        step = self._step_or_next(step)
        aim = self._sdk()
        for name, value in flatten(values, "/").items():
            number = as_number(value)
            item: Any = number if number is not None else value
            if isinstance(item, (str, list, type(None))):
                item = aim.Text(item if isinstance(item, str) else str(to_plain(item)))
            elif type(item).__module__ in ("torch", "numpy"):
                item = aim.Distribution(item.reshape(-1).tolist())
            self.writer.track(item, name=name, step=step, **kwargs)

    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Log images of a step.

        Args:
            values: names to images, lists of images, or ``(image, caption)``.
            step: the step.
            kwargs: ``{"aim_image": arguments of aim.Image, "track": arguments of aim.Run.track}``.
        """
        step = self._step_or_next(step)
        kwargs = kwargs or {}
        pil_image, aim_image = self._sdk("PIL.Image"), self._sdk().Image
        for key, value in values.items():
            has_caption = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str)
            content, caption = value if has_caption else (value, "")
            options = {"caption": caption, **kwargs.get("aim_image", {})}
            # An Aim sequence holds either images or lists of them, so each of several images gets its own sequence.
            for name, image in named_images({key: content}):
                tracked = aim_image(pil_image.fromarray(image), **options)
                self.writer.track(tracked, name=name, step=step, **kwargs.get("track", {}))

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file in the repository's directory for artifacts."""
        if not self.writer.artifacts_uri:
            self.writer.set_artifacts_uri(Path(self.writer.repo.path, "artifacts").absolute().as_uri())
        prefix = f"{artifact_path.strip('/')}/" if artifact_path else ""
        self.writer.log_artifact(local_path, name=prefix + os.path.basename(local_path), block=True)
