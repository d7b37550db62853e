"""Runs functions in forked processes, which start with everything this process has imported, and scripts that do so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from workspace import ROOT


def preload(imports: str) -> None:
    """Import before the forks what each of them would."""
    exec(imports, {})
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch's compiler, which takes a second


def forked(function: Callable[[], list[str]], name: str, seconds: int = 120) -> list[str]:
    """What the function returns in a process and an empty directory of its own, or that the process ended early."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        code = 1
        try:
            signal.alarm(seconds)
            os.chdir(tempfile.mkdtemp(dir="."))
            result = function()
            with os.fdopen(write, "w", encoding="utf-8") as pipe:
                json.dump(result, pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    found: list[str] = json.loads(text) if text else [f"{name}: the process ended with status {status}"]
    return found


def report_of(script: Path, folder: Path, seconds: int, stdin: str | None = None) -> Any:
    """What a script that forks prints as JSON on its last line, run in a folder, without the launcher's variables."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    # Pages name accel-megatron too, whose sources import without Megatron-core.
    paths = [str(ROOT / "packages" / "accel-megatron" / "src"), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    result = subprocess.run(
        [sys.executable, str(script)],
        input=stdin,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=seconds,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])
