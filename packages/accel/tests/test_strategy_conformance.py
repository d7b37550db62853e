"""What every registered strategy does on two ranks: it trains, accumulates, clips, saves and loads as one process does.

A new strategy needs an entry in ``SETTINGS`` (what the Accelerator is given) and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from accel import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accel.setup.registry import STRATEGIES
from accel_state import context
from accel_state.env import patch_environment
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(300)

WIDTH, BATCH, STEPS, MAX_NORM = 8, 8, 3, 0.05
BLOCKS = {"auto_wrap_policy": "transformer_based_wrap"}
SETTINGS: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp": {},
    "fsdp1": {"fsdp": {**BLOCKS, "fsdp_version": 1}},
    "fsdp2": {"fsdp": {**BLOCKS, "fsdp_version": 2}},
    "mesh": {"fsdp": {**BLOCKS, "fsdp_version": 2}, "mesh": {"dp_shard_size": 2}},
    "mesh_ddp": {"mesh": {"dp_replicate_size": 2}},
}
# test_deepspeed_training.py, test_fault_tolerance.py, test_mesh_pipeline.py and tests/test_xla_*.py check these, which
# need an engine, a model that can be split, or another device.
ELSEWHERE = {"deepspeed", "ft", "ft_fsdp2", "megatron", "mesh_pp", "xla", "xla_spmd"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


class Net(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(5, generator=generator), torch.randint(3, (), generator=generator))
        for _ in range(2 * STEPS * BATCH)
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    # Nothing hides the gradients: a step subtracts them.
    return torch.optim.SGD(model.parameters(), lr=1.0)


def accelerator_of(name: str, given_as: str, **arguments: Any) -> Accelerator:
    """An Accelerator whose strategy follows from plugins, is given by name, or is an object."""
    settings = SETTINGS[name]
    fsdp = FullyShardedDataParallelPlugin(**settings["fsdp"]) if "fsdp" in settings else None
    mesh = ParallelismConfig(**settings["mesh"]) if "mesh" in settings else None
    if given_as == "plugins":
        arguments.update(fsdp_plugin=fsdp, parallelism_config=mesh)
    elif given_as == "object" and mesh is not None:
        arguments["strategy"] = STRATEGIES.load(name)(settings=mesh, fsdp=fsdp)
    elif given_as == "object":
        arguments["strategy"] = STRATEGIES.load(name)(settings=fsdp)
    else:
        arguments["strategy"] = name
    variables = {f"PARALLELISM_CONFIG_{axis.upper()}": str(size) for axis, size in settings.get("mesh", {}).items()}
    with patch_environment(FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP", **variables):
        accelerator = Accelerator(cpu=True, **arguments)
    assert type(accelerator.strategy) is STRATEGIES.load(name)
    assert accelerator.is_fsdp2 is (name in ("fsdp2", "mesh"))
    return accelerator


def weights_of(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def exercise(name: str, given_as: str, directory: str) -> dict[str, Any]:
    """Everything that is compared with one process, on this rank."""
    accelerator = accelerator_of(name, given_as, gradient_accumulation_steps=2)
    model = Net(seed=accelerator.process_index if accelerator.strategy.shards_parameters else 0)
    model, optimizer, loader = accelerator.prepare(
        model, sgd(model), DataLoader(data(), batch_size=BATCH // accelerator.num_processes)
    )
    seen: dict[str, Any] = {"norms": []}
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(functional.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                seen["norms"].append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    seen["trained"] = weights_of(accelerator, model)
    accelerator.save_state(directory)

    # The last of two backward passes synchronises, although its forward ran under no_sync.
    x, y = next(iter(loader))
    for last in (False, True):
        with accelerator.no_sync(model):
            loss = functional.cross_entropy(model(x), y)
            if not last:
                accelerator.backward(loss)
        if last:
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(loss)
    accelerator.gradient_state.sync_gradients = True
    optimizer.step()
    optimizer.zero_grad()
    seen["triggered"] = weights_of(accelerator, model)

    accelerator.load_state(directory)
    seen["loaded"] = weights_of(accelerator, model)
    seen["unwrapped"] = isinstance(accelerator.unwrap_model(model), Net)
    accelerator.free_memory()
    return seen


def plain() -> dict[str, Any]:
    model = Net()
    optimizer = sgd(model)
    seen: dict[str, Any] = {"norms": []}
    batches = list(DataLoader(data(), batch_size=BATCH))
    for number, (x, y) in enumerate(batches, start=1):
        (functional.cross_entropy(model(x), y) / 2).backward()
        if number % 2 == 0:
            seen["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    seen["trained"] = {name: value.clone() for name, value in model.state_dict().items()}
    functional.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    # Outside of accumulate each of the two losses counts 1/2, as the number of accumulation steps says.
    optimizer.step()
    return {**seen, "triggered": model.state_dict(), "loaded": seen["trained"]}


def test_every_strategy_is_checked() -> None:
    # accel-megatron registers its strategy where it is installed.
    assert set(SETTINGS) | ELSEWHERE == {*STRATEGIES.names(), "megatron"}


def shards_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(item, "_local_tensor", item).shape) for name, item in model.named_parameters()}


def exercise_all(names: list[str], directory: str) -> dict[str, dict[str, Any]]:
    """Train with plugins; given by name and as an object, a strategy shards a model in the same way."""
    found = {}
    for name in names:
        with context.isolated():
            found[name] = exercise(name, "plugins", f"{directory}/{name}")
        shards = []
        for given_as in ("plugins", "name", "object"):
            with context.isolated():
                shards.append(shards_of(accelerator_of(name, given_as).prepare(Net())))
        assert shards[1] == shards[2] == shards[0], (name, shards)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_strategy_trains_as_one_process_does(ranks: int, tmp_path: Path) -> None:
    names = [name for name in SETTINGS if (name == "single") is (ranks == 1)]
    expected, found = plain(), run_world(exercise_all, ranks, names, str(tmp_path), timeout=120)
    for name in names:
        seen = found[0][name]
        torch.testing.assert_close(seen["norms"], expected["norms"], rtol=1e-4, atol=1e-6, msg=name)
        assert all(rank[name]["norms"] == seen["norms"] and rank[name]["unwrapped"] for rank in found)
        for stage in ("trained", "triggered", "loaded"):

            def message(text: str, what: str = f"{name}, {stage}") -> str:
                return f"{what}: {text}"

            torch.testing.assert_close(seen[stage], expected[stage], rtol=1e-4, atol=1e-5, msg=message)
