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
from accel_track import LoggerType as LoggerType

from ..checkpoint.names import ProjectConfiguration as ProjectConfiguration
from ..core.compile import TorchDynamoPlugin as TorchDynamoPlugin
from ..core.quantization import BnbQuantizationConfig as BnbQuantizationConfig
from ..deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from ..fsdp.plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from ..kwargs.base import KwargsHandler as KwargsHandler
from ..kwargs.ddp import DDPCommunicationHookType as DDPCommunicationHookType
from ..kwargs.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from ..kwargs.fp8 import AORecipeKwargs as AORecipeKwargs
from ..kwargs.fp8 import FP8RecipeKwargs as FP8RecipeKwargs
from ..kwargs.fp8 import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from ..kwargs.fp8 import NativeRecipeKwargs as NativeRecipeKwargs
from ..kwargs.fp8 import TERecipeKwargs as TERecipeKwargs
from ..kwargs.handlers import AutocastKwargs as AutocastKwargs
from ..kwargs.handlers import GradScalerKwargs as GradScalerKwargs
from ..kwargs.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from ..kwargs.handlers import ProfileKwargs as ProfileKwargs
from ..kwargs.handlers import TrackingKwargs as TrackingKwargs
from ..parallel.config import ParallelismConfig as ParallelismConfig
from ..parallel.config import TorchTensorParallelPlugin as TorchTensorParallelPlugin
