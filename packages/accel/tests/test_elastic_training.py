"""Training with elastic loaders: the same numbers, and with deterministic_reduction the same bits, on any world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_runs import EPOCHS, MODELS, AugmentedDigits, DigitStream, Run, images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from accel.reduction.tree_sum import TreeSum, keys_of_rank
from accel.setup.registry import STRATEGIES
from accel_state import AcceleratorState, ConfigurationError
from accel_state.testing import run_world

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
Losses = dict[tuple[int, int, int], float]


def outcome(run: Run) -> tuple[str, Losses]:
    return run.digest(), run.losses


def plain(name: str) -> dict[str, torch.Tensor]:
    """Training on the global batches in plain PyTorch, without dropout."""
    run = Run(name, deterministic=False, logical_shards=1)
    model = run.accelerator.unwrap_model(run.model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer, scheduler = run.optimizer.optimizer, run.scheduler.scheduler
    for batch in run.loader:
        run.loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return run.weights()


def without_dropout(run: Run) -> Run:
    for module in run.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return run


def gathered(dispatch: bool) -> list[float]:
    """An evaluation: every sample once, in the order of the data set."""
    AcceleratorState._reset_state()
    config = DataLoaderConfiguration(elastic=True, logical_shards=4, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(43.0)), batch_size=10))
    return [value for (batch,) in loader for value in accelerator.gather_for_metrics(batch).tolist()]


def stream(dispatch: bool | None) -> dict[tuple[int, int, int], float]:
    """Training on a stream, which rank 0 reads for all unless told otherwise."""
    AcceleratorState._reset_state()
    config = DataLoaderConfiguration(elastic=True, logical_shards=4, dispatch_batches=dispatch, data_seed=1)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    found = {}
    for data in (DigitStream(), AugmentedDigits()):
        loader = accelerator.prepare(DataLoader(data, batch_size=20))
        for pixels, _ in loader:
            shard = loader.logical_shard
            if shard.weight:
                found[isinstance(data, DigitStream), shard.position, shard.index] = pixels.double().sum().item()
    return found


def fast_world(folder: str) -> dict[str, Any]:
    rank_losses = {}
    found: dict[str, Any] = {}
    for name in ("mlp", "conv"):
        found[name], rank_losses[name] = outcome(Run(name).train(epochs=1))
    found["zero first"], _ = outcome(Run("mlp").train(zero_first=True, epochs=1))
    found["plain"] = without_dropout(Run("mlp", deterministic=False)).train(epochs=1).weights()
    Run("conv").train(3, f"{folder}/conv")
    resumed = Run("conv", lr=7.0)
    resumed.accelerator.load_state(f"{folder}/conv")
    found["resumed"] = resumed.train(epochs=1).digest()
    found["gathered"] = [gathered(False), gathered(True)]
    found["losses"], found["stream"] = rank_losses, stream(None)
    return found


def joined(of_ranks: list[Losses]) -> Losses:
    return {key: loss for losses in of_ranks for key, loss in losses.items()}


def test_on_two_processes(tmp_path: Path) -> None:
    alone = {name: outcome(Run(name).train(epochs=1)) for name in ("mlp", "conv")}
    expected, streamed = plain("mlp"), stream(False)
    in_order = without_dropout(Run("mlp")).train(epochs=1).weights()
    ranks = run_world(fast_world, 2, str(tmp_path))
    for name, (digest, losses) in alone.items():
        assert {rank[name] for rank in ranks} == {digest}, name
        assert joined([rank["losses"][name] for rank in ranks]) == losses, name
    assert {rank["zero first"] for rank in ranks} == {alone["mlp"][0]}
    assert {rank["resumed"] for rank in ranks} == {alone["conv"][0]}
    for weights in (ranks[0]["plain"], in_order):
        torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6)
    assert all(rank["gathered"] == [list(range(43))] * 2 for rank in ranks)
    assert joined([rank["stream"] for rank in ranks]) == streamed


WORLDS = (1, 2, 3, 4, 6, 8)


def everything(folder: str, world: int) -> dict[str, Any]:
    """All models on one number of processes, and a part of a run that wanders through all of them."""
    found: dict[str, Any] = {}
    for name in MODELS:
        found[f"{name} ddp"] = outcome(Run(name, workers=world % 3 if name == "conv" else 0).train(epochs=1))
        if world > 1:
            found[f"{name} fsdp2"] = outcome(Run(name, "fsdp2").train(epochs=1))
    if world in (1, 3, 8):
        found["mlp ddp, 24 shards"] = outcome(Run("mlp", logical_shards=24).train(epochs=1))
    # Saved by the other strategy on another number of processes, after a step and a micro batch.
    wanderer = Run("gpt2", "fsdp2" if WORLDS.index(world) % 2 else "ddp", lr=7.0 if world > 1 else 3e-3)
    if world > 1:
        wanderer.accelerator.load_state(f"{folder}/gpt2")
    wanderer.train(None if world == WORLDS[-1] else -(-8 // world) + 1, f"{folder}/gpt2")
    return {**found, "wanderer": (wanderer.digest(), {})}


@pytest.mark.slow  # six worlds, each with seven or more training runs
@pytest.mark.timeout(600)
def test_the_same_bits_on_any_number_of_processes(tmp_path: Path) -> None:
    found = {}
    for world in WORLDS:
        ranks = run_world(everything, world, str(tmp_path), world, timeout=400)
        found[world] = {name: (ranks[0][name][0], joined([rank[name][1] for rank in ranks])) for name in ranks[0]}
    print(f"\n{'model':<22} " + " ".join(f"W={world:<8}" for world in WORLDS))
    for name in sorted({name for row in found.values() for name in row} - {"wanderer"}):
        digests = (found[world].get(name, ("", {}))[0] for world in WORLDS)
        print(f"{name:<22} " + " ".join(f"{digest[:10] or '-':<10}" for digest in digests))
        rows = [found[world][name] for world in WORLDS if name in found[world]]
        assert all(row == rows[0] for row in rows), name
    for name in MODELS:
        assert found[2][f"{name} fsdp2"] == found[1][f"{name} ddp"], name
    assert found[8]["wanderer"][0] == Run("gpt2").train().digest(), "a run that was saved and continued five times"


def items_run(strategy: str, deterministic: bool) -> dict[str, torch.Tensor]:
    """Losses weighted by the number of their items, which differs from shard to shard."""
    run = without_dropout(Run("mlp", strategy, deterministic))
    for _ in range(EPOCHS):
        for pixels, labels in run.loader:
            kept = labels < 7
            loss = nn.functional.cross_entropy(run.model(pixels)[kept], labels[kept], reduction="sum")
            run.accelerator.backward(loss, num_items=int(kept.sum()), reduction="sum")
            run.optimizer.step()
            run.optimizer.zero_grad()
    return run.weights()


def items_runs() -> dict[Any, dict[str, torch.Tensor]]:
    kinds = [(strategy, fixed) for strategy in ("ddp", "fsdp2") for fixed in (False, True)]
    return {kind: items_run(*kind) for kind in kinds}


@pytest.mark.slow  # a world of three
def test_items_weigh_the_same_everywhere() -> None:
    run = without_dropout(Run("mlp", deterministic=False, logical_shards=1))
    model = run.accelerator.unwrap_model(run.model)
    for _ in range(EPOCHS):
        for pixels, labels in run.loader:
            kept = labels < 7
            nn.functional.cross_entropy(model(pixels)[kept], labels[kept]).backward()
            run.optimizer.optimizer.step()
            run.optimizer.optimizer.zero_grad()
    expected, alone = run.weights(), items_run("ddp", True)
    torch.testing.assert_close(alone, expected, rtol=0, atol=2e-6)
    for kind, weights in run_world(items_runs, 3)[0].items():
        torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6, msg=lambda text, kind=kind: f"{kind}: {text}")
        if kind[1]:
            assert all(torch.equal(weights[name], alone[name]) for name in alone), kind


@pytest.mark.parametrize("count", [1, 3, 7, 8, 12, 24, 32])
def test_a_tree_sum_does_not_depend_on_who_adds(count: int) -> None:
    vectors = [torch.randn(50) for _ in range(count)]
    sums = []
    for world in (1, 2, 3, 4, 5, 6, 7, 8, 16, 40):
        partial = []
        for rank in range(world):
            tree = TreeSum(count)
            for shard in range(rank, count, world):
                tree.add(shard, vectors[shard].clone())
            assert tuple(key for key, _ in tree.items()) == keys_of_rank(count, world, rank)
            partial += tree.items()
        whole = TreeSum(count)
        for key, vector in sorted(partial, key=lambda item: item[0]):
            whole.insert(key, vector)
        sums.append(whole.total())
    assert all(torch.equal(sums[0], other) for other in sums)
    torch.testing.assert_close(sums[0], torch.stack(vectors).sum(0), rtol=0, atol=1e-5)


def test_leaving_a_step_discards_its_gradients() -> None:
    expected = Run("mlp").train(epochs=1).digest()
    run = Run("mlp")
    for batch in run.loader:
        run.accelerator.backward(run.loss(run.model, batch))
        if run.loader.logical_shard.slot == 3:
            break
    run.loader.set_epoch(0)
    assert run.train(epochs=1).digest() == expected


def test_an_evaluation_within_a_step() -> None:
    expected = Run("conv").train(epochs=1).digest()
    run = Run("conv")
    other = run.accelerator.prepare(DataLoader(TensorDataset(*images()), batch_size=110))
    for batch in run.loader:
        if run.loader.logical_shard.slot == 2:
            run.model.eval()
            for pixels, _ in other:
                run.model(pixels)
            run.model.train()
        run.accelerator.backward(run.loss(run.model, batch))
        run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
    assert run.digest() == expected


def test_sums_in_order_are_computed_in_one_thread() -> None:
    """Kernels divide sums among the threads, whose number depends on how many processes a machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=4)
        for in_order, threads in ((False, 2), (True, 1)):
            config = DataLoaderConfiguration(elastic=True)
            accelerator = Accelerator(cpu=True, dataloader_config=config, deterministic_reduction=in_order)
            assert torch.get_num_threads() == 2, "the constructor leaves the process as it is"
            accelerator.prepare(loader)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_what_cannot_be_combined_is_refused() -> None:
    elastic = DataLoaderConfiguration(elastic=True)
    with pytest.raises(ConfigurationError, match="deterministic_reduction=True"):
        Accelerator(cpu=True, deterministic_reduction=True)
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, dataloader_config=elastic, deterministic_reduction=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    with pytest.raises(ConfigurationError, match="outside of a loop over one"):
        accelerator.backward(model(torch.ones(3, 2)).sum())
    data = DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=8)
    loader = accelerator.prepare(data)
    for (batch,) in loader:
        with accelerator.accumulate(model):
            assert accelerator.sync_gradients == loader.logical_shard.ends_step
        accelerator.backward(model(batch).mean(), num_items=1)
        with pytest.raises(ConfigurationError, match="two backward passes"):
            accelerator.backward(model(batch).mean(), num_items=1)
        with pytest.raises(ConfigurationError, match="losses with num_items and losses without"):
            accelerator.backward(model(batch).mean())
        with pytest.raises(ConfigurationError, match="in the backward pass"):
            accelerator.backward(model(batch).mean(), learning_rate=0.1)
        break
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, dataloader_config=elastic, gradient_accumulation_steps=3)
    with pytest.raises(ConfigurationError, match="loader's batch_size.*logical_shards 3 times"):
        next(iter(accelerator.prepare(data)))


@pytest.mark.parametrize("name", ["ft", "ft_fsdp2", "mesh", "mesh_pp", "deepspeed"])
def test_strategies_with_steps_of_their_own_do_not_inherit_elastic_ones(name: str) -> None:
    assert STRATEGIES.load(name).supports_elastic is False


def refused_on_ranks() -> None:
    elastic = DataLoaderConfiguration(elastic=True)
    for deterministic, settings, message in (
        (True, {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)}, "and this is FSDP1Strategy"),
        (True, {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="fp16")]}, "comm_hook='fp16' would have"),
        (False, {"parallelism_config": ParallelismConfig(tp_size=2)}, "MeshStrategy has steps of its own"),
    ):
        AcceleratorState._reset_state()
        with pytest.raises(ConfigurationError, match=message):
            Accelerator(cpu=True, dataloader_config=elastic, deterministic_reduction=deterministic, **settings)


@pytest.mark.slow  # a world of two, for messages
def test_strategies_with_an_order_of_their_own_are_refused() -> None:
    run_world(refused_on_ranks, 2)
