"""TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import torch

from accel_state.imports import is_package_available

from ..sdk_tracker import SdkTracker
from ..serialize import as_number, flatten, to_plain


class TensorBoardTracker(SdkTracker):
    """Writes event files into ``<logging_dir>/<run_name>``.

    Numbers become scalars, strings text, dictionaries of numbers scalars in one chart, and tensors and arrays of
    several numbers histograms. The config becomes hyperparameters, and is written to ``<time>/hparams.yml``.

    Args:
        run_name: name of the run.
        logging_dir: parent of the run's directory.
        **kwargs: arguments of ``SummaryWriter``.
    """

    writer: Any
    name = "tensorboard"
    requires_logging_directory = True
    module: ClassVar[str] = "tensorboard"
    handle: ClassVar[str] = "writer"
    finish_method: ClassVar[str] = "close"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir: str = os.path.join(logging_dir, run_name)

    @classmethod
    def is_available(cls) -> bool:
        """Return True if TensorBoard or tensorboardX is installed."""
        return is_package_available("tensorboard") or is_package_available("tensorboardX")

    @property
    def run_id(self) -> str | None:
        """The name of the run; a resumed one writes to the same directory."""
        return self.run_name

    def start(self) -> None:
        if is_package_available("tensorboard"):
            writer = self._sdk("torch.utils.tensorboard").SummaryWriter
        else:
            writer = self._sdk("tensorboardX").SummaryWriter
        kwargs = {"flush_secs": 20, **self._kwargs}
        if self._resumed_step is not None:
            # Readers then ignore what the interrupted job logged after that step.
            kwargs.setdefault("purge_step", self._resumed_step + 1)
        self.writer = writer(self.logging_dir, **kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        plain = to_plain(values)
        flat = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in flatten(plain).items()
        }
        self.writer.add_hparams(flat, metric_dict={})
        self.writer.flush()
        # add_hparams created a directory named after the time; the config is written next to its event file.
        directories = [path for path in Path(self.writer.get_logdir()).iterdir() if path.is_dir()]
        directory = max(directories, key=lambda path: path.stat().st_mtime, default=Path(self.writer.get_logdir()))
        # JSON is valid YAML.
        text = json.dumps(plain, indent=2) + "\n"
        (directory / "hparams.yml").write_text(text, encoding="utf-8", errors="backslashreplace")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of a step; ``kwargs`` go to the writer's ``add_scalar``, ``add_text`` or ``add_scalars``."""
        step = self._step_or_next(step)
        for name, value in values.items():
            self._add(name, value, step, kwargs)

    def _add(self, name: str, value: Any, step: int, kwargs: dict[str, Any]) -> None:
        number = as_number(value)
        if number is not None:
            self.writer.add_scalar(name, number, global_step=step, **kwargs)
        elif isinstance(value, str):
            self.writer.add_text(name, value, global_step=step, **kwargs)
        elif isinstance(value, dict):
            self.writer.add_scalars(name, self._numbers(value), global_step=step, **kwargs)
        elif isinstance(value, torch.Tensor) and value.numel():
            self.writer.add_histogram(
                name, value.float() if value.dtype is torch.bfloat16 else value, global_step=step, **kwargs
            )
        elif hasattr(value, "dtype") and bool(getattr(value, "size", False)):
            self.writer.add_histogram(name, value, global_step=step, **kwargs)
        else:
            self.writer.add_text(name, str(to_plain(value)), global_step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images of a step.

        Args:
            values: names to images or lists of them.
            step: the step.
            **kwargs: arguments of ``add_images``; with ``dataformats``, values are passed to it unchanged.
        """
        from ..images import as_images

        step = self._step_or_next(step)
        for name, value in values.items():
            if "dataformats" in kwargs:
                self.writer.add_images(name, value, global_step=step, **kwargs)
                continue
            for index, image in enumerate(as_images(value)):
                self.writer.add_image(
                    f"{name}/{index}" if index else name, image, global_step=step, dataformats="HWC", **kwargs
                )
        self.writer.flush()
