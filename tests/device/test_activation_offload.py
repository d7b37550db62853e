"""Inputs of checkpointed blocks that are copied to the host and back while blocks compute, as late as CUDA allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel.fsdp.activation_checkpointing import checkpoint_units
from accel.kwargs.activation_checkpointing import ActivationCheckpointingKwargs
from accel_state.errors import ConfigurationError

DEVICE = torch.device("simgpu", 0)
WIDTH, BLOCKS = 64, 5


class Block(nn.Module):
    """It may change its input in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first, self.second, self.in_place = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.second(torch.tanh(self.first(x)))
        return x.add_(added) if self.in_place else x + added


def gradients(model: nn.Sequential, device: torch.device, changed: bool = False) -> list[torch.Tensor]:
    """Of three steps; ``changed`` writes to the input of the second block after the block was computed."""
    model.to(device)
    found: list[torch.Tensor] = []
    for number in range(3):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)
        inputs = model[0](x)
        x = model[1](inputs)
        if changed:
            with torch.no_grad():
                inputs.data.zero_()
        for block in model[2:]:
            x = block(x)
        x.square().mean().backward()
        found += [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
    return found


def build(in_place: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(in_place) for _ in range(BLOCKS)))


def offloaded(model: nn.Sequential, every: int = 1) -> nn.Sequential:
    checkpoint_units(model, list(model)[::-1], ActivationCheckpointingKwargs(offload=True, every=every))
    return model


@pytest.mark.parametrize("every", [1, 2])
def test_gradients_are_those_without_offloading(every: int) -> None:
    expected = gradients(build(), torch.device("cpu"))
    before = torch.simgpu.counters()["queued"]
    torch.testing.assert_close(gradients(offloaded(build(), every), DEVICE), expected)
    assert torch.simgpu.counters()["queued"] - before >= 2 * 3 * len(range(0, BLOCKS, every)), "copies could be late"


def test_inputs_may_be_overwritten_after_their_block() -> None:
    expected = gradients(build(), torch.device("cpu"))
    torch.testing.assert_close(gradients(offloaded(build()), DEVICE, changed=True), expected)


@pytest.mark.expects_races
def test_blocks_that_change_their_input_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="a Block changes its input in place"):
        gradients(offloaded(build(in_place=True)), DEVICE)


@pytest.mark.parametrize("missing", ["Event", "Stream"])
def test_copies_wait_on_a_device_without_all_parts_of_streams(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accel.fsdp import activation_offload

    expected = gradients(build(), torch.device("cpu"))
    model: Any = offloaded(build())
    monkeypatch.delattr(torch.simgpu, missing)
    activation_offload._copies_of.cache_clear()
    try:
        torch.testing.assert_close(gradients(model, DEVICE), expected)
    finally:
        activation_offload._copies_of.cache_clear()


def test_the_memory_of_inputs_is_free_between_forward_and_backward() -> None:
    held = []
    for model in (build(), offloaded(build())):
        model.to(DEVICE)
        checkpoint_units(model, list(model)[::-1], ActivationCheckpointingKwargs())  # where there is none yet
        x = torch.randn(4096, WIDTH, device=DEVICE)
        before = torch.simgpu.memory_allocated(0)
        output = model(x)
        torch.simgpu.synchronize(0)
        held.append(torch.simgpu.memory_allocated(0) - before)
        output.square().mean().backward()
        del output, x
    # The output, and with it the four inputs between the blocks.
    each = 4096 * WIDTH * 4
    assert held[1] < 2 * each < 4 * each < held[0]
