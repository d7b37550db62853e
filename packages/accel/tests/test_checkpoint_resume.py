"""A resumed run goes on bit by bit, in one process and on several."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import (
    Run,
    resumed,
    same,
    uninterrupted,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, ProjectConfiguration
from accel_checkpoint.names import CheckpointError
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {}),
        (2, {}),
        (1, {"workers": 1}),
        (2, {"mixed_precision": "fp16", "loaders": {"use_seedable_sampler": True}}),
        (2, {"loaders": {"dispatch_batches": True}}),
        (2, {"loaders": {"dispatch_batches": False}, "stream": True}),
    ],
    ids=["1", "2", "workers", "fp16-seedable", "dispatch", "stream"],
)
def test_training_goes_on_bit_by_bit_in_a_new_process(tmp_path: Path, world: int, settings: dict[str, Any]) -> None:
    points = {(0, 1): "first", (1, 2): "middle", (1, 7 // world): "end"}
    save = {point: str(tmp_path / name) for point, name in points.items()}
    whole = run_world(uninterrupted, world, settings, save)
    batches = len(whole[0][0]) // 3
    assert whole[0][0] != whole[-1][0] or world == 1
    for rank, rests in enumerate(run_world(resumed, world, settings, save)):
        for (epoch, batch), (rest, weights) in zip(save, rests, strict=True):
            assert rest == whole[rank][0][epoch * batches + batch + 1 :], (epoch, batch, rank)
            assert same(weights, whole[rank][1]), (epoch, batch, rank)


def test_without_a_checkpoint_another_seed_trains_otherwise(tmp_path: Path) -> None:
    """The comparison above could fail."""
    first, second = Run(seed=0).train(1), Run(seed=99).train(1)
    assert [step[0] for step in first] != [step[0] for step in second] and first[0][1] != second[0][1]


def test_going_back_in_the_same_process(tmp_path: Path) -> None:
    run = Run()
    run.train(1)
    run.accelerator.save_state(tmp_path / "state")
    first = run.train(3, done=1)[8:]
    weights = run.weights()
    run.record = []
    run.accelerator.load_state(tmp_path / "state")
    assert run.train(3, done=1) == first and len(first) == 16
    assert same(run.weights(), weights)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    plain = Run().train(2)
    assert Run().train(2, {(0, 0): str(tmp_path / "a"), (1, 3): str(tmp_path / "b")}) == plain


def save_on_ranks(folder: str) -> tuple[list[str], float]:
    run = Run()
    run.train(1)
    # Each rank makes up a name of its own; the first one's counts.
    path = run.accelerator.save_state(f"{folder}/{run.accelerator.process_index}")
    return sorted(os.listdir(path)), random.random()


def load_on_ranks(folder: str) -> float | str:
    run = Run(seed=5)
    try:
        run.accelerator.load_state(folder)
    except CheckpointError as error:
        return str(error)
    return random.random()


def test_every_rank_has_its_own_generators(tmp_path: Path) -> None:
    results = run_world(save_on_ranks, 2, str(tmp_path))
    assert os.listdir(tmp_path) == ["0"] and results[0][0] == results[1][0]
    assert [name for name in results[0][0] if name.startswith("random")] == [
        "random_states_0.pkl",
        "random_states_1.pkl",
    ]
    assert run_world(load_on_ranks, 2, str(tmp_path / "0")) == [drawn for _, drawn in results]
    assert results[0][1] != results[1][1]
    assert run_world(load_on_ranks, 1, str(tmp_path / "0")) == [results[0][1]]
    drawn_on_three = run_world(load_on_ranks, 3, str(tmp_path / "0"))
    assert len(set(drawn_on_three)) == 3 and all(isinstance(drawn, float) for drawn in drawn_on_three), (
        "a new rank has generators too"
    )
    (tmp_path / "0" / "random_states_1.pkl").unlink()
    messages = run_world(load_on_ranks, 2, str(tmp_path / "0"))
    assert all("has no random_states_1.pkl" in message for message in messages), "a rank was left alone with its error"


def _packed(folder: str, packs: bool | None, each_node: bool, resumes: bool) -> list[float]:
    project = ProjectConfiguration(folder, pack_rank_files=packs, save_on_each_node=each_node)
    accelerator = Accelerator(cpu=True, project_config=project)
    torch.manual_seed(10 + accelerator.process_index)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(40), batch_size=2, shuffle=True))
    batches = iter(loader)
    if not resumes:
        for _ in range(3):
            next(batches)
        accelerator.save_state(f"{folder}/state")
    else:
        assert accelerator.resume()
        batches = iter(loader)
    return [*torch.rand(2).tolist(), *next(batches).tolist()]


@pytest.mark.parametrize(("packs", "each_node"), [(False, False), (True, False), (None, True)])
def test_generators_of_all_ranks_in_one_file(tmp_path: Path, packs: bool | None, each_node: bool) -> None:
    """Each rank continues as it would have; nodes that save on their own keep a file of each rank."""
    folder = str(tmp_path)
    expected = run_world(_packed, 2, folder, packs, each_node, False)
    assert expected[0] != expected[1]
    packed = (tmp_path / "state" / "random_states.zip").is_file()
    assert packed == bool(packs)
    assert (tmp_path / "state" / "random_states_1.pkl").is_file() != packed
    assert run_world(_packed, 2, folder, packs, each_node, True) == expected


def _epochs(accelerator: Accelerator, end: int) -> None:
    model = nn.Linear(2, 1)
    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    model, loader = accelerator.prepare(model, data)
    accelerator.resume()
    for batch, (inputs,) in enumerate(loader, 1):
        accelerator.backward(model(inputs).sum())
        if batch == end:
            accelerator.save_state()
            break
    else:
        accelerator.save_state()
    accelerator.end_training()


def test_resume_prints_where_the_training_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for end in (1, 3, 3):
        _epochs(
            Accelerator(cpu=True, project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)), end
        )
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("accel: ")]
    states = tmp_path / "checkpoints"
    assert lines == [
        "accel: resume() found no state: the training starts at its beginning.",
        f"accel: the training continues from {states}/checkpoint_0, after 2 samples of epoch 0.",
        f"accel: the training continues from {states}/checkpoint_1, after 1 complete epoch; a loop of 1 epoch has "
        "nothing left to do.",
    ]


def test_resume_refuses_what_no_state_can_be_saved_with(tmp_path: Path) -> None:
    def resume(place: Any, **settings: Any) -> None:
        settings = {"automatic_checkpoint_naming": True, **settings}
        Accelerator(cpu=True, project_config=ProjectConfiguration(place, **settings)).resume()

    (tmp_path / "file").touch()
    for naming in (True, False):
        with pytest.raises(ConfigurationError, match="cannot be saved in .*file is not a directory"):
            resume(tmp_path / "file", automatic_checkpoint_naming=naming)
    with pytest.raises(ConfigurationError, match="save_on_each_node=True"):
        resume("s3://bucket/run", save_on_each_node=True)
