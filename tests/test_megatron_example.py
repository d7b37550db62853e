"""The example of Megatron-core, through the launcher: the losses of one process, and a checkpoint of Transformers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workspace import ROOT

pytest.importorskip("megatron", reason="scripts/test-megatron makes an environment with Megatron-core")
# Five processes that import Transformers and Megatron-core, and another one that loads the checkpoint.
pytestmark = pytest.mark.timeout(600)


def run(*command: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    environment["OMP_NUM_THREADS"] = "1"
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=500, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step +\d+  loss (\d+\.\d+)", output)]


def test_the_example_trains_like_one_process_and_saves_a_checkpoint(tmp_path: Path) -> None:
    launch = ["-m", "accel_launch", "launch", "--cpu"]
    config = ["--config_file", "examples/megatron_configs/tp2_pp2.yaml"]
    script = ["examples/megatron_gpt.py", "--output_dir", str(tmp_path / "out"), "--simulate"]
    alone = losses(run(*launch, "--num_processes", "1", "examples/megatron_gpt.py"))
    output = run(*launch, *config, *script)
    assert "4 processes, MEGATRON_LM" in output
    together = losses(output)
    assert len(together) == 3 and together[-1] < together[0] - 1
    assert max(abs(left - right) for left, right in zip(alone, together, strict=True)) < 1e-5
    generated = run("examples/big_model.py", "--checkpoint", str(tmp_path / "out"))
    assert "generated 4 tokens" in generated
