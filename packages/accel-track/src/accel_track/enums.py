"""Enumeration of the built-in trackers. Torch-free."""

from __future__ import annotations

from typing import Literal

from accel_state.enums import NamedChoice

LoggerName = Literal[
    "all", "aim", "tensorboard", "wandb", "trackio", "comet_ml", "mlflow", "clearml", "dvclive", "swanlab", "jsonl"
]
"""The values of :class:`LoggerType`, for type checkers."""


class LoggerType(NamedChoice):
    """The trackers in this package, and ``ALL`` for every installed one."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    JSONL = "jsonl"
