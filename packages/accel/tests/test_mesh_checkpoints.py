"""States saved on one mesh load on any other, with DDP, with FSDP and in one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_runs import BATCH, BLOCKS, TOLERANCE, accelerator_for, batches, build, loss_of, optimizer_of
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.fsdp.merge import merge_fsdp_weights
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_checkpoint.names import CheckpointError
from accel_state.random import set_seed
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

STEPS = 3
MESHES: dict[str, dict[str, int]] = {
    "tp2": {"tp_size": 2},
    "shard2": {"dp_shard_size": 2},
    "copies2": {"dp_replicate_size": 2},
    "tp4": {"tp_size": 4},
    "shard2 tp2": {"dp_shard_size": 2, "tp_size": 2},
    "copies2 tp2": {"dp_replicate_size": 2, "tp_size": 2},
    "copies2 shard2": {"dp_replicate_size": 2, "dp_shard_size": 2},
}
SAVERS = {2: ["tp2", "shard2", "ddp", "fsdp"], 4: ["tp4", "shard2 tp2", "copies2 tp2", "full"]}
# On how many ranks: which state into what. Every state is also loaded in one process.
LOADED = {
    2: {
        "tp4": "tp2",
        "shard2 tp2": "ddp",
        "copies2 tp2": "shard2",
        "full": "fsdp",
        "ddp": "tp2",
        "fsdp": "tp2",
        "shard2": "copies2",
        "tp2": "tp2",
    },
    4: {
        "tp4": "shard2 tp2",
        "shard2 tp2": "copies2 tp2",
        "ddp": "shard2 tp2",
        "tp2": "tp4",
        "full": "copies2 shard2",
        "fsdp": "copies2 tp2",
    },
}


def accelerator_of(name: str) -> Accelerator:
    if name == "ddp":
        return Accelerator()
    if name == "fsdp":
        return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**BLOCKS))
    if name == "full":
        return accelerator_for({"dp_shard_size": 2, "tp_size": 2}, {**BLOCKS, "state_dict_type": "FULL_STATE_DICT"})
    return accelerator_for(MESHES[name], BLOCKS if "shard" in name else None)


class Run:
    """A training run with a scheduler."""

    def __init__(self, name: str, seed: int, kind: str = "own") -> None:
        self.accelerator = accelerator_of(name)
        model = build(kind, seed)
        optimizer = optimizer_of(model)
        # Four a step: what is trained after loading still moves the weights, so that a state of the optimizer that is
        # lost shows.
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def train(self, chunks: tuple[torch.Tensor, ...]) -> list[float]:
        ranks = self.accelerator.strategy.data_collectives
        losses = []
        for tokens in chunks:
            loss = loss_of(self.model, tokens[ranks.rank :: ranks.world_size])
            self.accelerator.backward(loss)
            self.optimizer.step()
            for _ in range(4 // ranks.world_size if self.accelerator.num_processes > 1 else 4):
                self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def chunks() -> tuple[torch.Tensor, ...]:
    return batches(2 * STEPS).split(BATCH)


def save_all(folder: str, names: list[str], kind: str) -> dict[str, Any]:
    found = {}
    for name in names:
        run = Run(name, 0, kind)
        run.train(chunks()[:STEPS])
        run.accelerator.save_state(f"{folder}/{name}")
        found[name] = run.train(chunks()[STEPS:]), run.weights()
        run.accelerator.free_memory()
    return found


def load_all(folder: str, pairs: list[tuple[str, str]], kind: str) -> dict[tuple[str, str], Any]:
    found = {}
    for name, into in pairs:
        run = Run(into, 9, kind)
        run.accelerator.load_state(f"{folder}/{name}")
        loaded = run.weights()
        found[name, into] = loaded, run.train(chunks()[STEPS:]), run.weights()
        run.accelerator.free_memory()
    return found


@pytest.mark.slow
# Eight ways of saving, and twenty-two of loading, on three sizes of worlds.
def test_every_state_loads_on_other_meshes(tmp_path: Path) -> None:
    saved: dict[str, Any] = {}
    for world, names in SAVERS.items():
        saved |= run_world(save_all, world, str(tmp_path), names, "own", timeout=250)[0]
    whole = run_world(load_all, 1, str(tmp_path), [(name, "ddp") for name in saved], "own", timeout=250)[0]
    for (name, _), found in whole.items():
        check_loaded(f"{name} in one process", found, found[0], saved[name])
    for world, pairs in LOADED.items():
        for (name, into), found in run_world(load_all, world, str(tmp_path), list(pairs.items()), "own", timeout=250)[
            0
        ].items():
            check_loaded(f"{name} into {into} on {world} ranks", found, whole[name, "ddp"][0], saved[name])


def check_loaded(what: str, found: Any, at_saving: dict[str, torch.Tensor], saved: Any) -> None:
    loaded, losses, weights = found
    assert all(torch.equal(value, at_saving[key]) for key, value in loaded.items()), f"{what}: loading changes no bit"
    torch.testing.assert_close(losses, saved[0], rtol=0, atol=TOLERANCE, msg=lambda text: f"{what}: {text}")
    for key, value in saved[1].items():
        torch.testing.assert_close(
            weights[key], value, rtol=0, atol=TOLERANCE, msg=lambda text, key=key: f"{what}, {key}: {text}"
        )


def save_for_others(folder: str) -> dict[str, torch.Tensor]:
    run = Run("shard2 tp2", 0, "gpt2")
    run.train(chunks()[:STEPS])
    run.accelerator.save_state(f"{folder}/state", blocking=False)
    weights = run.weights()
    run.train(chunks()[STEPS:])
    run.accelerator.wait_for_save()
    run.accelerator.load_state(f"{folder}/state")
    run.accelerator.save_model(run.model, f"{folder}/model", max_shard_size=6000)
    mine = run.model.transformer.h[0].attn.c_attn.weight
    assert tuple(mine.shape) == (16, 3, 16), "held with a dimension for queries, keys and values"
    assert tuple(mine.to_local().shape) == (8, 3, 8)
    return weights


def refused(folder: str) -> str:
    run = Run("tp2", 0, "llama")
    before = run.weights()
    with pytest.raises(CheckpointError) as caught:
        run.accelerator.load_state(f"{folder}/state")
    assert all(torch.equal(value, before[name]) for name, value in run.weights().items()), "nothing has been changed"
    return str(caught.value)


@pytest.mark.slow  # four ranks; merging and names have fast tests in test_fsdp_checkpoints
def test_files_hold_the_models_own_names_and_shapes(tmp_path: Path) -> None:
    weights = run_world(save_for_others, 4, str(tmp_path), timeout=250)[0]
    plain = build("gpt2").state_dict()
    assert {name: value.shape for name, value in weights.items()} == {
        name: value.shape for name, value in plain.items()
    }
    assert merge_fsdp_weights(tmp_path / "state", tmp_path / "merged") == ["model.safetensors"]
    parts = [load_file(path) for path in sorted((tmp_path / "model").glob("*.safetensors"))]
    assert len(parts) > 2
    for found in (
        load_file(tmp_path / "merged/model.safetensors"),
        {name: value for part in parts for name, value in part.items()},
    ):
        # Of tied names one is enough.
        assert set(weights) - set(found) <= {"lm_head.weight", "transformer.wte.weight"}
        assert all(torch.equal(value, weights[name]) for name, value in found.items())
    message = run_world(refused, 2, str(tmp_path), timeout=250)[0]
    assert (
        "does not fit LlamaForCausalLM: missing model.embed_tokens.weight" in message
        and "unexpected transformer." in message
    )


def read_some(name: str, folder: str, steps: int | None) -> dict[str, Any]:
    """The samples of an epoch up to its middle, where the state is saved; or from there on, where it is loaded."""
    accelerator = accelerator_of(name)
    set_seed(11)
    accelerator.prepare(build("own"))
    ranks = accelerator.strategy.data_collectives
    loader = accelerator.prepare(DataLoader(range(24), batch_size=4 // ranks.world_size, shuffle=True))
    if steps is None:
        accelerator.load_state(folder)
    drawn, seen = torch.rand(1).item(), []
    for number, batch in enumerate(loader, start=1):
        seen += accelerator.gather_for_metrics(batch).tolist()
        if number == steps:
            accelerator.save_state(folder)
            break
    return {"seen": seen, "drawn": drawn, "rank": ranks.rank}


@pytest.mark.slow  # four worlds of up to four ranks; accel-data resumes on other sizes in fast tests
def test_the_data_goes_on_where_it_was_on_another_mesh(tmp_path: Path) -> None:
    first = run_world(read_some, 2, "tp2", str(tmp_path), 2, timeout=250)[0]["seen"]
    for name, world in (("shard2", 2), ("shard2 tp2", 4), ("ddp", 1)):
        rest = run_world(read_some, world, name, str(tmp_path), None, timeout=250)
        assert sorted(first + rest[0]["seen"]) == list(range(24)) and len(first) == 8, name
        # Ranks with the same samples have the same generators, also those that were not there when the state was saved.
        drawn = {rank["rank"]: rank["drawn"] for rank in rest}
        assert all(rank["drawn"] == drawn[rank["rank"]] for rank in rest), name
