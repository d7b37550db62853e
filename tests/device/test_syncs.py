"""How often the host waits for the device: a step of training, an offloaded forward and checks of inputs should not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.parallel.attention_checks import check_documents
from accel.parallel.context_parallel import _shard_of_buffers
from accel.parallel.late_checks import LateChecks
from accel.parallel.sequence_inputs import SequenceCalls
from accel.utils import DataLoaderConfiguration, set_seed
from accel_bigmodel import cpu_offload
from accel_state.context import isolated
from accel_state.errors import ConfigurationError

DEVICE = torch.device("simgpu", 0)
LENGTH = 8


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    with isolated():
        yield


def _waits() -> int:
    return torch.simgpu.counters()["blocking"]


@pytest.mark.parametrize(("precision", "expected"), [("no", 0), ("bf16", 0), ("fp16", 1)])
@pytest.mark.parametrize("window", [1, 2])
def test_a_step_of_training(precision: str, expected: int, window: int) -> None:
    """With fp16 the loss scale depends on whether a gradient overflowed, which the optimizer asks once a step."""
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=window,
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    set_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), DataLoader(data, batch_size=4, pin_memory=True)
    )
    waits, before, losses = [], None, []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            now = _waits()
            waits.append(now - (now if before is None else before))
            before = now
    # The first steps make states and look at the arguments.
    assert waits[2:] == [expected] * len(waits[2:]) and len(waits) >= 4, waits
    assert torch.stack(losses).isfinite().all()


def test_an_offloaded_forward() -> None:
    with torch.no_grad():
        model = cpu_offload(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), DEVICE)
        x = torch.ones(2, 8, device=DEVICE)
        model(x)
        before = _waits()
        model(x)
        assert _waits() == before


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, attention_mask: Any = None) -> torch.Tensor:
        return self.embed(input_ids) * position_ids[..., None]


class Bare(nn.Module):
    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return x * places


def _split(model: nn.Module, *whole: torch.Tensor) -> list[torch.Tensor]:
    """The first half of each tensor, of which the model's calls know the whole."""
    parts = [tensor[..., : LENGTH // 2].clone() for tensor in whole]
    places = torch.arange(LENGTH // 2, device=DEVICE)
    shard = _shard_of_buffers(parts, whole, [tensor.ndim - 1 for tensor in whole], places, 2)
    SequenceCalls(model, "sdpa", lambda _, __: shard)
    return parts


def test_positions_and_masks_of_split_sequences_are_checked_without_waiting() -> None:
    tokens = torch.arange(LENGTH, device=DEVICE).expand(2, -1).clone()
    ones, packed = torch.ones_like(tokens), tokens % (LENGTH // 2)
    hidden = ones.clone()
    hidden[0, 0] = 0
    for positions, mask, refused in ((tokens, ones, None), (packed, ones, "position_ids"), (tokens, hidden, "mask")):
        model = Tokens().to(DEVICE)
        parts = _split(model, tokens.clone(), positions.clone(), mask.clone())
        call = dict(zip(("input_ids", "position_ids", "attention_mask"), parts, strict=True))
        before = _waits()
        if refused is None:
            model(**call)
            assert _waits() == before
        else:  # by the call itself: no result is returned
            with pytest.raises(ConfigurationError, match=refused):
                model(**call)
    assert torch.simgpu.races() == []


def test_buffers_that_are_no_positions_are_refused_without_waiting() -> None:
    x, places = torch.ones(2, LENGTH, dtype=torch.int64, device=DEVICE), torch.arange(LENGTH, device=DEVICE)
    model = Bare()
    parts = _split(model, x, places)
    model(*parts)
    before = _waits()
    model(*parts)
    assert _waits() == before
    model = Bare()
    parts = _split(model, x, x[0].clone())
    with pytest.raises(ConfigurationError, match="Bare.forward takes no input_ids"):
        model(*parts)


def test_documents_in_a_pipeline_are_refused_without_waiting() -> None:
    checks, positions = LateChecks(), torch.arange(LENGTH, device=DEVICE)[None]
    before = _waits()
    check_documents({"position_ids": positions}, "here", checks)
    checks.settle()
    assert _waits() == before
    check_documents({"position_ids": positions % 3}, "here", checks)
    with pytest.raises(ConfigurationError, match="position_ids marks"):
        checks.settle()
    checks.settle()  # each error once


def test_late_checks_are_read_behind_the_condition_and_before_other_work() -> None:
    checks = LateChecks()
    host = torch.full((1 << 12,), 3.0).pin_memory()
    x = host.to(DEVICE, non_blocking=True)  # a condition may itself depend on a copy that is late
    checks.refuse_if((x != 3).any(), lambda: ConfigurationError("was read too early"))
    y = torch.zeros(1 << 12).pin_memory().to(DEVICE, non_blocking=True)
    checks.settle()
    assert torch.simgpu.queued_copies() == 1, "the copy behind the condition was waited for"
    assert (x + y).unique().tolist() == [3.0]
    assert torch.simgpu.races() == []
