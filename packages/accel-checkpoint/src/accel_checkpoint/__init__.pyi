"""Public names of accel_checkpoint; also read at run time."""

from .api import AsyncSaver as AsyncSaver
from .api import load as load
from .api import save as save
from .catalog import CheckpointInfo as CheckpointInfo
from .catalog import list_checkpoints as list_checkpoints
from .catalog import newest_complete as newest_complete
from .catalog import verify as verify
from .manifest import Manifest as Manifest
from .names import CheckpointError as CheckpointError
from .uploading import Uploader as Uploader
from .uploading import newest as newest
