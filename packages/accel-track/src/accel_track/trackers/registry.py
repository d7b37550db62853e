"""Registry of trackers; other distributions add theirs with the entry point group ``accel.trackers``."""

from __future__ import annotations

from accel_state.registry import Registry

from ..base import GeneralTracker

TRACKERS: Registry[type[GeneralTracker]] = Registry(
    "tracker",
    {
        "jsonl": "accel_track.trackers.jsonl:JSONLinesTracker",
        "tensorboard": "accel_track.trackers.tensorboard:TensorBoardTracker",
        "wandb": "accel_track.trackers.wandb:WandBTracker",
        "comet_ml": "accel_track.trackers.comet_ml:CometMLTracker",
        "aim": "accel_track.trackers.aim:AimTracker",
        "mlflow": "accel_track.trackers.mlflow:MLflowTracker",
        "clearml": "accel_track.trackers.clearml:ClearMLTracker",
        "dvclive": "accel_track.trackers.dvclive:DVCLiveTracker",
        "swanlab": "accel_track.trackers.swanlab:SwanLabTracker",
        "trackio": "accel_track.trackers.trackio:TrackioTracker",
    },
    "accel.trackers",
)
