"""How often the host waits for the device: a step of training, an offloaded forward and checks of inputs should not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import BatchFeature

from accel import Accelerator
from accel.parallel.attention_checks import check_documents
from accel.parallel.context_parallel import _shard_of_buffers
from accel.parallel.late_checks import LateChecks
from accel.parallel.sequence_inputs import SequenceCalls
from accel.self_test.device_checks import check_copies
from accel.utils import DataLoaderConfiguration, set_seed
from accel_bigmodel import cpu_offload
from accel_bigmodel.offload.experts import ExpertPool, ExpertWeights
from accel_bigmodel.tensors import set_module_tensor_to_device
from accel_data import prepare_data_loader
from accel_data.replica_loader import share_among_replicas
from accel_state.context import isolated
from accel_state.errors import ConfigurationError
from accel_state.operations import send_to_device

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


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(32.0))


class OneReplica:
    """The only member of a run with fault tolerance."""

    num_shards, window, seed, is_training = 2, 1, 5, True

    def open_step(self, _: Any) -> tuple[int, int]:
        return 0, 1

    def end_step(self, loader: Any) -> None:
        loader.commit()


LOADERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": {},
    "dispatched": {"dispatch_batches": True},
    "elastic": {"elastic": True, "logical_shards": 2},
    "elastic, dispatched": {"elastic": True, "logical_shards": 2, "dispatch_batches": True},
    "replicas": {"use_seedable_sampler": True, "data_seed": 7},
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("non_blocking", [True, False])
def test_batches_are_copied_without_waiting_if_asked(kind: str, non_blocking: bool) -> None:
    data: Any = Stream() if kind == "stream" else torch.arange(32.0)
    loader = DataLoader(data, batch_size=4, shuffle=kind == "replicas")
    prepared = prepare_data_loader(
        loader, device=DEVICE, put_on_device=True, non_blocking=non_blocking, **LOADERS[kind]
    )
    if kind == "replicas":
        prepared = share_among_replicas(prepared, OneReplica())
    before = _waits()
    batches = list(prepared)
    waits = _waits() - before
    assert sorted(torch.cat(batches).tolist()) == list(range(32))
    assert waits == (0 if non_blocking else len(batches))


@pytest.mark.parametrize("non_blocking", [True, False])
def test_tensors_are_sent_without_waiting_if_asked(non_blocking: bool) -> None:
    layer = nn.Linear(4, 1, bias=False)
    for send in (
        lambda: send_to_device(torch.ones(4), DEVICE, non_blocking=non_blocking),
        lambda: send_to_device(BatchFeature({"x": torch.ones(4)}), DEVICE, non_blocking=non_blocking),
        lambda: set_module_tensor_to_device(layer, "weight", DEVICE, torch.ones(1, 4), non_blocking=non_blocking),
    ):
        before = _waits()
        send()
        assert _waits() - before == (not non_blocking)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_an_offloaded_forward(is_pinned: bool) -> None:
    with torch.no_grad():
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
        weights = {name: value.pin_memory() if is_pinned else value for name, value in model.state_dict().items()}
        model = cpu_offload(model, DEVICE, state_dict=weights)
        x = torch.ones(2, 8, device=DEVICE)
        model(x)
        before = _waits()
        model(x)
        assert _waits() == before


def test_experts_in_host_memory_are_read_without_waiting() -> None:
    weights = {"up": ExpertWeights({"up": torch.arange(32.0).view(8, 4).pin_memory()}, "up")}
    pool = ExpertPool(weights, 2, DEVICE)
    before = _waits()
    pool.take([5, 3])
    assert _waits() == before
    assert pool.tensors["up"][pool.places[5]].tolist() == [20.0, 21.0, 22.0, 23.0]


def test_the_check_of_a_device_does_not_wait_for_its_copies() -> None:
    before = torch.simgpu.counters()
    check_copies(Accelerator())
    now = torch.simgpu.counters()
    assert now["queued"] - before["queued"] == 8  # four to the device, and four back
    assert now["blocking"] == before["blocking"]


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
