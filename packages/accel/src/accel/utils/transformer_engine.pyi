"""Transformer Engine, under the module path that other libraries know."""

from accel_fp8 import apply_fp8_autowrap as apply_fp8_autowrap
from accel_fp8 import contextual_fp8_autocast as contextual_fp8_autocast
from accel_fp8 import convert_model as convert_model
from accel_fp8 import has_transformer_engine_layers as has_transformer_engine_layers
