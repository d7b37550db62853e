"""The environment, under the module path that other libraries know."""

from accel_state.device_checks import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accel_state.device_checks import get_current_device_type as get_current_device_type
from accel_state.device_checks import get_driver_version as get_driver_version
from accel_state.device_checks import get_gpu_info as get_gpu_info
from accel_state.env import are_libraries_initialized as are_libraries_initialized
from accel_state.env import clear_environment as clear_environment
from accel_state.env import convert_dict_to_env_variables as convert_dict_to_env_variables
from accel_state.env import get_int_from_env as get_int_from_env
from accel_state.env import parse_choice_from_env as parse_choice_from_env
from accel_state.env import parse_flag_from_env as parse_flag_from_env
from accel_state.env import patch_environment as patch_environment
from accel_state.env import purge_accelerate_environment as purge_accelerate_environment
from accel_state.env import str_to_bool as str_to_bool
from accel_state.numa import CPUInformation as CPUInformation
from accel_state.numa import get_cpu_distributed_information as get_cpu_distributed_information
from accel_state.numa import override_numa_affinity as override_numa_affinity
from accel_state.numa import set_numa_affinity as set_numa_affinity
