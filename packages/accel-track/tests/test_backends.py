"""Real back ends beyond what the example logs: resumed and nested runs, values and configs of every type.

Each run is a process of its own, because the libraries set variables, patch others and keep threads.
"""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from forks import Processes

from accel_track import get_available_trackers

NAMES = ["tensorboard", "wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio"]

pytest.importorskip("numpy")

# Loading takes libraries up to ten seconds, several times a test, on a machine that others use too.
pytestmark = pytest.mark.timeout(900)

HEAD = """
import json, sys, enum, math, pathlib, functools
import torch, numpy as np
from accel_track import Delivery, TrackerRun
name, folder = sys.argv[1], pathlib.Path.cwd() / "runs"
folder.mkdir(exist_ok=True)
settings = {
    "comet_ml": {"online": False},
    "dvclive": {"dir": str(folder / "dvclive"), "save_dvc_exp": False, "dvcyaml": False},
    "mlflow": {"logging_dir": folder.as_uri()},
    "swanlab": {"mode": "offline", "log_dir": str(folder)},
    "wandb": {"mode": "offline", "dir": str(folder)},
    "clearml": {"auto_resource_monitoring": False},
}
delivery = Delivery(start_timeout=250, stall_timeout=250, finish_timeout=250)
tracking = TrackerRun(name, folder, strict=True, delivery=delivery)
"""


def environment(folder: Path) -> dict[str, str]:
    variables = {
        "AIM_UI_TELEMETRY_ENABLED": "0",
        "CLEARML_CACHE_DIR": folder / "clearml",
        "CLEARML_OFFLINE_MODE": "1",
        "COMET_OFFLINE_DIRECTORY": folder,
        "HOME": folder,
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "OMP_NUM_THREADS": "1",
        "TRACKIO_DIR": folder / "trackio",
        "WANDB__SERVICE_WAIT": "250",
    }
    return {**os.environ, **{name: str(value) for name, value in variables.items()}}


def run(processes: Processes, code: str, name: str, folder: Path, *words: str) -> Any:
    """What the code prints last, as JSON."""
    result = processes.run(HEAD + code, name, *words, cwd=folder, env=environment(folder), timeout=280)
    assert result.returncode == 0, result.stderr[-5000:]
    return json.loads(
        [line for line in result.stdout.splitlines() if line.startswith("RESULT ")][-1].removeprefix("RESULT ")
    )


def installed(name: str) -> None:
    if name not in get_available_trackers():
        pytest.skip(f"{name} is not installed here: scripts/test-trackers has an environment with all")


ANY_VALUE = """
class Color(enum.Enum):
    RED = 1
loop = {}
loop["loop"] = loop
config = {
    "none": None, "flag": True, "nested": {"a": {"b": [1, {"c": None}]}, "empty": {}, "list": []},
    "enum": Color.RED, "path": folder,
    "tensor": torch.ones(2), "big": torch.ones(10_000), "numpy": np.float32(0.5),
    "function": math.sqrt, "lambda": lambda x: x,
    "partial": functools.partial(print, 1), "set": {1, 2}, "loop": loop, "nan": math.nan, "inf": -math.inf,
    3: "number", "long": "x" * 20_000,
    "class": torch.nn.ReLU, "module": torch.nn.ReLU(), "text": "grün \\u2713", "bytes": b"a", "int": 10**15,
}
tracking.init_trackers("any", config, {name: settings.get(name, {})})
tracking.log({
    "float": 0.5, "int": 2, "flag": True, "numpy": np.float64(1.5), "tensor": torch.tensor(3),
    "half": torch.tensor(0.5, dtype=torch.bfloat16),
    "nested": {"x": 1.0, "y": 2}, "nan": math.nan, "inf": math.inf, "word": "text",
}, step=0)
tracking.log({"float": 1.0, "vector": torch.arange(4.0), "array": np.arange(3), "none": None, "list": [1, 2]}, step=1)
tracking.log({"float": 1.5})
for image in (torch.rand(3, 8, 8), np.zeros((8, 8), np.uint8), [torch.rand(1, 8, 8)] * 2):
    tracking.log_images({"image": image}, step=2)
tracking.log_table("table", columns=["a", "b"], data=[[1, "x"], [2.5, None]], step=2)
tracking.finish()
print("RESULT true")
"""


@pytest.mark.parametrize("name", ["jsonl", *NAMES])
def test_values_and_configs_of_every_kind_are_taken(name: str, tmp_path: Path, processes: Processes) -> None:
    installed(name)
    # Strict: whatever the back end refuses would raise.
    assert run(processes, ANY_VALUE, name, tmp_path) is True


RESUMED = """
part = int(sys.argv[2])
if part:
    tracking.load_state_dict(json.loads(pathlib.Path("state.json").read_text()))
tracking.init_trackers("resumed", {"lr": 0.1}, {name: settings.get(name, {})})
for step in (range(3) if part == 0 else range(2, 5)):
    tracking.log({"loss": part * 100 + step}, step=step)
    if (part, step) == (0, 1):
        pathlib.Path("state.json").write_text(json.dumps(tracking.state_dict()))
run_id = tracking.state_dict()["trackers"][name]["run_id"]
tracking.finish()
points = None
"""
STATED = """
print("RESULT", json.dumps([run_id, points and sorted(points)]))
"""

READ = {
    "tensorboard": """
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        events = EventAccumulator(str(folder / "resumed")); events.Reload()
        points = [(event.step, event.value) for event in events.Scalars("loss")]
    """,
    "mlflow": """
        from mlflow import MlflowClient
        client = MlflowClient(); (run,) = client.search_runs([client.get_experiment_by_name("resumed").experiment_id])
        points = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]
    """,
    "dvclive": """
        lines = (folder / "dvclive/plots/metrics/loss.tsv").read_text().split()[2:]
        points = [(int(step), float(value)) for step, value in zip(lines[::2], lines[1::2])]
    """,
    "trackio": """
        from trackio.sqlite_storage import SQLiteStorage
        (run,) = SQLiteStorage.get_runs("resumed")
        points = [(row["step"], row["loss"]) for row in SQLiteStorage.get_logs("resumed", run)]
    """,
    "aim": """
        import subprocess
        aim = pathlib.Path(sys.executable).parent / "aim"
        subprocess.run([aim, "storage", "--repo", str(folder), "reindex", "-y"], check=True, capture_output=True)
        from aim import Repo
        (run,) = Repo(str(folder)).iter_runs()
        (metric,) = [metric for metric in run.metrics() if metric.name == "loss"]
        steps, (values, *_) = metric.data.items_list()
        points = list(zip(steps, values))
    """,
}


@pytest.mark.slow  # starts two processes for each library; their values have a fast test
@pytest.mark.parametrize("name", [name for name in NAMES if name != "clearml"])
def test_a_resumed_job_continues_the_run(name: str, tmp_path: Path, processes: Processes) -> None:
    """Offline, wandb, comet and swanlab write a second file for the same run, and merge both on upload."""
    installed(name)
    first, _ = run(processes, RESUMED + STATED, name, tmp_path, "0")
    second, points = run(processes, RESUMED + textwrap.dedent(READ.get(name, "")) + STATED, name, tmp_path, "1")
    assert first == second
    if name in READ:
        assert dict(map(tuple, points)) == {0: 0, 1: 1, 2: 102, 3: 103, 4: 104}


MLFLOW = """
import mlflow
from accel_track import MLflowTracker
client = mlflow.MlflowClient()

mlflow.set_experiment("nested")
with mlflow.start_run() as parent:
    child = {"nested_run": True, "tags": '{"kind": "child"}', "run_name": "inner", "description": "d"}
    tracking.init_trackers("nested", {"lr": 0.1}, {name: child})
    tracking.log({"loss": 1.0}, step=0)
    figure = __import__("matplotlib.figure").figure.Figure()
    own = tracking.get_tracker("mlflow")
    own.log_figure(figure, "figures/empty.png")
    (folder / "files").mkdir()
    (folder / "files" / "a.txt").write_text("a")
    own.log_artifacts(str(folder / "files"), "many")
    tracking.log_artifact(folder / "files" / "a.txt", "one")
    assert mlflow.active_run().info.run_id == parent.info.run_id, "the script's own run is left alone"
    child = tracking.get_tracker("mlflow", unwrap=True)
    tracking.finish(failed=True)
data = client.get_run(child.info.run_id)
artifacts = [client.list_artifacts(child.info.run_id, path) for path in ("figures", "many", "one")]
files = [sorted(entry.path for entry in entries) for entries in artifacts]
tags = {key: data.data.tags[key] for key in ("kind", "mlflow.note.content")}
is_nested = data.data.tags["mlflow.parentRunId"] == parent.info.run_id
nested = [is_nested, data.info.run_name, data.info.status, tags, files]

messages = []
for arguments in ({"tags": "{"}, {"tags": 3}, {"nested_run": True}):
    try:
        MLflowTracker("x", **arguments)
    except Exception as error:
        messages.append(f"{type(error).__name__}: {error}")

tracking = TrackerRun(name, folder, strict=True, delivery=delivery)
tracking.init_trackers("again", {"lr": 1})
first = tracking.state_dict()
tracking.finish()
tracking = TrackerRun(name)
tracking.init_trackers("again", {"lr": 1})
unused = tracking.state_dict()["trackers"]["mlflow"]["run_id"]
tracking.load_state_dict(first)
tracking.finish()
print("RESULT", json.dumps([nested, messages, client.get_run(unused).info.lifecycle_stage]))
"""


def test_mlflow_runs_are_nested_keep_files_and_are_deleted_when_not_used(tmp_path: Path, processes: Processes) -> None:
    installed("mlflow")
    nested, messages, stage = run(processes, MLFLOW, "mlflow", tmp_path)
    is_child, run_name, status, tags, files = nested
    assert is_child and run_name == "inner" and status == "FAILED"
    assert tags == {"kind": "child", "mlflow.note.content": "d"}
    assert files == [["figures/empty.png"], ["many/a.txt"], ["one/a.txt"]]
    json_error, type_error, nested_error = messages
    assert json_error.startswith("ConfigurationError: tags='{' is not JSON")
    assert type_error == "ConfigurationError: tags=3 is of type int. Pass a dictionary or a JSON object."
    assert nested_error.startswith("ConfigurationError: nested_run=True needs an active run")
    assert stage == "deleted"
