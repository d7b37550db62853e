"""Models of Transformers in every placement, loaded by accel and by from_pretrained on accel; see issue 19."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = (
    "Llama", "GPT-2", "GPT-NeoX", "T5", "BERT", "Mixtral", "Qwen2-MoE", "Gemma", "Phi", "Whisper", "ViT"
)  # fmt: skip
LOADERS = {"load_checkpoint_and_dispatch", "from_pretrained"}


# 66 loads and 10 comparisons of generated tokens, after an import of Transformers: over 20 s.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="requires transformers")
@pytest.mark.skipif(importlib.util.find_spec("accel_compat") is None, reason="requires accel-compat")
def test_every_architecture_in_every_placement(capsys: pytest.CaptureFixture[str]) -> None:
    """A process of its own: `accelerate` is accel in it from the start."""
    script = Path(__file__).with_name("model_architectures.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = []
    for result in results:
        tokens = ", ".join(f"{cache}: {text}" for cache, text in result.get("generate", {}).items())
        counts = f"{result['on disk']} of {result['tensors']} on disk, {result['shards']} shards"
        equal = ("equal" if result["to the bit"] else "close") if result["equal"] else "DIFFERENT"
        rows.append(
            f"{result['model']:<10}{result['placement']:<15}{result['loader']:<29}{equal:<10}{counts}  {tokens}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(rows))
    combinations = {(result["model"], result["placement"], result["loader"]) for result in results}
    for model in MODELS:
        wanted = {(model, placement, loader) for placement in ("cpu", "disk", "mixed") for loader in LOADERS}
        assert wanted <= combinations
    for result in results:
        assert result["equal"] and result["shards"] > 1, result
        fraction = result["on disk"] / result["tensors"]
        expected = {"cpu": fraction == 0, "disk": fraction > 0.9}.get(result["placement"], 0 < fraction < 1)
        assert expected, result
    generated = [(result, tokens) for result in results for tokens in result.get("generate", {}).items()]
    assert not [result for result, (_, text) in generated if text == "DIFFERENT"]
    # A cache that even the model in memory cannot use here, such as the offloaded one without CUDA, proves nothing.
    assert {cache for _, (cache, text) in generated if text == "equal"} >= {"dynamic", "static", "quantized"}
