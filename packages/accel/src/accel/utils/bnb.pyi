"""Quantization with bitsandbytes, under the module path that other libraries know."""

from ..core.quantization import get_keys_to_not_convert as get_keys_to_not_convert
from ..core.quantization import has_4bit_bnb_layers as has_4bit_bnb_layers
from ..core.quantization import load_and_quantize_model as load_and_quantize_model
from ..core.quantization import replace_with_bnb_layers as replace_with_bnb_layers
