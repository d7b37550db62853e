"""Bad losses and norms: the first step, rank, parameter group and samples, and reading the samples again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("accel")

from accel import Accelerator
from accel_monitor.bad_steps import BadSteps, NormLimit, guilty_group, plain_indices
from accel_monitor.commands.monitor import run as monitor_command
from accel_monitor.recorder import INDICES, LOSS, NORM, Recorder
from accel_state import ConfigurationError
from accel_state.testing import run_world


class Rows(Dataset):
    """96 samples; number 37 has a value that is infinite, and number 70 one that is far too large."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.ones(4)
        if index == 37:
            row[1] = float("inf")
        if index == 70:
            row[2] = 1e4
        return row


def train(folder: str, workers: int) -> tuple[list[list[int]], list[float]]:
    accelerator = Accelerator(monitor=True, project_dir=folder)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 1e-5}]
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Rows(), batch_size=2, shuffle=True, generator=generator, num_workers=workers)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(groups, lr=1e-5), loader)
    losses = []
    for inputs in loader:
        loss = model(inputs).mean()
        losses.append(loss.item())
        if math.isfinite(losses[-1]):
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            # The gradients are dropped, so that the run goes on.
            accelerator.backward(loss)
            optimizer.zero_grad()
            optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return [], losses


def events(folder: Path, rank: int) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "monitor" / f"rank-{rank:05d}.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "bad_step"]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_bad_loss_and_norm_have_their_step_group_and_samples(
    tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ((_, losses),) = run_world(train, 1, str(tmp_path), workers)
    loss, *norms = sorted(events(tmp_path, 0), key=lambda event: event["what"])
    bad = next(step for step, value in enumerate(losses, 1) if not math.isfinite(value))
    assert (loss["what"], loss["step"], loss["value"]) == ("loss", bad, str(losses[bad - 1]))
    assert 37 in loss["indices"] and len(loss["indices"]) == 2
    (norm,) = [event for event in norms if event["what"] == "norm"]
    assert 70 in norm["indices"] and norm["value"] > 10 * norm["median"]
    # A norm on a device is read when the gradients of the groups are gone.
    assert norm["group"] == (None if torch.accelerator.is_available() else 0)
    if not workers:
        show_batch(tmp_path, loss["step"], capsys)


def show_batch(tmp_path: Path, step: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The command reads the samples again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 96\n"
        "    def __getitem__(self, index):\n"
        "        return {'row': torch.tensor([index, float('inf') if index == 37 else 1.0]), 'name': f'n{index}'}\n"
        "def make_loader(): return torch.utils.data.DataLoader(Rows())\n"
        "three = 3\n"
    )
    command = ["show-batch", str(tmp_path), "--step", str(step), "--loader"]
    assert monitor_command([*command, f"{script}:make_loader"]) == 0
    out = capsys.readouterr().out
    assert "sample 37" in out and "1 not finite" in out and "'n37'" in out
    assert out.count("sample ") >= 2
    for wrong in (f"{script}:three", f"{script}:nothing", "no.py:x", "x"):
        with pytest.raises(ConfigurationError):
            monitor_command([*command, wrong])
    with pytest.raises(ConfigurationError, match="9999"):
        monitor_command(["show-batch", str(tmp_path), "--step", "9999", "--loader", f"{script}:make_loader"])
    monitor_command([str(tmp_path), "--once"])
    assert "37" in capsys.readouterr().out


def test_each_rank_reports_its_own_loss(tmp_path: Path) -> None:
    results = run_world(train, 2, str(tmp_path), 0)
    for rank, (_, losses) in enumerate(results):
        bad = [step for step, value in enumerate(losses, 1) if not math.isfinite(value)]
        found = [event for event in events(tmp_path, rank) if event["what"] == "loss"]
        assert [event["step"] for event in found] == [step for step in bad if step - 1 not in bad]
        assert all(len(event["indices"]) == 2 for event in found)
    first = min((event for rank in (0, 1) for event in events(tmp_path, rank)), key=lambda event: event["step"])
    assert first["what"] == "loss" and 37 in first["indices"]


def steps(recorder: Recorder, first: int, values: list[tuple[float, float | None]]) -> None:
    """Steps with these losses and norms, as a loop reports them."""
    recorder.begin_at(first - 1)
    for loss, norm in values:
        recorder.note(LOSS, loss)
        recorder.note(NORM, norm)
        recorder.note(INDICES, [recorder.step + 1])
        recorder.step_done()


def test_only_the_first_of_bad_values_in_a_row_is_reported() -> None:
    recorder = Recorder()
    bad = BadSteps(recorder)
    steps(recorder, 1, [(1.0, 1.0 + step / 100) for step in range(1, 21)])
    assert bad.check() == []
    steps(recorder, 21, [(math.nan, 5.0), (math.nan, 40.0), (1.0, 41.0)])
    found = bad.check()
    assert [(event["what"], event["step"]) for event in found] == [("loss", 21), ("norm", 22)]
    assert [event["indices"] for event in found] == [[21], [22]]
    steps(recorder, 24, [(1.0, 1.0), (math.inf, math.nan)])
    assert [(event["what"], event["step"], event["value"]) for event in bad.check()] == [
        ("loss", 25, "inf"),
        ("norm", 25, "nan"),
    ]
    assert bad.check() == []


def test_steps_that_are_computed_again_after_a_load_are_looked_through_again() -> None:
    recorder = Recorder()
    bad = BadSteps(recorder)
    steps(recorder, 1, [(1.0, None)] * 10)
    assert bad.check() == []
    steps(recorder, 4, [(math.nan, None), *[(1.0, None)] * 20])
    assert [event["step"] for event in bad.check()] == [4]


def test_the_limit_of_a_norm_follows_the_median() -> None:
    limit = NormLimit()
    assert not any(limit.is_exceeded(1.0 + step / 100) for step in range(1, 21))
    assert limit.is_exceeded(math.nan) and limit.is_exceeded(math.inf) and limit.is_exceeded(11.1)
    assert not limit.is_exceeded(10.9)


def test_groups_and_indices() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for parameter, value in zip(parameters, (1.0, 5.0, 2.0), strict=True):
        parameter.grad = torch.full((2,), value)
    groups = [{"params": [parameter]} for parameter in parameters]
    assert guilty_group(groups) == 1 and guilty_group(groups[:1]) == 0
    parameters[2].grad[0] = math.inf
    assert guilty_group(groups) == 2
    parameters[0].grad[0] = math.nan
    assert guilty_group(groups) is None
    assert plain_indices([[1, 2], [torch.tensor(3)]]) == [1, 2, 3]
    assert plain_indices([["a"]]) is None and plain_indices(None) is None and plain_indices([None]) is None


def test_steps_that_were_looked_through_are_forgotten() -> None:
    recorder = Recorder()
    bad_steps = BadSteps(recorder)
    for _ in range(100):
        recorder.note(LOSS, 1.0)
        recorder.step_done()
    assert bad_steps.check() == []
    recorder.forget(29)
    assert [record.step for record in recorder.latest()] == list(range(72, 101))
    recorder.note(LOSS, math.nan)
    recorder.step_done()
    (found,) = bad_steps.check()
    assert found["step"] == 101 and bad_steps.check() == []
    recorder.forget(0)
    assert recorder.latest() == []
