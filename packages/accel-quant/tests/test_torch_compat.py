"""The private names of torch that the package uses exist."""

from __future__ import annotations

from torch import nn

from accel_quant import _torch_compat as compat


def test_saving_a_module_alone() -> None:
    layer, state = nn.Linear(2, 2), {}
    compat.save_to_state_dict(layer, state, "layer.", False)
    assert set(state) == {"layer.weight", "layer.bias"}
