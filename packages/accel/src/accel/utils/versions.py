"""Version comparisons, under the module path that other libraries know."""

from accel_state.imports import compare_versions as compare_versions
from accel_state.imports import is_torch_version as is_torch_version
