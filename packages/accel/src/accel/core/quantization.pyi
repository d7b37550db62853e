"""What type checkers see of quantization.py: pyright takes ``__getattr__`` from functions of stubs only."""

from accel_quant import BnbQuantizationConfig as BnbQuantizationConfig
from accel_quant import get_keys_to_not_convert as get_keys_to_not_convert
from accel_quant import has_4bit_bnb_layers as has_4bit_bnb_layers
from accel_quant import load_and_quantize_model as load_and_quantize_model
from accel_quant import replace_with_bnb_layers as replace_with_bnb_layers
