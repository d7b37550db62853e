"""Launching from Python, under the module path that other libraries know."""

from accel_launch import debug_launcher as debug_launcher
from accel_launch import notebook_launcher as notebook_launcher
from accel_launch.launch_commands import PrepareForLaunch as PrepareForLaunch
from accel_launch.launch_commands import test_launch as test_launch
from accel_state import PrecisionType as PrecisionType
from accel_state.device_checks import get_current_device_type as get_current_device_type
from accel_state.device_checks import get_gpu_info as get_gpu_info
from accel_state.env import are_libraries_initialized as are_libraries_initialized
from accel_state.env import patch_environment as patch_environment
