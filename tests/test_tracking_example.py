"""One script logs to every tracker that is installed, on two processes, and all of it can be read back."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tracker_readers import READERS, Stored, environment
from workspace import ROOT

from accel_track import LoggerType, get_available_trackers
from accel_track.serialize import flatten

# Other libraries take ten seconds to import, in two processes on a busy machine.
# Trains the example with each installed library, some of which take ten seconds to import; test_backends is faster.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the data are scikit-learn's"),
    pytest.mark.skipif(
        len(get_available_trackers()) < 3, reason="scripts/test-trackers has an environment with libraries of trackers"
    ),
]

# All libraries start at once, possibly on a busy machine, and their start-up time is not tested here.
PATIENT = """
import functools, runpy, sys
import accel
patience = accel.TrackingKwargs(start_timeout=400, stall_timeout=400, finish_timeout=400)
accel.Accelerator = functools.partial(accel.Accelerator, kwargs_handlers=[patience])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

CONFIG = {
    "lr": 0.5,
    "epochs": 2,
    "model": {"hidden": 32, "activation": "torch.nn.modules.activation.GELU", "dropout": None},
    "milestones": [1, 2],
    "device": "cpu",
    "processes": 2,
}
# Values that back ends do not support.
WITHOUT = {
    "artifact": {"tensorboard", "swanlab", "dvclive"},
    "tables": {"tensorboard", "aim", "dvclive", "swanlab", "trackio"},
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of the runs, and the script's output."""
    folder = tmp_path_factory.mktemp("tracking")
    script = ROOT / "examples" / "tracking.py"
    folder.joinpath("patient.py").write_text(PATIENT)
    command = [
        sys.executable,
        "-m",
        "accel_launch",
        "launch",
        "--cpu",
        "--num_processes",
        "2",
        "patient.py",
        str(script),
    ]
    command += ["--log_with", "all", "--output_dir", "runs"]
    result = subprocess.run(command, env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr[-6000:]
    assert "is disabled" not in result.stderr, result.stderr[-6000:]
    return folder / "runs", result.stdout


def expected(folder: Path) -> dict[str, list[tuple[int, float]]]:
    history = json.loads((folder / "history.json").read_text())
    return {name: [(row["step"], row[name]) for row in history] for name in ("loss", "accuracy", "epoch")}


def test_the_script_prints_where_it_logged(logged: tuple[Path, str]) -> None:
    folder, printed = logged
    assert f"logged 16 steps to {', '.join(get_available_trackers())} in runs" in printed
    assert len(json.loads((folder / "history.json").read_text())) == 16


@pytest.mark.parametrize("name", READERS)
def test_logged_values_are_read_back(name: str, logged: tuple[Path, str]) -> None:
    if name not in get_available_trackers():
        pytest.skip(f"{name} is not installed here: scripts/test-trackers has an environment with all")
    folder, _ = logged
    stored: Stored = READERS[name](folder, "digits")
    points = {metric: sorted(stored.points[metric]) for metric in ("loss", "accuracy", "epoch")}
    # TensorBoard keeps numbers in 32 bits, in which torch computed them.
    assert points == expected(folder)
    assert_same_config(stored.config)
    assert stored.images == (2 if name == "unused" else 1)
    if name not in WITHOUT["artifact"]:
        assert stored.artifact == (folder / "history.json").read_bytes()
    if name not in WITHOUT["tables"]:
        assert stored.tables == 1


def assert_same_config(config: dict[str, Any]) -> None:
    """Compare in the form of the back end: nested values, or flat texts."""
    if isinstance(config.get("model"), dict):
        kept = {name: config[name] for name in CONFIG}
        if kept["model"]["dropout"] == "None":  # DVC has no type for it
            kept["model"] = {**kept["model"], "dropout": None}
        assert kept == CONFIG
        return
    flat = {name.replace("/", "."): text for name, text in config.items()}
    for name, value in flatten(CONFIG).items():
        assert str(flat[name]) in (str(value), "" if value is None else str(value)), name


def test_every_tracker_has_a_reader() -> None:
    assert set(READERS) == {member.value for member in LoggerType} - {"all"}
