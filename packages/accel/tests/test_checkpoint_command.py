"""``accel checkpoint list`` and ``accel checkpoint verify``."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoint_runs import Run, as_of_another_library, project

from accel import Accelerator
from accel_checkpoint.manifest import MANIFEST_NAME, Manifest
from accel_checkpoint.names import CheckpointError
from accel_launch.cli import main

TORCH_FREE = (
    "import sys; from accel_launch.cli import main; code = main(sys.argv[1:]); sys.exit(9 if 'torch' in "
    "sys.modules else code)"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = Run(project_config=project(tmp_path))
    run.accelerator.save_state()
    run.train(1)
    run.accelerator.save_state()
    return tmp_path / "checkpoints"


def run_torch_free(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TORCH_FREE, "checkpoint", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_list_shows_every_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "checkpoint_0" / "optimizer.bin").unlink()
    (folder / ".checkpoint_7.accel-partial").mkdir()
    (folder / "notes").mkdir()
    for place in (folder, folder.parent):
        assert main(["checkpoint", "list", str(place)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["NAME", "STEP", "SIZE", "AGE", "PROCESSES", "STATE"] and len(lines) == 4
        rows = {line.split()[0]: line for line in lines[1:]}
        assert rows["checkpoint_0"].endswith("incomplete: missing or of another size: optimizer.bin")
        assert (
            rows["checkpoint_1"].endswith("complete")
            and rows["checkpoint_1"].split()[1] == "8"
            and " KiB " in rows["checkpoint_1"]
        )
        assert rows[".checkpoint_7.accel-partial"].endswith("incomplete: was never finished")


def test_list_as_json(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    as_of_another_library(folder / "checkpoint_0")
    manifest = Manifest.read(folder / "checkpoint_1")
    assert manifest is not None
    now = datetime.fromisoformat(manifest.saved_at).timestamp() + 90.04
    monkeypatch.setattr("accel_checkpoint.commands.checkpoint.time", SimpleNamespace(time=lambda: now))
    assert main(["checkpoint", "list", "--json", str(folder)]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["checkpoint_0"]["complete"] and found["checkpoint_0"]["optimizer_steps"] is None
    newest = found["checkpoint_1"]
    assert newest["complete"] and newest["optimizer_steps"] == 8 and newest["world_size"] == 1 and newest["age"] == 90.0
    assert newest["size"] == sum(path.stat().st_size for path in (folder / "checkpoint_1").iterdir())


def test_verify_names_every_damaged_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = folder / "checkpoint_1"
    assert main(["checkpoint", "verify", str(state)]) == 0
    assert "all 6 files are intact" in capsys.readouterr().out
    content = bytearray((state / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (state / "model.safetensors").write_bytes(content)
    (state / "optimizer.bin").write_bytes(b"")
    (state / "scheduler.bin").unlink()
    assert main(["checkpoint", "verify", str(state)]) == 1
    told = capsys.readouterr().err
    for name, problem in (
        ("model.safetensors", "contents differ"),
        ("optimizer.bin", "has another size"),
        ("scheduler.bin", "missing"),
    ):
        assert f"{state / name}: {problem}" in told
    assert main(["checkpoint", "verify", "--json", str(state)]) == 1
    assert set(json.loads(capsys.readouterr().out)["damaged"]) == {
        "model.safetensors",
        "optimizer.bin",
        "scheduler.bin",
    }


@pytest.mark.parametrize(("content", "problem"), [(None, "missing"), ("{", "is damaged")])
def test_verify_without_a_usable_manifest(
    folder: Path, content: str | None, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "checkpoint_1" / MANIFEST_NAME
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert main(["checkpoint", "verify", str(path.parent)]) == 1
    told = capsys.readouterr().err
    assert MANIFEST_NAME in told and problem in told


def test_no_torch_is_loaded(folder: Path) -> None:
    for words in (["list", str(folder)], ["verify", str(folder / "checkpoint_0")]):
        result = run_torch_free(*words)
        assert result.returncode == 0, result.stderr
    with_help = (
        f"import sys; {TORCH_FREE.split('; ')[1]}\ntry: main(['checkpoint', '--help'])\nexcept SystemExit: "
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", with_help], capture_output=True, text=True, timeout=60, check=True)
    assert "verify" in result.stdout and result.stdout.endswith("False\n")


def test_paths_that_are_no_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(empty)
    for words, text in [
        (["list", "none"], f"none does not exist (looked in {empty})"),
        (["verify", "none"], "none does not exist"),
        (["list", "../file"], "../file is a file"),
        (["list", "."], f"{empty} contains no checkpoint. Give"),
        (["verify", "."], f"{empty} is not a checkpoint: it has no {MANIFEST_NAME}"),
        (["verify", str(folder)], "is not a checkpoint but contains some: checkpoint_0"),
        (["list", str(folder / "checkpoint_0")], "is a checkpoint itself"),
    ]:
        assert main(["checkpoint", *words]) == 2
        assert text in capsys.readouterr().err
    assert main(["checkpoint", "list", "--json", "."]) == 0 and json.loads(capsys.readouterr().out) == []
    with pytest.raises(CheckpointError, match=f"{empty} is not a checkpoint"):
        Accelerator(cpu=True).load_state(".")
