"""Layers that bitsandbytes has quantized already can be offloaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_bigmodel import cpu_offload, remove_hook_from_submodules


@pytest.mark.parametrize("bits", [8, 4])
def test_offloading_layers_that_are_quantized_already(bits: int) -> None:
    import bitsandbytes  # takes seconds, which each worker that collects the tests would wait

    torch.manual_seed(0)
    plain = nn.Linear(64, 64)
    if bits == 8:
        layer = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    else:
        layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32)
    layer.load_state_dict(plain.state_dict())
    model, x = nn.Sequential(layer).to("cpu"), torch.randn(2, 64)
    expected = model(x)
    packed = model[0].weight
    cpu_offload(model, "cpu")
    for _ in range(2):
        assert torch.equal(model(x), expected) and model[0].weight.is_meta
    if bits == 4:
        assert packed.quant_state.absmax.device.type == "cpu", "the parameter that was offloaded keeps its state"
    remove_hook_from_submodules(model)
    assert torch.equal(model(x), expected) and not model[0].weight.is_meta
