"""Experiment trackers, under the module path that other libraries know."""

from accel_state.logging import get_logger as get_logger
from accel_state.operations import listify as listify
from accel_track import AimTracker as AimTracker
from accel_track import ClearMLTracker as ClearMLTracker
from accel_track import CometMLTracker as CometMLTracker
from accel_track import DVCLiveTracker as DVCLiveTracker
from accel_track import GeneralTracker as GeneralTracker
from accel_track import JSONLinesTracker as JSONLinesTracker
from accel_track import LoggerType as LoggerType
from accel_track import MLflowTracker as MLflowTracker
from accel_track import SwanLabTracker as SwanLabTracker
from accel_track import TensorBoardTracker as TensorBoardTracker
from accel_track import TrackerError as TrackerError
from accel_track import TrackioTracker as TrackioTracker
from accel_track import WandBTracker as WandBTracker
from accel_track import filter_trackers as filter_trackers
from accel_track import get_available_trackers as get_available_trackers
from accel_track import on_main_process as on_main_process
from accel_track import register_tracker_class as register_tracker_class
from accel_track.log_with import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS

# edsnlp writes to it as accelerate.tracking.logger.
logger = get_logger(__name__)
