"""Enumeration of the built-in trackers. Torch-free."""

from __future__ import annotations

from accel_state.enums import NamedChoice


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
