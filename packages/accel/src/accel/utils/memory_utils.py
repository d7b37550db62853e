"""Memory, under the module path that other libraries know."""

from accel_state.memory import clear_device_cache as clear_device_cache
from accel_state.memory import find_executable_batch_size as find_executable_batch_size
from accel_state.memory import release_memory as release_memory
from accel_state.memory import should_reduce_batch_size as should_reduce_batch_size
