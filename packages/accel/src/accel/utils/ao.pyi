"""torchao, under the module path that other libraries know."""

from accel_fp8 import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from accel_fp8 import filter_first_and_last_linear_layers as filter_first_and_last_linear_layers
from accel_fp8 import filter_linear_layers as filter_linear_layers
from accel_fp8 import find_first_last_linear_layers as find_first_last_linear_layers
from accel_fp8 import has_ao_layers as has_ao_layers
