"""A rank that leaves out a unit of a sharded model: an error that names both."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from fsdp_nets import WIDTH, Block
from torch import nn

from accel import Accelerator, InitProcessGroupKwargs
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.utils import patch_environment
from accel_state.errors import CollectiveTimeoutError
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(300)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number != self.skipped:
                x = block(x)
        return x


def train(skipped: int, debug: bool) -> str:
    """The error of a rank in the second step, in which rank 1 leaves out a block."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
    )
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=8))
    with patch_environment(ACCELERATE_DEBUG_MODE="1" if debug else "0"):
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, kwargs_handlers=[timeout])
    net = Net()
    model = accelerator.prepare(net)
    try:
        for step in range(2):
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
            net.skipped = skipped if step and accelerator.process_index else None
            accelerator.backward(model(torch.ones(2, WIDTH)).square().mean())
    except RuntimeError as error:
        return f"{type(error).__name__} {error}"
    return ""


# The last unit is noticed after a time-out of 8 s.
@pytest.mark.parametrize("skipped", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_in_debug_mode_a_rank_that_leaves_out_a_unit_is_an_error_at_once(skipped: int) -> None:
    errors = run_world(train, 2, skipped, True, timeout=100, state=False)
    named = [error for error in errors if error.startswith(CollectiveTimeoutError.__name__)]
    other = "blocks.2" if skipped == 1 else "the backward pass"
    assert named, errors
    assert all(f"blocks.{skipped}" in error and other in error and "x + 0 * block(x)" in error for error in named)


@pytest.mark.slow  # waits for a timeout of 8 s; debug mode names the unit in a fast test
def test_a_backward_pass_that_does_not_complete_names_the_unit_that_was_left_out() -> None:
    errors = run_world(train, 2, 1, False, timeout=100, state=False)
    assert any(
        "backward pass did not complete" in error and "rank 1 did not call blocks.1" in error for error in errors
    )
