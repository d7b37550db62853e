"""Settings and enumerations, under the module path that other libraries know."""

from accel_data import DataLoaderConfiguration as DataLoaderConfiguration
from accel_state import ComputeEnvironment as ComputeEnvironment
from accel_state import CustomDtype as CustomDtype
from accel_state import DistributedOperationException as DistributedOperationException
from accel_state import DistributedType as DistributedType
from accel_state import DynamoBackend as DynamoBackend
from accel_state import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel_state import PrecisionType as PrecisionType
from accel_state import RNGType as RNGType
from accel_state import SageMakerDistributedType as SageMakerDistributedType
from accel_state.operations import TensorInformation as TensorInformation

from ..compilation import TorchDynamoPlugin as TorchDynamoPlugin
from ..kwargs.autocast import AutocastKwargs as AutocastKwargs
from ..kwargs.base import KwargsHandler as KwargsHandler
from ..kwargs.ddp import DDPCommunicationHookType as DDPCommunicationHookType
from ..kwargs.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from ..kwargs.grad_scaler import GradScalerKwargs as GradScalerKwargs
from ..kwargs.init_process_group import InitProcessGroupKwargs as InitProcessGroupKwargs
from ..kwargs.profile import ProfileKwargs as ProfileKwargs
from ..project import ProjectConfiguration as ProjectConfiguration
