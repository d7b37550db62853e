"""What accel_quant exports; the runtime reads this list too."""

from .layers import BnbQuantizationConfig as BnbQuantizationConfig
from .layers import get_keys_to_not_convert as get_keys_to_not_convert
from .layers import has_4bit_bnb_layers as has_4bit_bnb_layers
from .layers import replace_with_bnb_layers as replace_with_bnb_layers
from .loading import load_and_quantize_model as load_and_quantize_model
from .quantizers.base import Quantizer as Quantizer
