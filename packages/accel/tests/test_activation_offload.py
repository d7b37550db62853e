"""Checkpointed blocks, and their inputs in host memory, in one process and with DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.utils import ActivationCheckpointingKwargs, TorchDynamoPlugin
from accel_launch.config.read import load_settings
from accel_state import context
from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(300)
STEPS, BATCH, WIDTH, BLOCKS = 4, 8, 16, 4
SETTINGS: list[dict[str, Any]] = [{"offload": True}, {"offload": True, "every": 2}, {}, {"mode": "selective"}]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.computed = 0

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.computed += 1
        return x + scale * self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.full((WIDTH,), 0.5, device=x.device)
        for block in self.blocks:
            x = block(x, scale)
        return x


def train(accelerator: Accelerator | None) -> tuple[list[float], list[str], int]:
    """Losses, the names of the weights, and how often the first block was computed."""
    net: Any = Net()
    model, optimizer = net, torch.optim.AdamW(net.parameters(), lr=1e-2)
    first = net.blocks[0]
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for number in range(STEPS):
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        if accelerator is not None:
            batch = batch.chunk(accelerator.num_processes)[accelerator.process_index].to(accelerator.device)
        loss = model(batch).square().mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss if accelerator is None else accelerator.reduce(loss.detach(), "mean")).item())
    names = list(net.state_dict() if accelerator is None else accelerator.get_state_dict(model))
    return losses, names, first.computed


def train_all() -> list[Any]:
    found = []
    for settings in SETTINGS:
        with context.isolated():
            found.append(train(Accelerator(kwargs_handlers=[ActivationCheckpointingKwargs(["Block"], **settings)])))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpointed_blocks_train_as_plain_ones(ranks: int) -> None:
    losses, names, computed = train(None)
    assert computed == STEPS
    for rank in run_world(train_all, ranks, timeout=200):
        for found in rank:
            torch.testing.assert_close(found[0], losses, rtol=1e-5, atol=0)
            assert found[1:] == (names, 2 * STEPS)


LAUNCHED = {"activation_checkpointing": "true", "activation_checkpointing_blocks": "Block"}


def train_launched() -> list[Any]:
    """With the launcher's options, which a handler in the script replaces."""
    found = []
    settings = load_settings({**LAUNCHED, "activation_checkpointing_offload": "true"}, environ={})
    with patch_environment(**settings.environment()):
        for handlers in ([], [ActivationCheckpointingKwargs(["Block"], mode="selective")]):
            with context.isolated():
                accelerator = Accelerator(kwargs_handlers=handlers)
                found.append((train(accelerator), accelerator.handlers.all(ActivationCheckpointingKwargs)))
        with context.isolated(), pytest.raises(ConfigurationError, match="--activation_checkpointing.*FSDP2Strategy"):
            Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    with patch_environment(ACCELERATE_ACTIVATION_CHECKPOINTING="true"), context.isolated():
        accelerator = Accelerator()
        with pytest.raises(ConfigurationError, match=r"Set block_names .*\(--activation_checkpointing_blocks\)"):
            accelerator.prepare(Net())
    return found


def test_the_launcher_s_options() -> None:
    losses, names, _ = train(None)
    for rank in run_world(train_launched, 2, timeout=200):
        for number, (found, (settings,)) in enumerate(rank):
            torch.testing.assert_close(found[0], losses, rtol=1e-5, atol=0)
            assert found[1:] == (names, 2 * STEPS)
            assert (settings.offload, settings.mode) == ((True, "full"), (False, "selective"))[number]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({**LAUNCHED, "use_fsdp": "true"}, r"one process and for DDP.*use_fsdp.*Give --fsdp_activation_checkpointing"),
        ({**LAUNCHED, "use_deepspeed": "true"}, "gradient_checkpointing_enable"),
        ({**LAUNCHED, "tpu": "true"}, "Leave one of them out"),
        ({"activation_checkpointing_offload": "true"}, "has no effect without --activation_checkpointing"),
        (
            {**LAUNCHED, "activation_checkpointing_mode": "selective", "activation_checkpointing_offload": "true"},
            "Leave one of them out",
        ),
    ],
)
def test_the_launcher_refuses_options_without_effect(given: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        load_settings(given, environ={})


def sharded() -> None:
    handlers = [ActivationCheckpointingKwargs(["Block"])]
    with pytest.raises(ConfigurationError, match=r"uses FSDP2Strategy\. Set activation_checkpointing=True"):
        Accelerator(kwargs_handlers=handlers, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


def test_wrong_settings_are_refused() -> None:
    for settings, named in (
        ({"mode": "some"}, "'some' is not one of full, selective|'some'.* full, selective"),
        ({"every": 0}, "every=0"),
        ({"mode": "selective", "offload": True}, "Leave one of them out"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            ActivationCheckpointingKwargs(**settings)
    offload = ActivationCheckpointingKwargs(["Block"], offload=True)
    with context.isolated(), pytest.raises(ConfigurationError, match="compiled models"):
        Accelerator(kwargs_handlers=[offload], dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    with context.isolated(), pytest.raises(ConfigurationError, match="has no module of class Blok"):
        Accelerator(kwargs_handlers=[ActivationCheckpointingKwargs(["Blok"])]).prepare(Net())
    run_world(sharded, 2, timeout=100)
