"""``accel slurm``: the batch scripts that it writes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from accel_launch.commands.slurm import run
from accel_state.errors import ConfigurationError


def written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(list(words)) == 0
    return capsys.readouterr().out


def run_script(text: str, folder: Path, code: int = 0) -> tuple[list[str], int]:
    """Run a batch script as a shell does, with an ``accel`` that notes its arguments and ends with a code."""
    folder.joinpath("bin").mkdir()
    for name, end in (("accel", code), ("scontrol", 0)):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@" >> "{folder}/called"\nexit {end}\n')
        program.chmod(0o755)
    (folder / "job.sh").write_text(text)
    env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    result = subprocess.run(["bash", "job.sh"], cwd=folder, env=env, timeout=60, check=False)
    called = folder / "called"
    return called.read_text().splitlines() if called.exists() else [], result.returncode


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_the_job_and_its_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = ["--nodes", "4", "--gpus-per-node", "8", "--time", "1-04:00:00", "--mem", "64G", "--sbatch=--constraint=a100"]
    text = written(capsys, *job, "--mixed_precision", "bf16", "train.py", "--name", "a b; $(date)")
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    assert directives(text) == ["--job-name=train", "--nodes=4", "--gpus-per-node=8", "--mem=64G",
                                "--time=1-04:00:00", "--output=%x-%j.out", "--constraint=a100"]  # fmt: skip
    called, code = run_script(text, tmp_path)
    assert called == ["accel", "launch", "--mixed_precision", "bf16", "train.py", "--name", "a b; $(date)"] and not code


def test_the_exit_code_is_that_of_the_launch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    called, code = run_script(written(capsys, "train.py"), tmp_path, code=3)
    assert called == ["accel", "launch", "train.py"] and code == 3


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (1, False), (0, False)])
def test_a_job_that_continues_is_requeued(
    code: int, requeued: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = written(capsys, "--requeue-before", "120", "train.py")
    assert {"--signal=USR1@120", "--requeue", "--open-mode=append"} <= set(directives(text))
    called, ended = run_script(text, tmp_path, code)
    assert called == ["accel", "launch", "train.py", *(["scontrol", "requeue", "7"] if requeued else [])]
    assert ended == code


def test_what_comes_before_the_launch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = written(capsys, "--setup", "touch before", "--venv", "my env", "train.py")
    called, code = run_script(text, tmp_path)
    assert called == [] and code == 1, "without the environment, nothing starts"
    (tmp_path / "my env" / "bin").mkdir(parents=True)
    (tmp_path / "my env" / "bin" / "activate").write_text("touch activated\n")
    result = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
                            timeout=60, check=False)  # fmt: skip
    assert result.returncode == 0 and (tmp_path / "before").exists() and (tmp_path / "activated").exists()


def test_a_file_is_never_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "job.sh"
    assert run(["--output", str(target), "train.py"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and "sbatch" in shown.err and os.access(target, os.X_OK)
    target.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"job\.sh exists"):
        run(["--output", str(target), "train.py"])
    assert target.read_text() == "mine"
    (tmp_path / "link.sh").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match=r"link\.sh"):
        run(["--output", str(tmp_path / "link.sh"), "train.py"])
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(ConfigurationError, match="missing"):
        run(["--output", str(tmp_path / "missing" / "job.sh"), "train.py"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--nodes", "0", "train.py"], "'0'"),
        (["--nodes", "two", "train.py"], "'two'"),
        (["--time", "soon", "train.py"], "'soon'"),
        (["--mem", "64 GB", "train.py"], "'64 GB'"),
        (["--partition", "a\n#SBATCH --mail-user=x", "train.py"], "one line"),
        (["--setup", "true\nfalse", "train.py"], "one line"),
        (["--num_machines", "2", "train.py"], "--num_machines"),
        (["--mixed_precision", "fp61", "train.py"], "fp61"),
        (["--mixed_precison", "fp16", "train.py"], "--mixed_precision"),
        (["--nodes", "2"], "no script"),
        (["--gpus-per-node", "4", "--cpu", "train.py"], "--gpus-per-node 4 and --cpu contradict"),
    ],
)
def test_wrong_words_are_named(words: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        run(words)
