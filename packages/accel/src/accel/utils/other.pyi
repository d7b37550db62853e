"""Helpers for models and files, under the module path that other libraries know."""

from accel_bigmodel import get_module_children_bottom_up as get_module_children_bottom_up
from accel_launch import write_basic_config as write_basic_config
from accel_state.containers import merge_dicts as merge_dicts
from accel_state.containers import recursive_getattr as recursive_getattr
from accel_state.device_checks import check_os_kernel as check_os_kernel
from accel_state.env import clear_environment as clear_environment
from accel_state.env import convert_dict_to_env_variables as convert_dict_to_env_variables
from accel_state.env import patch_environment as patch_environment
from accel_state.humanize import convert_bytes as convert_bytes
from accel_state.imports import is_numpy_available as is_numpy_available
from accel_state.ports import get_free_port as get_free_port
from accel_state.ports import is_port_in_use as is_port_in_use
from accel_state.safetensors_writer import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from accel_state.state.partial import wait_for_everyone as wait_for_everyone

from ..core.compile import compile_regions as compile_regions
from ..core.compile import has_compiled_regions as has_compiled_regions
from ..core.compile import has_repeated_blocks as has_repeated_blocks
from ..core.compile import is_repeated_blocks as is_repeated_blocks
from ..core.unwrap import extract_model_from_parallel as extract_model_from_parallel
from ..core.unwrap import is_compiled_module as is_compiled_module
from ..core.weights_io import load as load
from ..core.weights_io import save as save
