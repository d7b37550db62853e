"""accel: one PyTorch training script for any machine."""

from accel_data import DataLoaderConfiguration as DataLoaderConfiguration
from accel_data import skip_first_batches as skip_first_batches
from accel_launch import debug_launcher as debug_launcher
from accel_launch import notebook_launcher as notebook_launcher
from accel_state import AcceleratorState as AcceleratorState
from accel_state import DistributedType as DistributedType
from accel_state import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel_state import GradientState as GradientState
from accel_state import PartialState as PartialState
from accel_state.imports import is_rich_available as is_rich_available
from accel_state.memory import find_executable_batch_size as find_executable_batch_size
from accel_state.random import synchronize_rng_states as synchronize_rng_states

from .accelerator import Accelerator as Accelerator
from .checkpoint_files import CheckpointError as CheckpointError
from .compilation import TorchDynamoPlugin as TorchDynamoPlugin
from .kwargs.autocast import AutocastKwargs as AutocastKwargs
from .kwargs.base import KwargsHandler as KwargsHandler
from .kwargs.ddp import DDPCommunicationHookType as DDPCommunicationHookType
from .kwargs.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from .kwargs.grad_scaler import GradScalerKwargs as GradScalerKwargs
from .kwargs.init_process_group import InitProcessGroupKwargs as InitProcessGroupKwargs
from .kwargs.profile import ProfileKwargs as ProfileKwargs
from .local_sgd import LocalSGD as LocalSGD
from .project import ProjectConfiguration as ProjectConfiguration
