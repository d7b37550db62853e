"""The DeepSpeed examples: the configurations on real text, and two models at once."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from forks import run_launched
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from workspace import ROOT

EXAMPLES = ROOT / "examples"
CONFIGS = EXAMPLES / "deepspeed_configs"
SIZE = ("--epochs", "1", "--sentences", "16")
TWO_RANKS = ("--cpu", "--num_processes", 2, "--use_deepspeed")
LOSSES = re.compile(r"^losses: (.+)$", re.MULTILINE)

pytest.importorskip("transformers")
# Two ranks that import deepspeed, up to three times: half a minute on two cores.
pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed: scripts/test tells why"),
    pytest.mark.slow,
    pytest.mark.timeout(1900),
]


def launch(options: tuple[object, ...], script: Path, *words: object) -> str:
    """The output of a script in the processes that the launcher plans."""
    # The configurations of accel name those of DeepSpeed from the root.
    return "\n".join(run_launched(script, *words, launch=options, folder=ROOT, seconds=600))


def module(name: str):
    sys.path.insert(0, str(EXAMPLES))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def named(folder: Path) -> dict[str, torch.Tensor]:
    """Saved weights; Transformers uses older names for some of them when a sharded model is saved."""
    weights = load_file(folder / "model.safetensors")
    return {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): weights[name]
        for name in weights
    }


def worst(folder: Path, reference: Path) -> float:
    """The largest difference between saved weights."""
    found, expected = named(folder), named(reference)
    assert set(found) == set(expected)
    return max((found[name].float() - value.float()).abs().max().item() for name, value in expected.items())


def test_text_example_with_the_plugin(tmp_path: Path) -> None:
    """Stage 2, and stage 3 with offload, learn the same weights as DDP."""
    if not any(
        Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache/torch_extensions")).rglob("cpu_adam.so")
    ):
        pytest.importorskip("ninja", reason="DeepSpeed compiles its optimizer for host memory with ninja")
    script, words = EXAMPLES / "text_classification.py", (*SIZE, "--gradient_accumulation_steps", "1")
    launch(("--cpu", "--num_processes", 2), script, *words, "--output_dir", tmp_path / "ddp")
    for name in ("plugin_stage2", "plugin_stage3_offload"):
        config = ("--config_file", CONFIGS / f"{name}.yaml")
        output = launch(config, script, *words, "--output_dir", tmp_path / name)
        assert re.search(r"test accuracy: 0\.\d{3} on 16 sentences", output), output
        # Weights of 0.1 and more, after 3 steps of 2e-4 at most.
        assert worst(tmp_path / name, tmp_path / "ddp") < 1e-4, name


def test_text_example_with_a_deepspeed_configuration(tmp_path: Path) -> None:
    """With DeepSpeed's optimizer and scheduler, stage 3 with offload gives the weights of stage 2."""
    script = EXAMPLES / "deepspeed_text.py"
    names = ("json_stage2", "json_stage3_offload")
    outputs = [
        launch(("--config_file", CONFIGS / f"{name}.yaml"), script, *SIZE, "--output_dir", tmp_path / name)
        for name in names
    ]
    said = [
        re.search(r"DEEPSPEED, last loss (\d\.\d{4})\ntest accuracy: (0\.\d{3}) on 16", output) for output in outputs
    ]
    assert said[0] and said[1] and said[0][2] == said[1][2], outputs
    assert float(said[0][1]) == pytest.approx(float(said[1][1]), abs=2e-4), "the last of the four digits is rounded"
    assert worst(tmp_path / names[1], tmp_path / names[0]) < 1e-4


def test_a_student_and_a_teacher() -> None:
    output = launch(TWO_RANKS, EXAMPLES / "deepspeed_models.py", "--task", "distillation")
    example = module("deepspeed_models")
    student, teacher = example.make(16, 1, seed=1), example.make(32, 2, seed=2).eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3, weight_decay=0.0)
    # The 4 warm-up steps are those of a torch scheduler, which advances by two steps on two processes. DeepSpeed's
    # first two steps use the rate of before the warm-up.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, max(0, step - 1) / 2))
    expected = []
    for batch in DataLoader(example.Sequences(20 * example.BATCH), batch_size=example.BATCH):
        loss = example.joint_loss(teacher, student, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    found = [[float(word) for word in line.split()] for line in LOSSES.findall(output)]
    assert "teacher: 19812 parameters, sharded" in output
    assert found == [pytest.approx(expected, abs=1e-4)] * 2
    assert expected[-1] < expected[0] - 0.03


def test_two_models_with_two_accelerators() -> None:
    output = launch(TWO_RANKS, EXAMPLES / "deepspeed_models.py", "--task", "disjoint")
    example = module("deepspeed_models")
    models = example.make(16, 1, seed=1), example.make(24, 1, seed=3)
    optimizers = torch.optim.AdamW(models[0].parameters(), lr=5e-3), torch.optim.SGD(models[1].parameters(), lr=5e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 5, 0.5)
    expected = []
    for batch in DataLoader(example.Sequences(20 * example.BATCH), batch_size=example.BATCH):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
        scheduler.step()
    found = [[float(word) for word in line.split()] for line in LOSSES.findall(output)]
    assert found == [pytest.approx(expected, abs=1e-4)] * 2
