"""Several trainings in one process, as in a search of parameters: nothing of one is left in the next."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel.contract.strategy import Strategy
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world


def _trained(accelerator: Accelerator) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    data = TensorDataset(torch.arange(32.0).reshape(8, 4) / 32)
    loader = DataLoader(data, batch_size=4 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for (inputs,) in loader:
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return float(accelerator.reduce(loss.detach(), "mean"))


def _plugins(kind: str) -> dict[str, Any]:
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)} if kind == "fsdp2" else {}


def _ended_trainings(kind: str, folder: str) -> list[tuple[int, float]]:
    found = []
    for trial in range(3):
        accelerator = Accelerator(cpu=True, **_plugins(kind))
        found.append((accelerator.num_processes, _trained(accelerator)))
        accelerator.save_state(Path(folder, str(trial)), blocking=False)
        accelerator.end_training()
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_an_accelerator_after_the_end_of_training_connects_the_ranks_again(kind: str, tmp_path) -> None:
    (alone,) = run_world(_ended_trainings, 1, "ddp", str(tmp_path / "alone"))
    for found in run_world(_ended_trainings, 2, kind, str(tmp_path / "two"), timeout=100):
        assert [ranks for ranks, _ in found] == [2, 2, 2]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in alone], rel=1e-6)


class Engine(Strategy):
    """Keeps groups of its own, as DeepSpeed does."""

    uses_engine = True


def _engine_after_the_end() -> str:
    Accelerator(cpu=True).end_training()
    with pytest.raises(ConfigurationError) as caught:
        Accelerator(cpu=True, strategy=Engine())
    return str(caught.value)


def test_an_engine_that_keeps_process_groups_is_refused_then() -> None:
    for message in run_world(_engine_after_the_end, 2):
        assert "Engine keeps process groups" in message and "new processes" in message


def _freed_trainings(folder: str, kind: str) -> list[tuple[int, int, float]]:
    """Descriptors, threads, and memory in KiB after each trial."""
    found, process = [], psutil.Process()
    for trial in range(14):
        accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=Path(folder, str(trial)), **_plugins(kind))
        accelerator.init_trackers("sweep")
        accelerator.log({"loss": _trained(accelerator)}, step=0)
        accelerator.save_state(Path(folder, "state"), blocking=False)
        if kind == "fsdp2":  # whose models are in reference cycles
            accelerator.end_training()
        else:
            accelerator.free_memory()
            gc.collect()
        found.append((process.num_fds(), process.num_threads(), process.memory_info().rss / 1024))
    descriptors, threads = _most_at_first(found)
    deadline = time.monotonic() + 30  # connections, and the system's part of threads, end a little later than Python's
    while (process.num_fds() > descriptors or process.num_threads() > threads) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [*found[:-1], (process.num_fds(), process.num_threads(), found[-1][2])]


def _most_at_first(found: list[tuple[int, int, float]]) -> tuple[int, int]:
    """The most descriptors and threads after trials 1 to 4: one of them may have been counted when all were closed."""
    # Trial 0 has what all use; a tracker is ended when the next one starts.
    return max(descriptors for descriptors, _, _ in found[1:5]), max(threads for _, threads, _ in found[1:5])


@pytest.mark.parametrize(("ranks", "kind"), [(1, "ddp"), (2, "ddp"), (2, "fsdp2")])
def test_trainings_whose_memory_was_freed_leave_nothing(ranks: int, kind: str, tmp_path) -> None:
    """Each Accelerator has a group for its saves, threads of it and one of a tracker, and gives them back."""
    for found in run_world(_freed_trainings, ranks, str(tmp_path), kind, timeout=100):
        descriptors, threads = _most_at_first(found)
        assert found[-1][0] <= descriptors and found[-1][1] <= threads, found
        if kind == "ddp":  # 10 KiB; a group that is kept takes 250. The allocator takes a megabyte now and then
            memory = [kibibytes for _, _, kibibytes in found[5:]]
            assert statistics.median(now - before for before, now in itertools.pairwise(memory)) < 100, found


def _settings_one_after_another() -> list[tuple[str, str, int, dict[str, str | None]]]:
    """Strategy, precision and accumulation of each trial, and the variables that it has changed."""
    sharded: Any = {"cpu_ram_efficient_loading": True, "sync_module_states": True}
    settings: list[dict[str, Any]] = [
        {"mixed_precision": "bf16", "gradient_accumulation_steps": 3},
        {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, **sharded)},
        {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, **sharded)},
        {"dynamo_backend": "eager"},
        {},
    ]
    found = []
    for chosen in settings:
        before = dict(os.environ)
        accelerator = Accelerator(cpu=True, **chosen)
        _trained(accelerator)
        used = type(accelerator.strategy).__name__, str(accelerator.mixed_precision)
        steps = accelerator.gradient_accumulation_steps
        accelerator.end_training()
        changed = {
            name: os.environ.get(name)
            for name in {*before, *os.environ} - {"ACCEL_RANK_OWNER", "TORCHINDUCTOR_CACHE_DIR"}
            if os.environ.get(name) != before.get(name)
        }
        found.append((*used, steps, changed))
    return found


def test_settings_and_variables_of_a_training_do_not_reach_the_next() -> None:
    for found in run_world(_settings_one_after_another, 2):
        assert found == [
            ("DDPStrategy", "bf16", 3, {}),
            ("FSDP1Strategy", "no", 1, {}),
            ("FSDP2Strategy", "no", 1, {}),
            ("DDPStrategy", "no", 1, {}),
            ("DDPStrategy", "no", 1, {}),
        ]


def test_garbage_is_collected_only_for_an_accelerator_that_needs_another_state() -> None:
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            collections.append(1)

    def leave_in_a_cycle(**settings: Any) -> None:
        accelerator = Accelerator(cpu=True, **settings)
        accelerator.itself = accelerator  # type: ignore[attr-defined]

    Accelerator(cpu=True).end_training()  # imports, which collect
    gc.callbacks.append(note)
    try:
        leave_in_a_cycle()
        first = Accelerator(cpu=True)
        second = Accelerator(cpu=True)
        second.end_training()
        first.end_training()
        assert not collections
        leave_in_a_cycle(mixed_precision="bf16")
        assert Accelerator(cpu=True).mixed_precision == "no" and collections
        leave_in_a_cycle(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        assert Accelerator(cpu=True).state.fsdp_plugin is None
        leave_in_a_cycle(dynamo_backend="eager")
        assert Accelerator(cpu=True).state.dynamo_plugin.backend == "NO"
    finally:
        gc.callbacks.remove(note)


def test_the_state_lasts_as_long_as_an_accelerator_that_uses_it() -> None:
    first = Accelerator(cpu=True, mixed_precision="bf16")
    second = Accelerator(cpu=True)
    del first
    with pytest.raises(ConfigurationError, match="this process already has an Accelerator"):
        Accelerator(cpu=True, mixed_precision="no")
    assert second.mixed_precision == "bf16"
    second.end_training()
    assert Accelerator(cpu=True).mixed_precision == "no"
