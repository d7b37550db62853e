"""The checks of ``accel test``; each runs on all processes and raises SelfTestError if a result is wrong."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_state.operations import broadcast, broadcast_object_list, gather, gather_object, pad_across_processes, reduce

from .._torch_compat import default_store
from ..accelerator import Accelerator
from ..utils import set_seed

SAMPLES = 45  # not divisible by any common number of processes times the batch size
BATCH = 4
STEPS = 6
# The order of a sum changes the last digits; rounding to 8 or 11 bits changes the third digit.
TOLERANCES = {"no": 1e-5, "fp16": 2e-2, "bf16": 5e-2, "fp8": 2e-1}


class SelfTestError(AssertionError):
    """A check has found a wrong result."""


def expect_equal(what: str, actual: Any, expected: Any) -> None:
    """Raise SelfTestError if two values differ."""
    if actual != expected:
        raise SelfTestError(f"{what}: got {actual!r}, expected {expected!r}")


def check_collectives(accelerator: Accelerator) -> None:
    """Tensor and object collectives."""
    rank, world, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    ranks = list(range(world))
    value = torch.tensor([float(rank)], device=device)
    expect_equal("gather", gather({"a": [value]})["a"][0].tolist(), ranks)
    expect_equal("reduce with sum", reduce(value.clone(), "sum").item(), sum(ranks))
    expect_equal("reduce with mean", reduce(value.clone(), "mean").item(), sum(ranks) / world)
    expect_equal("broadcast", broadcast(value.clone(), from_process=world - 1).item(), world - 1)
    padded = pad_across_processes(torch.ones(rank + 1, dtype=torch.int64, device=device), pad_index=-1)
    expect_equal("pad_across_processes", padded.tolist(), [1] * (rank + 1) + [-1] * (world - rank - 1))
    expect_equal("gather_object", gather_object([f"rank {rank}"]), [f"rank {other}" for other in ranks])
    objects: list[Any] = [rank, {"of": rank}]
    expect_equal("broadcast_object_list", broadcast_object_list(objects), [0, {"of": 0}])


def check_process_control(accelerator: Accelerator) -> None:
    """split_between_processes, and the order of main_process_first."""
    with accelerator.split_between_processes(list(range(11))) as part:
        parts = gather_object(list(part))
    expect_equal("split_between_processes", parts, list(range(11)))
    with accelerator.main_process_first():
        if dist.is_available() and dist.is_initialized():
            # A counter rather than the time: clocks of several nodes may differ, and may be changed while this runs.
            entered = float(default_store().add("accel/self_test/turn", 1))
        else:
            entered = time.time()
    turns = gather_object([entered])
    if min(turns) != turns[0]:
        raise SelfTestError(f"main_process_first let rank {turns.index(min(turns))} enter before rank 0")


def check_loaders(accelerator: Accelerator) -> None:
    """Check that each epoch of a prepared loader yields every sample once."""
    for shuffle in (False, True):
        loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH, shuffle=shuffle)
        prepared = accelerator.prepare(loader)
        for epoch in range(2):
            batches = [accelerator.gather_for_metrics(batch).tolist() for (batch,) in prepared]
            samples = sorted(itertools.chain.from_iterable(batches))
            expect_equal(f"samples of epoch {epoch}, shuffle={shuffle}", samples, list(range(SAMPLES)))
    accelerator.free_memory()


def check_training(accelerator: Accelerator) -> None:
    """After some steps, the weights equal those of plain PyTorch with the same samples in one process."""
    precision = str(accelerator.mixed_precision)
    tolerance = TOLERANCES.get(precision, max(TOLERANCES.values()))
    for accumulation in (1, 2):
        weights, world = train_prepared(accelerator, accumulation)
        expected = train_plain(make_data(accelerator, accumulation), world, accumulation)
        pairs = zip(weights, expected, strict=True)
        difference = max(float((weight - plain.detach()).abs().max()) for weight, plain in pairs)
        if not difference <= tolerance:
            raise SelfTestError(
                f"after {STEPS} steps with gradient accumulation {accumulation}, the weights differ by "
                f"{difference:.2e} from those of plain PyTorch; allowed with mixed precision {precision}: "
                f"{tolerance:.0e}"
            )


def make_model() -> nn.Module:
    """Return the same small network on every process."""
    set_seed(42)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def make_data(accelerator: Accelerator, accumulation: int) -> TensorDataset:
    """Features of shape (N, 3) and targets of shape (N, 1), for STEPS steps of all processes."""
    count = BATCH * accelerator.num_processes * STEPS * accumulation
    features = torch.randn(count, 3, generator=torch.Generator().manual_seed(7))
    return TensorDataset(features, features.sum(dim=1, keepdim=True).sin())


def train_plain(data: TensorDataset, world: int, accumulation: int) -> list[torch.Tensor]:
    """Train in this process on the CPU, with the batches of ``world`` processes as one; returns the weights."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, (features, targets) in enumerate(DataLoader(data, batch_size=BATCH * world), 1):
        (nn.functional.mse_loss(model(features), targets) / accumulation).backward()
        if index % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def train_prepared(accelerator: Accelerator, accumulation: int) -> tuple[list[torch.Tensor], int]:
    """Train on all processes; returns the weights on the CPU, and over how many processes the data was split."""
    steps_before = accelerator.gradient_accumulation_steps
    model, data = make_model(), make_data(accelerator, accumulation)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=BATCH)
    )
    accelerator.gradient_accumulation_steps = accumulation
    for features, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(features).float(), targets))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.gradient_accumulation_steps = steps_before
    state = accelerator.get_state_dict(model) or {}
    weights = [weight.detach().float().cpu() for weight in state.values()]
    world = len(data) // (BATCH * len(loader))
    accelerator.free_memory()
    result: list[torch.Tensor] = broadcast_object_list([weights])[0]
    return result, world


def check_checkpoint(accelerator: Accelerator, blocking: bool = True) -> None:
    """load_state restores the weights of save_state bit for bit, also if they change while it writes."""
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    take_step(accelerator, model, optimizer)
    directory = broadcast_object_list([tempfile.mkdtemp(prefix="accel_test_")])[0]
    saved = weight_values(accelerator, model)
    accelerator.save_state(f"{directory}/state", blocking=blocking)
    take_step(accelerator, model, optimizer)
    accelerator.wait_for_save()
    if weight_values(accelerator, model) == saved:
        raise SelfTestError("a step of AdamW did not change the weights")
    accelerator.load_state(f"{directory}/state")
    expect_equal("weights after load_state", weight_values(accelerator, model), saved)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(directory)
    accelerator.free_memory()


def take_step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    """Take one optimizer step on constant inputs, which differ between processes as those of a loader do."""
    inputs = torch.full((BATCH, 3), 1.0 + accelerator.process_index, device=accelerator.device)
    accelerator.backward(model(inputs).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def weight_values(accelerator: Accelerator, model: nn.Module) -> list[list[float]]:
    """Return all weights as Python numbers."""
    state = accelerator.get_state_dict(model) or {}
    return [weight.detach().float().flatten().tolist() for weight in state.values()]


CHECKS: Mapping[str, Callable[[Accelerator], None]] = {
    "collectives": check_collectives,
    "process control": check_process_control,
    "loaders": check_loaders,
    "training equal to plain PyTorch": check_training,
    "checkpoint": check_checkpoint,
}
