"""The checks of ``accel test``. Each runs on all processes and raises where a result is not the one that it must be."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_state.operations import broadcast, broadcast_object_list, gather, gather_object, pad_across_processes, reduce

from .._torch_compat import default_store
from ..accelerator import Accelerator
from ..utils import set_seed

SAMPLES = 45  # not a multiple of any usual number of processes times a batch size
BATCH = 4
STEPS = 6
# Sums in another order differ in the last digits; a rounding to 8 or 11 bits differs in the third.
TOLERANCES = {"no": 1e-5, "fp16": 2e-2, "bf16": 5e-2, "fp8": 2e-1}


class SelfTestError(AssertionError):
    """A result is not the one that it must be."""


def expect_equal(what: str, found: Any, expected: Any) -> None:
    """Compare two values.

    Raises:
        SelfTestError: they differ.
    """
    if found != expected:
        raise SelfTestError(f"{what}: {found!r} instead of {expected!r}")


def check_collectives(accelerator: Accelerator) -> None:
    """Gather, reduce, broadcast, pad, and the same for objects."""
    rank, world, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    ranks = list(range(world))
    mine = torch.tensor([float(rank)], device=device)
    expect_equal("gather", gather({"a": [mine]})["a"][0].tolist(), ranks)
    expect_equal("reduce to the sum", reduce(mine.clone(), "sum").item(), sum(ranks))
    expect_equal("reduce to the mean", reduce(mine.clone(), "mean").item(), sum(ranks) / world)
    expect_equal("broadcast", broadcast(mine.clone(), from_process=world - 1).item(), world - 1)
    ragged = torch.ones(rank + 1, dtype=torch.int64, device=device)
    expect_equal(
        "pad_across_processes",
        pad_across_processes(ragged, pad_index=-1).tolist(),
        [1] * (rank + 1) + [-1] * (world - rank - 1),
    )
    expect_equal("gather_object", gather_object([f"rank {rank}"]), [f"rank {other}" for other in ranks])
    objects: list[Any] = [rank, {"of": rank}]
    expect_equal("broadcast_object_list", broadcast_object_list(objects), [0, {"of": 0}])


def check_process_control(accelerator: Accelerator) -> None:
    """Sharing a list out, and the order of main_process_first."""
    with accelerator.split_between_processes(list(range(11))) as share:
        shares = gather_object(list(share))
    expect_equal("split_between_processes", shares, list(range(11)))
    with accelerator.main_process_first():
        entered = _turn()
    turns = gather_object([entered])
    if min(turns) != turns[0]:
        raise SelfTestError(f"main_process_first let rank {turns.index(min(turns))} in before rank 0")


def _turn() -> float:
    """A number that is larger for whoever asks later."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # Clocks of several machines differ by more than the ranks do, and any clock may be set while this runs.
        return int(default_store().add("accel/self_test/turn", 1))
    return time.time()


def check_loaders(accelerator: Accelerator) -> None:
    """Every sample comes, once for each pass, in whatever way the loader is shared out."""
    for shuffle in (False, True):
        loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH, shuffle=shuffle)
        prepared = accelerator.prepare(loader)
        for epoch in range(2):
            seen = [accelerator.gather_for_metrics(batch).tolist() for (batch,) in prepared]
            expect_equal(
                f"samples of epoch {epoch}, shuffle={shuffle}",
                sorted(itertools.chain.from_iterable(seen)),
                list(range(SAMPLES)),
            )


def check_training(accelerator: Accelerator) -> None:
    """The weights after some steps are those that plain PyTorch has learnt from the same samples in one process."""
    for accumulation in (1, 2):
        expected = [weight.detach() for weight in train_plainly(accelerator.num_processes, accumulation)]
        found = list(train(accelerator, accumulation))
        distance = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
        allowed = TOLERANCES.get(str(accelerator.mixed_precision), max(TOLERANCES.values()))
        if not distance <= allowed:
            raise SelfTestError(
                f"weights after {STEPS} steps with gradient accumulation {accumulation} are off by {distance:.2e} "
                "from those of plain "
                "PyTorch; "
                f"allowed with mixed precision {accelerator.mixed_precision}: {allowed:.0e}"
            )


def make_model() -> nn.Module:
    """The same small network in every process."""
    set_seed(42)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def make_batches(world: int, accumulation: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of all processes together: features of shape (N, 3) and targets of shape (N, 1)."""
    generator = torch.Generator().manual_seed(7)
    size = BATCH * world
    batches = []
    for _ in range(STEPS * accumulation):
        features = torch.randn(size, 3, generator=generator)
        batches.append((features, features.sum(dim=1, keepdim=True).sin()))
    return batches


def train_plainly(world: int, accumulation: int) -> list[torch.Tensor]:
    """Train on the CPU, in this process alone; return the weights."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, (features, targets) in enumerate(make_batches(world, accumulation), 1):
        (nn.functional.mse_loss(model(features), targets) / accumulation).backward()
        if index % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def train(accelerator: Accelerator, accumulation: int) -> Iterator[torch.Tensor]:
    """Train on all processes, each with its share of every batch; return the weights, on the CPU."""
    rank, before = accelerator.process_index, accelerator.gradient_accumulation_steps
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.gradient_accumulation_steps = accumulation
    for features, targets in make_batches(accelerator.num_processes, accumulation):
        mine = slice(rank * BATCH, (rank + 1) * BATCH)
        with accelerator.accumulate(model):
            outputs = model(features[mine].to(accelerator.device))
            accelerator.backward(nn.functional.mse_loss(outputs.float(), targets[mine].to(accelerator.device)))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.gradient_accumulation_steps = before
    state = accelerator.get_state_dict(model)
    weights = [weight.detach().float().cpu() for weight in state.values()] if state else []
    accelerator.free_memory()
    yield from broadcast_object_list([weights])[0]


def check_checkpoint(accelerator: Accelerator) -> None:
    """What was saved comes back, bit for bit."""
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    take_step(accelerator, model, optimizer)
    folder = broadcast_object_list([tempfile.mkdtemp(prefix="accel_test_")])[0]
    saved = digest(accelerator, model)
    accelerator.save_state(f"{folder}/state")
    take_step(accelerator, model, optimizer)
    if digest(accelerator, model) == saved:
        raise SelfTestError("a step of AdamW changed no weight")
    accelerator.load_state(f"{folder}/state")
    expect_equal("weights after load_state", digest(accelerator, model), saved)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        import shutil

        shutil.rmtree(folder)
    accelerator.free_memory()


def take_step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    """One step on ones."""
    accelerator.backward(model(torch.ones(BATCH, 3, device=accelerator.device)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def digest(accelerator: Accelerator, model: nn.Module) -> list[list[float]]:
    """All weights, as numbers."""
    state = accelerator.get_state_dict(model)
    return [weight.detach().float().flatten().tolist() for weight in (state or {}).values()]


CHECKS: Mapping[str, Callable[[Accelerator], None]] = {
    "collectives": check_collectives,
    "process control": check_process_control,
    "loaders": check_loaders,
    "training equal to plain PyTorch": check_training,
    "checkpoint": check_checkpoint,
}
