from __future__ import annotations

import pytest
import torch

from accel_quant import BnbQuantizationConfig
from accel_state.enums import CustomDtype
from accel_state.errors import ConfigurationError


def test_defaults() -> None:
    """Those of the other fields are compared by tests/test_reference_api.py."""
    config = BnbQuantizationConfig(load_in_4bit=True)
    assert (config.bnb_4bit_compute_dtype, config.torch_dtype) == (torch.float16, torch.float16)
    assert config.target_dtype == CustomDtype.INT4
    assert BnbQuantizationConfig(load_in_8bit=True).target_dtype == torch.int8


@pytest.mark.parametrize("given", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_types_are_taken_by_name_or_as_they_are(given) -> None:
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype=given, torch_dtype=given)
    assert (config.bnb_4bit_compute_dtype, config.torch_dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "load_in_8bit=False and load_in_4bit=False: set exactly one"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "set exactly one"),
        ({"load_in_8bit": "yes"}, "load_in_8bit='yes' must be True or False"),
        ({"load_in_8bit": True, "llm_int8_threshold": -1}, "llm_int8_threshold=-1 must be a number >= 0"),
        ({"load_in_8bit": True, "llm_int8_threshold": True}, "must be a number"),
        ({"load_in_8bit": True, "llm_int8_threshold": float("nan")}, "must be a number"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "'int4' is not one of fp4, nf4"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": 1}, "must be True or False"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "int8"}, "'int8' is not a dtype to compute in"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": None}, "None is not a dtype to compute in"),
        ({"load_in_4bit": True, "torch_dtype": "auto"}, "torch_dtype='auto' is not a dtype to compute in"),
        ({"load_in_4bit": True, "torch_dtype": torch.int8}, "torch.int8 is not a dtype"),
        ({"load_in_4bit": True, "skip_modules": "head"}, "skip_modules='head' must be a list"),
        ({"load_in_4bit": True, "keep_in_fp32_modules": [1]}, "must be a list of module names"),
    ],
)
def test_a_bad_value_or_combination_is_refused_with_the_next_step(kwargs, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BnbQuantizationConfig(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"load_in_8bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bf16"},
            "bnb_4bit_compute_dtype=torch.bfloat16 has",
        ),
        ({"load_in_8bit": True, "bnb_4bit_use_double_quant": True}, "bnb_4bit_use_double_quant=True has no effect"),
        ({"load_in_4bit": True, "llm_int8_threshold": 5.0}, "llm_int8_threshold=5.0 has no effect with load_in_4bit"),
    ],
)
def test_options_of_the_other_width_are_logged(kwargs, message, caplog) -> None:
    BnbQuantizationConfig(**kwargs)
    assert message in caplog.text
