"""torch_xla, under the module path that other libraries know."""

from accel_state.device_checks import is_torch_xla_available as is_torch_xla_available
