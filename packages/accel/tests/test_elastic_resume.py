"""A state of N processes continued on M: nothing of the epoch is lost or repeated, and what is computed is what it
would have been.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from sample_streams import Case, drawn, plain_loader
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, CheckpointError, DataLoaderConfiguration
from accel.checkpointer.accumulation_state import check, combine
from accel.contract.accumulated_gradients import AccumulatedGradients
from accel_state import AcceleratorState
from accel_state.random import set_seed
from accel_state.testing import run_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # four worlds, each with fifty loaders
WORLDS = (1, 2, 4)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["sequential", "shuffle", "seedable", "random-batches", "stream"]))
    length, batch_size, stop = draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    # What each rank reads for itself out of a stream, torchdata counts in steps, which mean something else on other
    # ranks.
    stateful = draw(st.booleans()) and kind != "stream"
    dispatch, even = draw(st.booleans()), draw(st.booleans())
    return Case(kind, length, batch_size, stop, dispatch=dispatch, even=even, stateful=stateful)


def run(case: Case) -> tuple[Accelerator, Any]:
    AcceleratorState._reset_state()
    set_seed(4)
    config = DataLoaderConfiguration(
        dispatch_batches=case.dispatch,
        even_batches=case.even,
        use_seedable_sampler=case.kind == "seedable",
        use_stateful_dataloader=case.stateful,
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    return accelerator, accelerator.prepare(plain_loader(case))


def real(loader: Any, batch: torch.Tensor) -> list[int]:
    return batch[: loader.real_samples, 0].long().tolist()


def save_all(found: Sequence[Case], folder: str) -> list[list[int]]:
    """What this rank is handed in each case before the state is saved."""
    handed_out = []
    for number, case in enumerate(found):
        accelerator, loader = run(case)
        seen: list[int] = []
        for steps, batch in enumerate(loader, start=1):
            seen += real(loader, batch)
            if steps == case.stop:
                accelerator.save_state(Path(folder) / str(number))
                break
        else:
            accelerator.save_state(Path(folder) / str(number))
        handed_out.append(seen)
    return handed_out


def load_all(found: Sequence[Case], folder: str) -> list[tuple[list[int], list[int]]]:
    """What this rank is handed in each case afterwards: the rest of the epoch, and the epoch after it."""
    result = []
    for number, case in enumerate(found):
        accelerator, loader = run(case)
        accelerator.load_state(Path(folder) / str(number))
        parts = tuple([index for batch in loader for index in real(loader, batch)] for _ in range(2))
        assert loader.iteration >= 2
        result.append(parts)
    return result


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def training(steps: int = 1, lr: float = 0.1) -> tuple[Any, ...]:
    AcceleratorState._reset_state()
    set_seed(3)
    # A scheduler that steps once for every process would be at another place on another number of them.
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, step_scheduler_with_optimizer=False)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    data = torch.utils.data.TensorDataset(
        torch.randn(64, 3, dtype=torch.float64), torch.randn(64, 1, dtype=torch.float64)
    )
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    batch_size = 8 // accelerator.num_processes
    objects = accelerator.prepare(model, optimizer, scheduler, DataLoader(data, batch_size=batch_size, shuffle=True))
    return (accelerator, *objects, counter)


def train(
    parts: tuple[Any, ...], stop: int | None = None, folder: str = "", by_items: bool = False
) -> list[torch.Tensor]:
    accelerator, model, optimizer, scheduler, loader, counter = parts
    for steps, (x, y) in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y, reduction="sum" if by_items else "mean")
            accelerator.backward(loss, **({"num_items": len(x), "reduction": "sum"} if by_items else {}))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        counter.count += 1
        if steps == stop:
            accelerator.save_state(folder)
    return [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]


def save_training(folder: str, accumulate: int, stop: int, by_items: bool) -> list[torch.Tensor]:
    return train(training(accumulate), stop, folder, by_items)


def load_training(folder: str, accumulate: int, by_items: bool) -> tuple[list[torch.Tensor], int, list[float]]:
    parts = training(accumulate, lr=7.0)
    parts[0].load_state(folder)
    # Drawn before anything else draws: what each rank's generators are.
    drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]
    return train(parts, by_items=by_items), parts[-1].count, drawn


def save_everything(found: Sequence[Case], folder: str) -> tuple[list[list[int]], list[list[torch.Tensor]]]:
    return save_all(found, folder), [
        save_training(f"{folder}/training{by_items}", 3, 4, by_items) for by_items in (False, True)
    ]


def load_everything(found: Sequence[Case], folder: str) -> tuple[list[tuple[list[int], list[int]]], list[Any]]:
    return load_all(found, folder), [
        load_training(f"{folder}/training{by_items}", 3, by_items) for by_items in (False, True)
    ]


# One world to save in and three to load in: starting them takes longer than what they do.
@pytest.mark.parametrize("before", WORLDS)
def test_on_another_number_of_processes(tmp_path: Path, before: int) -> None:
    # Ranks of unequal steps save at different ones, which save_state, a collective, cannot have.
    found = [case for case in drawn(cases(), 50) if case.even or before == 1 or case.dispatch]
    saved = run_world(save_everything, before, found, str(tmp_path), timeout=500)
    assert len(list(tmp_path.glob("trainingTrue/gradients_*.bin"))) == before
    for after in WORLDS:
        loaded = run_world(load_everything, after, found, str(tmp_path), timeout=500)
        check_streams(found, [rank[0] for rank in saved], [rank[0] for rank in loaded], f"from {before} to {after}")
        for by_items in (0, 1):
            check_training(saved[0][1][by_items], [rank[1][by_items] for rank in loaded], before, after)


def check_streams(found: Sequence[Case], saved: list[Any], resumed: list[Any], where: str) -> None:
    """Nothing is lost and nothing repeated."""
    for number, case in enumerate(found):
        seen = [index for rank in saved for index in rank[number]]
        rest = [index for rank in resumed for index in rank[number][0]]
        following = [index for rank in resumed for index in rank[number][1]]
        whole = list(range(case.length))
        ended = sorted(seen) == whole
        assert sorted(seen + rest) == whole or (ended and sorted(rest) == whole), (case, where)
        assert sorted(following) == whole, (case, where)


def check_training(expected: list[torch.Tensor], resumed: list[Any], before: int, after: int) -> None:
    """Saved in the middle of an accumulation window, whose gradients are part of the state."""
    for weights, count, _ in resumed:
        assert count == 8
        # Sums over more than two ranks depend on their order, and DDP groups its messages anew after its first step.
        torch.testing.assert_close(weights, expected, rtol=0, atol=0 if before == after <= 2 else 1e-12)
    # Ranks that were there before had been seeded alike; each new one has numbers of its own.
    assert len({tuple(draws) for *_, draws in resumed}) == 1 + max(0, after - before)


def test_the_seed_of_a_new_rank_is_the_documented_one(tmp_path: Path) -> None:
    train(training(), 2, str(tmp_path / "state"))
    saved = torch.load(tmp_path / "state" / "random_states_0.pkl", weights_only=True)["torch_manual_seed"]
    digest = hashlib.sha256(saved.numpy().tobytes() + (1).to_bytes(8, "little")).digest()
    drawn = run_world(load_training, 2, str(tmp_path / "state"), 1, False, timeout=500)[1][2]
    seed = int.from_bytes(digest[:8], "little") % 2**63
    generator, numpy = torch.Generator().manual_seed(seed), np.random.RandomState(seed % 2**32)
    assert drawn == [float(torch.rand((), generator=generator)), float(numpy.rand()), random.Random(seed).random()]


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 7])
def test_a_window_is_continued_bitwise_wherever_it_was_left(tmp_path: Path, stop: int) -> None:
    expected = train(training(3), stop, str(tmp_path / "state"))
    resumed, count, _ = load_training(str(tmp_path / "state"), 3, False)
    assert (tmp_path / "state" / "gradients_0.bin").exists() == (stop % 3 != 0)
    assert count == 8 and all(torch.equal(*pair) for pair in zip(resumed, expected, strict=True))


def test_loading_forgets_the_window_that_is_open_now(tmp_path: Path) -> None:
    parts = training(3)
    accelerator, model, *_ = parts
    expected = train(parts, 3, str(tmp_path / "state"))
    parts = training(3)
    accelerator, model, *_ = parts
    x = torch.randn(4, 3, dtype=torch.float64)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
    assert next(model.parameters()).grad is not None
    accelerator.load_state(tmp_path / "state")
    assert all(p.grad is None for p in model.parameters()) and accelerator.sync_gradients
    assert all(torch.equal(*pair) for pair in zip(train(parts), expected, strict=True))


def test_windows_that_do_not_fit_are_refused() -> None:
    model = nn.Linear(2, 1)
    window = {"loader": 0, "models": [0], "divisor": 3, "position": 1, "by_items": None, "items": 0, "normaliser": None}
    fitting = {"windows": [window], "gradients": {0: {"weight": torch.zeros(1, 2)}}}
    check(fitting, "here", ["loader"], [model], AccumulatedGradients())
    for wrong, message in [
        ({**fitting, "windows": [{**window, "loader": 1}]}, "a loader or a model that was not prepared"),
        ({**fitting, "windows": [{**window, "models": [1]}]}, "a loader or a model that was not prepared"),
        ({**fitting, "gradients": {0: {"weight": torch.zeros(2, 2)}}}, "gradients of weight, which do not fit model 0"),
        ({**fitting, "gradients": {0: {"other": torch.zeros(1)}}}, "gradients of other, which do not fit model 0"),
        ({"windows": 3}, "does not hold the gradients"),
        ([], "does not hold the gradients"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            check(wrong, "here", ["loader"], [model], AccumulatedGradients())


@pytest.mark.parametrize(("before", "after"), [*product((2, 4), WORLDS)])
def test_shares_of_windows_add_up(before: int, after: int) -> None:
    for by_items in (False, True):
        windows = [{"models": [0], "by_items": by_items, "items": rank + 1} for rank in range(before)]
        saved = [
            {"windows": [w], "gradients": {0: {"p": torch.full((2,), float(rank))}}} for rank, w in enumerate(windows)
        ]
        share = combine(saved, after)
        total = sum(range(before))
        expected = total / after if by_items else total / before
        assert share["gradients"][0]["p"].tolist() == [expected] * 2
        assert float(share["windows"][0]["items"]) == ((before + 1) * before / 2 / after if by_items else 1)
