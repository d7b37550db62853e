"""Quantized models and the Accelerator."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from accel import Accelerator

WITHOUT_EXTRAS = """
import sys
sys.modules["accel_quant"] = sys.modules["accel_megatron"] = None
from accel.utils import *
assert set_seed and "BnbQuantizationConfig" not in globals() and "MegatronLMPlugin" not in globals()
import accel.utils
try:
    accel.utils.BnbQuantizationConfig
except ImportError as error:
    print(error)
"""


@pytest.mark.timeout(300)  # a fresh interpreter, which a busy machine keeps waiting
def test_without_the_extras_a_star_import_works_and_the_error_names_the_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, timeout=280, check=True
    )
    assert done.stdout.strip() == (
        "accel.utils.BnbQuantizationConfig needs the module accel_quant. Install it with: pip install 'accel[quant]'"
    )


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    from accel.core import quantization

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        quantization.nothing  # noqa: B018


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 4)).eval()


@pytest.mark.parametrize(
    "kwargs",
    [{"load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}],
    ids=["8bit", "4bit"],
)
def test_a_quantized_model_is_saved_and_loaded_again(kwargs, tmp_path) -> None:
    pytest.importorskip("accel_quant")
    from accel.utils import BnbQuantizationConfig, load_and_quantize_model

    config = BnbQuantizationConfig(**kwargs, torch_dtype=torch.float32)
    x = torch.randn(3, 64)
    quantized = load_and_quantize_model(model(), config)
    with torch.no_grad():
        expected = quantized(x)
    Accelerator(cpu=True).save_model(quantized, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 0.5 * sum(
        tensor.nbytes for tensor in model().state_dict().values()
    )
    with torch.device("meta"):
        empty = model()
    again = load_and_quantize_model(empty, config, weights_location=tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(x), expected, rtol=0, atol=0)


def test_a_quantized_model_is_prepared_and_computes_the_same() -> None:
    pytest.importorskip("accel_quant")
    from accel.utils import BnbQuantizationConfig, load_and_quantize_model

    x = torch.randn(3, 64)
    quantized = load_and_quantize_model(model(), BnbQuantizationConfig(load_in_8bit=True, torch_dtype=torch.float32))
    with torch.no_grad():
        expected = quantized(x)
        torch.testing.assert_close(
            Accelerator(cpu=True).prepare_model(quantized, evaluation_mode=True)(x), expected, rtol=0, atol=0
        )
