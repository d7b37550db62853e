"""The package of docs/extending.md, installed from the page's own code blocks and run on real processes."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import run_alone, run_launched
from torch import nn

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def test_the_page_shows_the_device_that_the_tests_run_on() -> None:
    shown = (PAGE.parents[1] / "tests" / "device" / "torch_simgpu" / "accel_device.py").read_text()
    assert f"```python\n{shown}```" in PAGE.read_text()
    assert len(shown.splitlines()) <= 30


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory on the path with the package and its metadata, as pip would install it."""
    directory = tmp_path_factory.mktemp("site")
    for title, text in re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE.read_text(), re.DOTALL):
        (directory / title).parent.mkdir(exist_ok=True)
        (directory / title).write_text(text)
    info = directory / "accel_farm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accel-farm\nVersion: 1.0\n")
    project = (directory / "pyproject.toml").read_text()
    groups = re.findall(r'\[project\.entry-points\."([^"]+)"\]\n((?:.+\n)+)', project)
    sections = [f"[{group}]\n{entries.replace(chr(34), '')}" for group, entries in groups]
    (info / "entry_points.txt").write_text("\n".join(sections))
    return directory


def run(site: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def accel(site: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(site, sys.executable, "-m", "accel_launch", *arguments, **variables)


def averaged_copies(every: int = 4) -> dict[str, torch.Tensor]:
    """Two copies in plain PyTorch, each on its share of the batches, averaged every few steps and at the end."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    torch.manual_seed(0)
    x = torch.randn(80, 4)
    y = x.sum(1, keepdim=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def average() -> None:
        with torch.no_grad():
            for first, second in zip(*(model.parameters() for model in models), strict=True):
                first.copy_((first + second) / 2)
                second.copy_(first)

    for step in range(10):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            batch = slice(4 * (2 * step + rank), 4 * (2 * step + rank) + 4)
            nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % every == 0:
            average()
    average()
    return models[0].state_dict()


@pytest.mark.slow  # launches two ranks four times; test_command loads an extension in the fast tier
@pytest.mark.parametrize("kind", ["launched", "name", "object", "plugin"])
def test_strategy_tracker_launcher_and_device(site: Path, tmp_path: Path, kind: str) -> None:
    if kind == "object":  # which needs no entry points
        run_launched(site / "train.py", tmp_path, kind, launch=("--cpu", "--num_processes", 2), folder=tmp_path)
    else:  # --cpu would choose the built-in device
        variables = {"FARM_LAUNCH": "1", "FARM_PIN": "1", "FARM_AVERAGE_EVERY": "3" if kind == "plugin" else "4"}
        options = ["--num_processes", "2", *(["--strategy", "periodic_averaging"] if kind == "launched" else [])]
        result = accel(site, "launch", *options, str(site / "train.py"), str(tmp_path), kind, **variables)
        assert result.returncode == 0, result.stderr
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), averaged_copies())
    with sqlite3.connect(tmp_path / "run.db") as database:
        rows = database.execute("SELECT step, name FROM metrics ORDER BY step").fetchall()
    assert rows == [(step, "loss") for step in range(10)]


def test_one_process_trains_without_it_and_says_so(
    site: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_alone(site / "train.py", tmp_path, "object", folder=tmp_path, ACCELERATE_USE_CPU="true")
    assert "PeriodicAveraging trains a model over several processes" in capfd.readouterr().err


@pytest.mark.slow  # starts two interpreters that import torch; test_command loads an extension in the fast tier
def test_device(site: Path) -> None:
    code = "from accel_state import devices; print(type(devices.detect()).__name__, devices.names()[0])"
    assert run(site, sys.executable, "-c", code, FARM_PIN="1").stdout.split() == ["PinnedCpu", "pinned_cpu"]
    assert run(site, sys.executable, "-c", code).stdout.split()[0] != "PinnedCpu"


def test_command(site: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert "print the size of a checkpoint" in accel(site, "--help").stdout
    assert accel(site, "size", str(tmp_path)).stdout == "5\n"
    refused = accel(site, "size")
    assert refused.returncode != 0 and "accel size takes one directory" in refused.stderr
