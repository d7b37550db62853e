"""Quantization with bitsandbytes, under the module path that other libraries know."""

from ..quantization import get_keys_to_not_convert as get_keys_to_not_convert
from ..quantization import has_4bit_bnb_layers as has_4bit_bnb_layers
from ..quantization import load_and_quantize_model as load_and_quantize_model
from ..quantization import replace_with_bnb_layers as replace_with_bnb_layers
