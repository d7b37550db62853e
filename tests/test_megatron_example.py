"""The example of Megatron-core: in one process, on ranks as the launcher plans them, and its checkpoint elsewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from components.digits import LAUNCH, environment
from forks import run_alone, run_launched
from workspace import ROOT

pytest.importorskip("megatron", reason="scripts/test-megatron makes an environment with Megatron-core")
# A process, and the server of the ranks, import Transformers and Megatron-core, on a busy machine.
pytestmark = pytest.mark.timeout(600)


def losses(lines: list[str]) -> list[float]:
    return [float(loss) for loss in re.findall(r"step +\d+  loss (\d+\.\d+)", "\n".join(lines))]


def test_the_example_trains_like_one_process_and_saves_a_checkpoint(tmp_path: Path) -> None:
    script = ROOT / "examples" / "megatron_gpt.py"
    # In a new interpreter, which imports what the ranks, below, have got from their server.
    command = [*LAUNCH, "--cpu", "--num_processes", "1", str(script)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    alone = losses(done.stdout.splitlines())
    launch = ("--cpu", "--config_file", "examples/megatron_configs/tp2_pp2.yaml")
    output = run_launched(script, "--output_dir", tmp_path / "out", "--simulate", launch=launch, folder=ROOT)
    assert "4 processes, MEGATRON_LM" in output
    together = losses(output)
    assert len(together) == 3 and together[-1] < together[0] - 1
    assert max(abs(left - right) for left, right in zip(alone, together, strict=True)) < 1e-5
    generated = run_alone(ROOT / "examples" / "big_model.py", "--checkpoint", tmp_path / "out", folder=ROOT)
    assert "generated 4 tokens" in generated
