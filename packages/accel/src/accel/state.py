"""The shared states, under the module path that other libraries know."""

from accel_state import AcceleratorState as AcceleratorState
from accel_state import DistributedType as DistributedType
from accel_state import DynamoBackend as DynamoBackend
from accel_state import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel_state import GradientState as GradientState
from accel_state import PartialState as PartialState
from accel_state import SageMakerDistributedType as SageMakerDistributedType
from accel_state import is_initialized as is_initialized
from accel_state.context import ThreadLocalSharedDict as ThreadLocalSharedDict
from accel_state.device_checks import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accel_state.device_checks import is_habana_gaudi1 as is_habana_gaudi1
from accel_state.device_checks import is_mps_available as is_mps_available
from accel_state.device_checks import is_xccl_available as is_xccl_available
from accel_state.env import get_int_from_env as get_int_from_env
from accel_state.env import parse_choice_from_env as parse_choice_from_env
from accel_state.env import parse_flag_from_env as parse_flag_from_env
from accel_state.imports import is_datasets_available as is_datasets_available
from accel_state.imports import is_deepspeed_available as is_deepspeed_available
from accel_state.imports import is_fp8_available as is_fp8_available
from accel_state.numa import get_cpu_distributed_information as get_cpu_distributed_information
from accel_state.state import do_nothing as do_nothing

from .deepspeed.runtime import deepspeed_required as deepspeed_required
