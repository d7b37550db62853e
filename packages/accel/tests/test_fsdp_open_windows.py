"""A state saved within an accumulation window of a sharded model resumes to the same weights."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from accel import Accelerator, FullyShardedDataParallelPlugin, GradientAccumulationPlugin, ParallelismConfig
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(600)

WIDTH, WINDOW, BATCHES, CUT = 9, 4, 8, 6
BLOCKS = {"auto_wrap_policy": "transformer_based_wrap"}
KINDS: dict[str, dict[str, Any]] = {
    "v2": {"fsdp": {**BLOCKS, "fsdp_version": 2}},
    "v2 each batch": {"fsdp": {**BLOCKS, "fsdp_version": 2}, "each": True},
    "ddp": {},
}
MESHES: dict[str, dict[str, Any]] = {
    "shard2 tp2": {"mesh": {"dp_shard_size": 2, "tp_size": 2}, "fsdp": {**BLOCKS, "fsdp_version": 2}},
    "copies2 shard2": {"mesh": {"dp_replicate_size": 2, "dp_shard_size": 2}, "fsdp": {**BLOCKS, "fsdp_version": 2}},
    "ddp": {},
}


class Block(nn.Module):
    """With a frozen parameter and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.fc1.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.tanh(self.fc1(self.norm(x))))


class Net(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [(torch.randn(5, generator=draw), torch.randint(3, (), generator=draw)) for _ in range(BATCHES * 8)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        (parameter for parameter in model.parameters() if parameter.requires_grad), lr=1e-2, eps=1e-6, weight_decay=0
    )


def plain() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = optimizer_of(model)
    for number, (x, y) in enumerate(DataLoader(data(), batch_size=8), start=1):
        (functional.cross_entropy(model(x), y) / WINDOW).backward()
        if number % WINDOW:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


class Run:
    def __init__(self, kind: dict[str, Any], by_items: bool, seed: int) -> None:
        plugin = GradientAccumulationPlugin(num_steps=WINDOW, sync_each_batch=kind.get("each", False))
        self.accelerator = Accelerator(
            gradient_accumulation_plugin=plugin,
            fsdp_plugin=FullyShardedDataParallelPlugin(**kind["fsdp"]) if "fsdp" in kind else None,
            parallelism_config=ParallelismConfig(**kind["mesh"]) if "mesh" in kind else None,
            kwargs_handlers=handlers() if not kind else [],
        )
        self.by_items = by_items
        torch.manual_seed(seed)
        model = Net()
        ranks = self.accelerator.strategy.data_collectives.world_size
        loader = DataLoader(data(), batch_size=8 // ranks)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer_of(model), loader)

    def train(self, batches: int | None = None, save_to: str | None = None) -> None:
        """Train on so many batches (default: all), and save the state after the last one."""
        accelerator = self.accelerator
        for number, (x, y) in enumerate(itertools.islice(self.loader, batches), start=1):
            with accelerator.accumulate(self.model):
                loss = functional.cross_entropy(self.model(x), y)
                if self.by_items:
                    accelerator.backward(loss, num_items=len(y))
                else:
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if number == batches and save_to is not None:
                accelerator.save_state(save_to)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def handlers() -> list[Any]:
    from accel import DistributedDataParallelKwargs

    return [DistributedDataParallelKwargs(find_unused_parameters=True)]


def save(kinds: dict[str, dict[str, Any]], folder: Path) -> None:
    for name, kind in kinds.items():
        for by_items in (False, True):
            run = Run(kind, by_items, 0)
            run.train(CUT, str(folder / f"{name} {by_items}"))
            run.accelerator.free_memory()


def go_on(
    kinds: dict[str, dict[str, Any]], pairs: list[tuple[str, str]], folder: Path
) -> list[dict[str, torch.Tensor]]:
    found = []
    for number, (before, after) in enumerate(pairs):
        by_items = number % 2 == 1
        run = Run(kinds[after], by_items, 1)
        # What a window holds that is open here is forgotten.
        run.train(1 if number % 3 == 0 else 0)
        run.accelerator.load_state(str(folder / f"{before} {by_items}"))
        run.train()
        found.append(run.weights())
        run.accelerator.free_memory()
    return found


def check(found: list[dict[str, torch.Tensor]], pairs: list[tuple[str, str]]) -> None:
    for pair, weights in zip(pairs, found, strict=True):
        expected = plain()
        assert set(weights) == set(expected), pair
        for name, value in expected.items():
            torch.testing.assert_close(
                weights[name],
                value,
                rtol=0,
                atol=1e-5,
                msg=lambda text, name=name, pair=pair: f"{pair}, {name}: {text}",
            )


def test_open_windows_of_sharded_models_go_on_in_any_strategy(tmp_path: Path) -> None:
    run_world(save, 2, KINDS, tmp_path, timeout=250)
    pairs = [pair for kind in KINDS for pair in ((kind, kind), (kind, kind))]
    pairs += [("ddp", "v2"), ("v2", "ddp"), ("v2 each batch", "v2")]
    check(run_world(go_on, 2, KINDS, pairs, tmp_path, timeout=250)[0], pairs)
    fewer = [("v2", "ddp"), ("ddp", "ddp"), ("v2 each batch", "ddp")]
    check(go_on_alone(fewer, tmp_path), fewer)


def go_on_alone(pairs: list[tuple[str, str]], folder: Path) -> list[dict[str, torch.Tensor]]:
    return run_world(go_on, 1, KINDS, pairs, folder, timeout=250)[0]


@pytest.mark.slow  # saves and loads in four ranks; test_open_windows_of_sharded_models_go_on_... takes two
def test_open_windows_go_on_on_another_mesh(tmp_path: Path) -> None:
    run_world(save, 4, MESHES, tmp_path, timeout=250)
    pairs = [
        ("shard2 tp2", "shard2 tp2"),
        ("copies2 shard2", "shard2 tp2"),
        ("shard2 tp2", "ddp"),
        ("ddp", "shard2 tp2"),
        ("shard2 tp2", "copies2 shard2"),
        ("shard2 tp2", "copies2 shard2"),
    ]
    check(run_world(go_on, 4, MESHES, pairs, tmp_path, timeout=250)[0], pairs)


def version_1(folder: Path) -> tuple[list[str], bool]:
    """The warnings of saving and loading open windows, and whether training starts a new window after loading."""
    import logging

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel").addHandler(handler)
    run = Run({"fsdp": BLOCKS}, False, 0)
    run.train(CUT, str(folder / "v1"))
    run.accelerator.load_state(str(folder / "v2 False"))
    is_new = not any(gradient is not None for gradient in map(lambda item: item.grad, run.model.parameters()))
    run.train()
    run.accelerator.free_memory()
    return messages, is_new


@pytest.mark.slow  # two worlds; version 2, whose windows are resumed, is fast
def test_version_1_warns_and_starts_a_new_window(tmp_path: Path) -> None:
    run_world(save, 2, {"v2": KINDS["v2"]}, tmp_path, timeout=250)
    messages, is_new = run_world(version_1, 2, tmp_path, timeout=250)[0]
    assert is_new
    assert any("FSDP1Strategy cannot save the accumulated gradients" in message for message in messages)
    assert any("FSDP1Strategy cannot restore" in message for message in messages)
