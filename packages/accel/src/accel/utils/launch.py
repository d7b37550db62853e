"""Launching, under the module path that other libraries know."""

from accel_launch.launch_commands import PrepareForLaunch as PrepareForLaunch
from accel_launch.launch_commands import prepare_multi_gpu_env as prepare_multi_gpu_env
from accel_launch.launch_commands import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
from accel_launch.launchers.tpu import prepare_tpu as prepare_tpu
