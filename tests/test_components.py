"""`scripts/components --without` runs a command as on the machine of a new user, whatever is installed here."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from workspace import ROOT

SCRIPT = ROOT / "scripts" / "components"
PROGRAMS = ("mpirun", "mpiexec", "mpirun.openmpi", "srun", "slurmctld", "sshd", "ssh", "pdsh", "ip", "munged")


def _without(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), "--without", "bash", "-c", command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_program_of_a_component_is_found(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in (*PROGRAMS, "kept"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho found\n")
        (tmp_path / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    done = _without(
        f"for name in {' '.join(PROGRAMS)}; do command -v $name; done; kept; git --version; echo $PATH; exit 3",
        PATH=path,
    )
    found, git, folder = done.stdout.splitlines()
    assert (done.returncode, found, git.split()[0]) == (3, "found", "git"), done.stdout + done.stderr
    assert not Path(folder).exists(), "the folder of links is removed"


def test_no_environment_of_a_component_is_found(monkeypatch) -> None:
    from components import environments

    done = _without("env")
    names = re.findall(r"^ACCEL_(\w+)_PYTHON=", done.stdout, re.MULTILINE)
    listed = re.findall(r"^    \[(\w+)\]=.*==", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(names) == sorted(name.upper() for name in listed) and len(names) >= 4
    monkeypatch.delenv("ACCEL_TPU_PYTHON", raising=False)
    assert environments.find("tpu").name == "python"


def test_daemons_are_found_next_to_a_bin_of_the_path(tmp_path: Path, monkeypatch) -> None:
    from components.slurm import find

    (tmp_path / "sbin").mkdir()
    (tmp_path / "sbin" / "slurmd").write_text("#!/bin/sh\n")
    (tmp_path / "sbin" / "slurmd").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find("slurmd") == str(tmp_path / "sbin" / "slurmd")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find("slurmd") is None
