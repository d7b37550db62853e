"""Saving and loading any training loop."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accel_checkpoint import AsyncSaver, CheckpointError, list_checkpoints, load, rng_state, save, verify
from accel_checkpoint.writer import without_sums
from accel_state import PartialState
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(()))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = torch.randn(8, 4)
    loss = (model.second(model.first(inputs)) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def parts(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def weights(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state["model"].state_dict().items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def test_a_resumed_loop_continues_bit_for_bit(tmp_path: Path) -> None:
    state = parts()
    for _ in range(3):
        step(state["model"], state["optimizer"])
        state["schedule"].step()
    random.seed(3), np.random.seed(3)
    saved = save({**state, "epoch": 7, "history": [0.5, {"best": torch.ones(2)}]}, tmp_path / "one", step=3)
    expected_draws = random.random(), np.random.rand(), torch.rand(2)
    step(state["model"], state["optimizer"])
    draws = torch.rand(3)

    other = parts(seed=1)
    values = load(saved, other)
    assert (random.random(), np.random.rand()) == expected_draws[:2] and torch.equal(torch.rand(2), expected_draws[2])
    assert values["epoch"] == 7 and torch.equal(values["history"][1]["best"], torch.ones(2)) and len(values) == 2
    assert other["model"].second.weight is other["model"].first.weight
    assert other["schedule"].state_dict() == state["schedule"].state_dict()
    step(other["model"], other["optimizer"])
    assert_equal(weights(other), weights(state))
    assert torch.equal(torch.rand(3), draws)


def test_weights_are_read_by_the_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = parts()
    save({"model": state["model"]}, tmp_path / "one", rng=False)
    stored = load_file(tmp_path / "one" / "model.safetensors")
    assert set(stored) == {"first.weight", "first.bias", "second.bias", "count"}
    assert torch.equal(stored["first.weight"], state["model"].first.weight)
    assert not list((tmp_path / "one").glob("random_states*"))


@pytest.mark.parametrize("form", ["tensors", "numbers"])
def test_generators_of_earlier_states_are_restored_too(tmp_path: Path, form: str) -> None:
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    save({"x": 1}, tmp_path / "one")
    [path] = (tmp_path / "one").glob("random_states_0.pkl")
    state = torch.load(path, weights_only=True)
    assert state["random_state"][1].dtype == state["numpy_random_seed"][1].dtype == torch.int64
    if form == "numbers":
        state["random_state"] = random.getstate()
        state["numpy_random_seed"] = (
            *np.random.get_state()[:1],
            np.random.get_state()[1].tolist(),
            *np.random.get_state()[2:],
        )
    expected = random.gauss(0, 1), np.random.rand(), torch.rand(()).item()
    rng_state.restoring_rng(state, PartialState(cpu=True).device_backend, path)()
    assert (random.gauss(0, 1), np.random.rand(), torch.rand(()).item()) == expected


def test_old_checkpoints_are_deleted_and_others_are_kept(tmp_path: Path) -> None:
    state = parts()
    save(state, tmp_path / "mine")
    for number in (1, 5, 9):
        save(state, tmp_path / f"checkpoint_{number}", step=number, keep=2)
    found = {info.path.name: info.optimizer_steps for info in list_checkpoints(tmp_path)}
    assert found.keys() >= {"checkpoint_5", "checkpoint_9"} and "checkpoint_1" not in found
    assert found["checkpoint_9"] == 9 and (tmp_path / "mine").is_dir() and not verify(tmp_path / "mine")


def test_nothing_is_loaded_if_one_part_does_not_fit(tmp_path: Path) -> None:
    state = parts()
    step(state["model"], state["optimizer"])
    save(state, tmp_path / "one")
    other = parts(seed=1)
    before = weights(other)
    with pytest.raises(CheckpointError, match="missing_part"):
        load(tmp_path / "one", {**other, "missing_part": other["optimizer"]})
    other["optimizer"] = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(CheckpointError, match=r"optimizer\.bin"):
        load(tmp_path / "one", other)
    assert_equal(weights(other), before)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path / "one", {"model": nn.Linear(4, 4)})


def test_damage_is_found(tmp_path: Path) -> None:
    state = parts()
    save(state, tmp_path / "one")
    assert verify(tmp_path / "one") == {}
    path = tmp_path / "one" / "optimizer.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert list(verify(tmp_path / "one")) == ["optimizer.bin"]
    with pytest.raises(CheckpointError, match=r"optimizer\.bin"):
        load(tmp_path / "one", state)


class Code:
    def state_dict(self) -> dict[str, Any]:
        return {"value": Path("x")}


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ({"state": {"a b": 1}}, "a b"),
        ({"path": "nowhere://bucket/one"}, "nowhere://bucket/one"),
        ({"path": ""}, "''"),
        ({"path": 5}, "5"),
        ({"per_rank": ["loader"]}, "loader"),
        ({"per_rank": "a"}, "'a'"),
        ({"keep": 0, "path": "checkpoint_1"}, "keep=0"),
        ({"keep": 1}, "one"),
        ({"step": -1}, "-1"),
        ({"step": "x"}, "'x'"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_used(
    arguments: dict[str, Any], value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"state": {"a": 1}, "path": "one", **arguments}
    with pytest.raises(ConfigurationError, match=value):
        save(given.pop("state"), given.pop("path"), **given)
    assert os.listdir() == []


def test_a_state_that_needs_code_is_refused_and_the_older_one_stays(tmp_path: Path) -> None:
    save({"value": 1}, tmp_path / "one")
    with pytest.raises(CheckpointError, match="value"):
        save({"value": Code()}, tmp_path / "one")
    assert load(tmp_path / "one")["value"] == 1
    assert os.listdir(tmp_path) == ["one"]


def test_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        load(tmp_path / "nowhere")
    save({"value": 1, "loss": torch.ones(1)}, tmp_path / "one")
    with pytest.raises(ConfigurationError, match="value is a int"):
        load(tmp_path / "one", {"value": 5})
    (tmp_path / "one" / "accel_manifest.json").unlink()
    with pytest.raises((CheckpointError, ConfigurationError)):
        load(tmp_path / "one")


def test_a_save_in_the_background_has_the_values_of_its_call(tmp_path: Path) -> None:
    state = parts()
    with AsyncSaver() as saver:
        expected = weights(state)
        saver.save(state, tmp_path / "one", step=1)
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.fill_(9)
        saver.save(state, tmp_path / "two", step=2)
    assert not saver.in_flight
    other = parts(seed=1)
    load(tmp_path / "one", other)
    assert_equal(weights(other), expected)
    load(tmp_path / "two", other)
    assert other["model"].first.bias.tolist() == [9.0] * 4


def test_the_error_of_a_save_in_the_background_is_raised(tmp_path: Path) -> None:
    saver = AsyncSaver()
    saver.save({"value": 1}, tmp_path / "one")
    saver.wait()
    saver.save({"value": Code()}, tmp_path / "one")
    with pytest.raises(CheckpointError, match="value"):
        saver.wait()
    saver.save({"value": Code()}, tmp_path / "one")
    with pytest.raises(CheckpointError, match="value"):  # by the next save too, which is not started
        saver.save({"value": 2}, tmp_path / "one")
    assert not saver.in_flight and load(tmp_path / "one")["value"] == 1


KILLED = """
import os, sys, torch
from accel_checkpoint import save
number = int(sys.argv[2])
save({"value": torch.full((1000,), 1.0)}, sys.argv[1] + "/one")
real, calls = os.fsync, [0]
def fsync(descriptor):
    calls[0] += 1
    if calls[0] == number:
        os.kill(os.getpid(), 9)
    return real(descriptor)
os.fsync = fsync
save({"value": torch.full((1000,), 2.0)}, sys.argv[1] + "/one")
"""


@pytest.mark.slow  # a Python with torch for each kill; test_checkpoint_kill of accel kills at every file operation
def test_a_kill_at_any_flush_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    seen = set()
    for number in range(1, 8):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(number)], check=False)
        assert done.returncode in (0, -signal.SIGKILL)
        value = load(folder / "one")["value"]
        assert value.unique().numel() == 1
        seen.add(float(value[0]))
        save({"value": 3}, folder / "one")
        assert os.listdir(folder) == ["one"]
        if done.returncode == 0:
            break
    assert seen == {1.0, 2.0}


def exercise(folder: str) -> dict[str, Any]:
    rank = PartialState().process_index
    state = parts()
    path = Path(folder, "one") if rank == 0 else Path(folder, "other-name-of-rank-1")
    torch.manual_seed(rank)
    with AsyncSaver() as saver:
        saved = saver.save({**state, "place": 10 + rank}, path, per_rank=["place"])
    draw = torch.rand(1).item()
    other = parts(seed=5)
    values = load(saved, other)
    result = {"place": values["place"], "same_draw": torch.rand(1).item() == draw, "draw": draw}
    assert_equal(weights(other), weights(state))
    try:
        save({"value": Code() if rank else 1}, Path(folder, "one"), per_rank=["value"])
    except CheckpointError as error:
        result["error"] = str(error)
    return result


def test_two_ranks(tmp_path: Path) -> None:
    ranks = run_world(exercise, 2, str(tmp_path), timeout=120)
    assert [rank["place"] for rank in ranks] == [10, 11]
    assert all(rank["same_draw"] for rank in ranks) and ranks[0]["draw"] != ranks[1]["draw"]
    assert all("rank 1" in rank["error"] or "value" in rank["error"] for rank in ranks)
    assert os.listdir(tmp_path) == ["one"]
    with pytest.raises(CheckpointError, match="manifest|ranks"):
        load(tmp_path / "one", {"missing": parts()["model"]})
    values = load(tmp_path / "one")
    assert values["place"] == 10 and list_checkpoints(tmp_path)[0].complete


def elsewhere(folder: str) -> str:
    rank = PartialState().process_index
    with pytest.raises(CheckpointError) as caught:
        save({"value": 1}, "memory://bucket/state" if rank else f"{folder}/state")
    return str(caught.value)


def test_files_of_a_rank_that_are_not_there(tmp_path: Path) -> None:
    """A checkpoint without them would be complete for its manifest, and no rank could load it."""
    for error in run_world(elsewhere, 2, str(tmp_path)):
        assert "does not see" in error and "random_states_1.pkl" in error
    assert os.listdir(tmp_path) == []


def test_torch_compat() -> None:
    from accel_checkpoint import _torch_compat

    assert _torch_compat.neg_view(torch.ones(1)).is_neg()
    entry = _torch_compat.storage_info("__0_0.distcp", 3, 7)
    assert (entry.relative_path, entry.offset, entry.length) == ("__0_0.distcp", 3, 7)
    placements = torch.distributed.tensor.Shard(0), torch.distributed.tensor.Replicate()
    assert _torch_compat.local_shape_and_offset((5, 4), (2, 2), (1, 0), placements) == ((2, 4), (3, 0))


@pytest.mark.parametrize("option", [True, False])
def test_files_have_digests_instead_of_sums(tmp_path: Path, option: bool) -> None:
    """torch reads them; and what the script saves itself has the sums that it asks for."""
    state = parts()
    torch.serialization.set_crc32_options(option)
    try:
        save(state, tmp_path / "state")
        assert torch.serialization.get_crc32_options() is option
    finally:
        torch.serialization.set_crc32_options(True)
    file = tmp_path / "state" / "optimizer.bin"
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is not None
    assert torch.load(file, weights_only=True)["param_groups"] == state["optimizer"].state_dict()["param_groups"]
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"optimizer\.bin is damaged"):
        load(tmp_path / "state", parts(1))


def test_blocks_without_sums_may_overlap() -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(without_sums())
    second.enter_context(without_sums())
    first.close()
    second.close()
    assert torch.serialization.get_crc32_options() is True


OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "Rprop", "Adafactor")},
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "LBFGS": {"max_iter": 2},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_of_torch_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of matrices and vectors, with a parameter that has had no gradient."""
    # Versions of torch differ in the module that some classes name; in this one the contents are checked.
    monkeypatch.setattr(getattr(torch.optim, name), "__module__", f"torch.optim.{name.lower()}")

    def built() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(4, 3)})
        return {"model": model, "optimizer": getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])}

    def step(state: dict[str, Any]) -> None:
        def closure() -> torch.Tensor:
            state["optimizer"].zero_grad()
            loss = state["model"]["used"](torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        state["optimizer"].step(closure)

    first, second = built(), built()
    step(first)
    save(first, tmp_path / "state")
    load(tmp_path / "state", second)
    for state in (first, second):
        step(state)
    for name, value in weights(first).items():
        torch.testing.assert_close(second["model"].state_dict()[name], value, rtol=0, atol=0)
