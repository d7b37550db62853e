"""Read back the data that each tracker has stored, from its files or with its library.

A reader returns ``points`` (metric -> [(step, value)]), ``config`` (as the back end keeps it: flat texts, or nested
values), ``artifact`` (the bytes of history.json, where files are kept), ``images`` and ``tables`` (how many).
"""

from __future__ import annotations

import csv
import json
import os
import sqlite3
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32768


@dataclass
class Stored:
    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    artifact: bytes | None = None
    images: int = 0
    tables: int = 0
    runs: int = 1

    def add(self, name: str, step: int, value: float) -> None:
        self.points.setdefault(name, []).append((step, value))


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def jsonl(folder: Path, project: str) -> Stored:
    run = only(folder / project, "*/run.json").parent
    stored = Stored(config=json.loads((run / "run.json").read_text())["config"])
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name in row.keys() - {"_step", "_time"}:
            stored.add(name, row["_step"], row[name])
    with (run / "metrics.csv").open(newline="") as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == [value for _, value in stored.points["loss"]]
    stored.artifact = (run / "artifacts" / "history.json").read_bytes()
    stored.images, stored.tables = len([*run.glob("images/*/*.png")]), len([*run.glob("tables/*/*.json")])
    return stored


def tensorboard(folder: Path, project: str) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / project), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    stored = Stored(config=json.loads(only(folder / project, "*/hparams.yml").read_text()))
    stored.points = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    stored.images = sum(len(events.Images(tag)) for tag in events.Tags()["images"])
    (written,) = (path for path in (folder / project).glob("*/events*"))
    hyperparameters = EventAccumulator(str(written.parent))
    hyperparameters.Reload()
    assert "_hparams_/session_start_info" in hyperparameters.summary_metadata
    return stored


def records(path: Path, header: int, parse: Any) -> Iterator[Any]:
    """The records of a log in the framing of LevelDB (https://github.com/google/leveldb/blob/main/doc/log_format.md)."""
    data, offset, record = path.read_bytes(), header, b""
    while offset + 7 <= len(data):
        left = BLOCK - offset % BLOCK
        if left < 7:
            offset += left
            continue
        _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
        if length == 0 and kind == 0:
            return
        offset += 7
        record += data[offset : offset + length]
        offset += length
        if kind in (1, 4):
            yield parse(record)
            record = b""


def wandb(folder: Path, project: str) -> Stored:
    from wandb.proto.wandb_internal_pb2 import Record

    stored = Stored()
    path = only(folder / "wandb", "wandb/offline-run-*/run-*.wandb")
    for record in records(path, 7, Record.FromString):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            assert record.run.project == project
        updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else []
        for item in updates:
            stored.config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        if kind == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if not name.startswith("_") and isinstance(value, (int, float)):
                    stored.add(name, record.history.step.num, value)
        if kind == "artifact":
            stored.artifact = Path(record.artifact.manifest.contents[0].local_path).read_bytes() or stored.artifact
    run = path.parent / "files" / "media"
    stored.images, stored.tables = len([*run.glob("images/*.png")]), len([*run.glob("table/*.json")])
    return stored


def comet_ml(folder: Path, project: str) -> Stored:
    stored = Stored()
    with zipfile.ZipFile(only(folder / "comet_ml", "*.zip")) as archive:
        assert json.loads(archive.read("experiment.json"))["project_name"] == project
        for line in archive.read("messages.json").decode().splitlines():
            message = json.loads(line)
            payload = message["payload"]
            if message["type"] == "metric_msg" and not payload["metric"]["metricName"].startswith("sys."):
                metric = payload["metric"]
                stored.add(metric["metricName"], metric["step"], float(metric["metricValue"]))
            elif message["type"] == "parameter_msg":
                parameter = payload.get("param") or payload["params"]
                if parameter["source"] == "manual":
                    stored.config[parameter["paramName"]] = parameter["paramValue"]
            elif message["type"] == "file_upload":
                name = payload["additional_params"].get("fileName")
                stored.images += payload.get("upload_type") == "visualization"
                stored.tables += name == "predictions.csv"
                if name == "history.json":
                    stored.artifact = archive.read(Path(payload["file_path"]).name)
    return stored


def aim(folder: Path, project: str) -> Stored:
    from aim import Repo
    from aim.storage.context import Context

    # A repository is readable when its runs are indexed; the server does it by itself.
    command = [str(Path(sys.executable).parent / "aim"), "storage", "--repo", str(folder), "reindex", "-y"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    runs = [*Repo(str(folder)).iter_runs()]
    (run,) = runs
    assert run.name == project
    stored = Stored(config=run["hparams"])
    for metric in run.metrics():
        if not metric.name.startswith("__system__"):
            steps, (values, *_) = metric.data.items_list()
            stored.points[metric.name] = [*zip(steps, values, strict=True)]
    stored.images = len(run.get_image_sequence("input", Context({})).data.items_list()[0])
    stored.artifact = only(folder, ".aim/artifacts/*/history.json").read_bytes()
    return stored


def mlflow(folder: Path, project: str) -> Stored:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    assert run.info.status == "FINISHED"
    stored = Stored(config=run.data.params)
    for name in run.data.metrics:
        stored.points[name] = [
            (metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)
        ]
    artifacts = only(folder, f"mlflow/artifacts/{run.info.run_id}/artifacts")
    stored.artifact = (artifacts / "history.json").read_bytes()
    stored.images, stored.tables = len([*artifacts.glob("images/*.png")]), len([*artifacts.glob("predictions.json")])
    return stored


def clearml(folder: Path, project: str) -> Stored:
    session = only(folder, "clearml/offline/offline-*.zip").with_suffix("")
    task = json.loads((session / "task.json").read_text())
    assert task["name"] == project
    stored = Stored(config={name: entry["value"] for name, entry in task["hyperparams"]["General"].items()})
    for line in (session / "metrics.jsonl").read_text().splitlines():
        for event in json.loads(line):
            if event["type"] == "training_stats_scalar" and not event["metric"].startswith(":monitor:"):
                stored.add(event["variant"], event["iter"], event["value"])
            stored.tables += event["type"] == "plot" and event["metric"] == "predictions"
    stored.images = len([*session.glob("data/**/metrics/input/**/*.jpeg")])
    stored.artifact = only(session, "data/**/artifacts/history.json/history.json").read_bytes()
    return stored


def dvclive(folder: Path, project: str) -> Stored:
    import yaml

    stored = Stored(config=yaml.safe_load((folder / "dvclive" / "params.yaml").read_text()))
    for path in (folder / "dvclive" / "plots" / "metrics").glob("*.tsv"):
        with path.open(newline="") as file:
            stored.points[path.stem] = [
                (int(row["step"]), float(row[path.stem])) for row in csv.DictReader(file, delimiter="\t")
            ]
    summary = json.loads((folder / "dvclive" / "metrics.json").read_text())
    assert all(summary[name] == points[-1][1] for name, points in stored.points.items())
    stored.images = len([*(folder / "dvclive" / "plots" / "images").rglob("*.png")])
    return stored


def swanlab(folder: Path, project: str) -> Stored:
    import yaml

    run = only(folder / "swanlab", "run-*")
    entries = yaml.safe_load((run / "files" / "config.yaml").read_text())
    stored = Stored(config={name: entry["value"] for name, entry in entries.items()})
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    for record in records(only(run, "run-*.swanlab"), 7, Record.FromString):
        _swanlab_record(record, stored)
    stored.images = len([*run.glob("media/image/*.png")])
    return stored


def _swanlab_record(record: Any, stored: Stored) -> None:
    if record.HasField("scalar"):
        scalar = record.scalar
        stored.add(scalar.key, scalar.step, scalar.value.number)


def trackio(folder: Path, project: str) -> Stored:
    stored = Stored()
    with sqlite3.connect(folder / "trackio" / f"{project}.db") as database:
        for step, metrics in database.execute("select step, metrics from metrics order by step"):
            for name, value in json.loads(metrics).items():
                if isinstance(value, (int, float)):
                    stored.add(name, step, value)
        (config,) = database.execute("select config from configs").fetchone()
    database.close()
    stored.config = json.loads(config)
    stored.images = len([*(folder / "trackio" / "media").rglob("*.png")])
    (blob,) = (
        path
        for path in (folder / "trackio" / "artifacts").rglob("*")
        if path.is_file() and b'"loss"' in path.read_bytes()
    )
    stored.artifact = blob.read_bytes()
    return stored


READERS = {
    reader.__name__: reader
    for reader in (jsonl, tensorboard, wandb, comet_ml, aim, mlflow, clearml, dvclive, swanlab, trackio)
}


def environment(folder: Path) -> dict[str, str]:
    """The environment of a script that tracks: libraries find no user settings, and do not prompt."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ACCELERATE_", "TORCHELASTIC_", "WANDB", "MLFLOW"))
    }
    kept.update(
        HOME=str(folder),
        OMP_NUM_THREADS="1",
        AIM_UI_TELEMETRY_ENABLED="0",
        WANDB_SILENT="true",
        MLFLOW_DISABLE_TELEMETRY="true",
    )
    kept["WANDB__SERVICE_WAIT"] = "300"  # seconds that its service may take to come up
    return kept
