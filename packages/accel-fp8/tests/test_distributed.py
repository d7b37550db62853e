"""Several processes with DDP, FSDP 2 and compiled models: equal scales, equal weights, and exact resuming."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from accel_fp8 import FP8Recipe, convert, convert_to_native, synchronize
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

BATCH = 4

# Ranks that compile, and wait for each other: seconds on free cores.
pytestmark = pytest.mark.timeout(300)


def always(layer: nn.Module, name: str) -> bool:
    return True


def network(**settings: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 16))
    recipe = FP8Recipe(**{"backend": "native", "amax_history_len": 4, "module_filter_func": always, **settings})
    return convert(model, recipe)  # type: ignore[return-value]


def batch(step: int, rank: int, size: int = BATCH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    # Ranks see values of different sizes.
    data = torch.randn(size * dist.get_world_size(), 32, generator=generator)
    return data.view(dist.get_world_size(), size, 32)[rank] * (1 + rank)


def train(model: nn.Module, first: int = 0, last: int = 5, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(first, last):
        loss = model(batch(step, dist.get_rank())).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the state under the plain names, gathered from shards."""
    state = {}
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        state[name.replace("module.", "").replace("_orig_mod.", "")] = full.detach().clone()
    return state


def ranks_agree(state: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not the same on all ranks; those of the step under way are each rank's own."""
    names = [name for name in sorted(state) if not name.endswith(("fp8_forward_amax", "fp8_gradient_amax"))]
    different = []
    for name in names:
        others = [torch.empty_like(state[name]) for _ in range(dist.get_world_size())]
        dist.all_gather(others, state[name])
        different += [name] if any(not torch.equal(other, state[name]) for other in others) else []
    return different


def shard(model: nn.Sequential) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def compiled_blocks(model: nn.Sequential) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.compile(backend="eager", fullgraph=True)
    return shard(model)


WRAPPINGS: dict[str, Any] = {
    "ddp": DistributedDataParallel,
    "fsdp2": shard,
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager", fullgraph=True)),
    "fsdp2 of compiled blocks": compiled_blocks,
}


def every_wrapping_trains_alike(names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for name in names:
        torch._dynamo.reset()
        model = network()
        losses = train(WRAPPINGS[name](model))
        states[name] = whole(model)
        results[name] = {"losses": losses, "different": ranks_agree(states[name])}
    reference = states["ddp"]
    for name, state in states.items():
        # FSDP sums gradients in another order than DDP, and a value on the edge then falls into the next 8-bit step.
        results[name]["far"] = [
            key
            for key, tensor in state.items()
            if tensor.is_floating_point() and not torch.allclose(tensor, reference[key], rtol=0.05, atol=0.01)
        ]
    return results


@pytest.mark.slow  # every wrapping in 2 and 4 ranks; test_two_ranks_train_as_one_process_does is fast
@pytest.mark.parametrize(("world", "names"), [(2, list(WRAPPINGS)), (4, ["ddp", "fsdp2"])], ids=str)
def test_ranks_stay_identical_however_the_model_is_wrapped(world: int, names: list[str]) -> None:
    for result in run_world(every_wrapping_trains_alike, world, names, timeout=280):
        for name, facts in result.items():
            assert facts["different"] == [], name
            assert facts["losses"] == pytest.approx(result["ddp"]["losses"], rel=0.02), name
            assert [key for key in facts["far"] if not key.endswith("amax")] == [], name


def history_is_the_largest_of_all_ranks() -> dict[str, Any]:
    rank = dist.get_rank()
    seen: list[float] = []
    model = network()
    model[0].register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0].abs().max().item()))
    ddp = DistributedDataParallel(model)
    train(ddp, last=4)
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    alone = convert_to_native(
        nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)),
        FP8Recipe(amax_history_len=4),
        groups[rank],
    )
    apart = convert_to_native(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), FP8Recipe(), None, False)
    for one in (alone, apart):
        for step in range(2):
            one(batch(step, rank)).sum().backward()
    try:
        copy.deepcopy(alone)
        pickle.dumps(alone)
        refused = ""
    except ConfigurationError as error:
        refused = str(error)
    return {
        "seen": seen,
        "history": model[0].fp8_amax_history[0].tolist(),
        "alone": alone[1].fp8_amax_history[0, 0].item(),
        "apart": apart[1].fp8_amax_history[0, 0].item(),
        "refused": refused,
    }


def resumes_from_what_rank_0_saved(recipe: dict[str, Any]) -> bool:
    model = network(**recipe)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    train(ddp, 0, 3, optimizer)
    synchronize(model)
    saved = [copy.deepcopy((model.state_dict(), optimizer.state_dict()))]
    dist.broadcast_object_list(saved, src=0)
    expected = train(ddp, 3, 6, optimizer)
    again = network(**recipe)
    again.load_state_dict(saved[0][0])
    wrapped = DistributedDataParallel(again)
    new_optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    new_optimizer.load_state_dict(saved[0][1])
    losses = train(wrapped, 3, 6, new_optimizer)
    first, second = whole(model), whole(again)
    return losses == expected and all(torch.equal(first[name], second[name]) for name in first)


def all_recipes_resume() -> dict[str, bool]:
    recipes: dict[str, dict[str, Any]] = {
        "most_recent": {},
        "max": {"amax_compute_algo": "max", "interval": 2},
        "dynamic": {"scaling": "dynamic"},
        "rowwise": {"scaling": "rowwise"},
    }
    return {name: resumes_from_what_rank_0_saved(recipe) for name, recipe in recipes.items()}


def torchao_trains() -> dict[str, Any]:
    results = {}
    for name, wrap in (("ddp", DistributedDataParallel), ("fsdp2", shard)):
        model = network(backend="ao")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = train(wrap(model))
        results[name] = {"losses": losses, "different": ranks_agree(whole(model))}
    torch.manual_seed(0)
    gathered = convert(
        nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 16)),
        FP8Recipe(backend="ao", module_filter_func=always),
        sharded=True,
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results["gathered in 8 bits"] = {"losses": train(shard(gathered)), "different": []}  # type: ignore[arg-type]
    return results


def test_torchao_composes_with_ddp_and_fsdp2() -> None:
    pytest.importorskip("torchao", reason="the extra ao is not installed")
    for result in run_world(torchao_trains, 2, timeout=280):
        assert result["ddp"]["different"] == result["fsdp2"]["different"] == []
        assert result["fsdp2"]["losses"] == pytest.approx(result["ddp"]["losses"], rel=0.02)
        losses = result["gathered in 8 bits"]["losses"]
        assert losses == pytest.approx(result["ddp"]["losses"], rel=0.1)


def matches_one_process() -> tuple[list[float], list[float]]:
    """Both halves of a batch on two ranks, and the whole of it on one: the averaged gradients are the same up to
    rounding.
    """
    # A margin, because in a batch of 8 the largest value moves by half from step to step.
    model, single = network(margin=2), network(margin=2)
    ddp = DistributedDataParallel(model)
    losses = torch.tensor(train(ddp, optimizer=torch.optim.SGD(ddp.parameters(), lr=0.05)))
    dist.all_reduce(losses)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.05)
    expected = []
    for update in single._forward_pre_hooks.values():
        update.group.enabled = False  # the one process is each of the two here
    for step in range(5):
        loss = single(torch.cat([batch(step, rank) for rank in range(dist.get_world_size())])).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    return (losses / dist.get_world_size()).tolist(), expected


def on_two_ranks() -> tuple[Any, ...]:
    return history_is_the_largest_of_all_ranks(), all_recipes_resume()


@pytest.fixture(scope="module")
def two_ranks() -> Any:
    return list(zip(*run_world(on_two_ranks, 2, timeout=280), strict=True))


def test_scales_follow_the_largest_value_of_the_group(two_ranks: Any) -> None:
    results = two_ranks[0]
    largest = [max(values) for values in zip(*(result["seen"] for result in results), strict=True)]
    for result in results:
        assert result["history"] == pytest.approx([*reversed(largest[:3]), 0.0])
        assert "cannot be pickled" in result["refused"]
    assert results[0]["alone"] != results[1]["alone"], "a group of one rank"
    assert results[0]["apart"] != results[1]["apart"], "reduce_amax=False"


def test_training_resumed_from_the_file_of_one_rank_is_bit_for_bit_the_same(two_ranks: Any) -> None:
    for result in two_ranks[1]:
        assert result == dict.fromkeys(result, True)


def test_two_ranks_train_as_one_process_does() -> None:
    for losses, expected in run_world(matches_one_process, 2, timeout=280):
        assert losses == pytest.approx(expected, rel=0.03)
