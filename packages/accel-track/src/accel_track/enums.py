"""Names of the trackers, as an enumeration. Torch-free."""

from __future__ import annotations

from accel_state.enums import NamedChoice


class LoggerType(NamedChoice):
    """The trackers that come with this package, and ``ALL`` for every one that is installed."""

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
