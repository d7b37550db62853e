"""A transformer trained on real text learns in 8 bits as in bfloat16, and resumes exactly."""

from __future__ import annotations

import copy
import functools
import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from accel_fp8 import FP8Recipe, autocast, convert, has_ao_layers, has_native_layers, synchronize

STEPS = 300
NATIVE = {"backend": "native"}
AO = {"backend": "ao"}
RECIPES: dict[str, dict[str, Any]] = {
    "native, delayed": {**NATIVE, "scaling": "delayed", "amax_history_len": 16, "amax_compute_algo": "max"},
    "native, dynamic": {**NATIVE, "scaling": "dynamic"},
    "native, rowwise": {**NATIVE, "scaling": "rowwise"},
    "ao": AO,
}


def _text_model() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fp8_text_model", Path(__file__).with_name("text_model.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules.get("fp8_text_model") or importlib.util.module_from_spec(spec)
    sys.modules["fp8_text_model"] = module
    spec.loader.exec_module(module)
    return module


text_model = _text_model()


def trainer(recipe: dict[str, Any] | None) -> Any:
    torch.manual_seed(0)
    model: nn.Module = text_model.LanguageModel()
    if recipe is None:
        return text_model.Trainer(model, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    convert(model, FP8Recipe(**recipe))
    return text_model.Trainer(model, lambda: autocast(model))


@functools.cache
def bfloat16_loss() -> float:
    return statistics.mean(trainer(None).run(0, STEPS)[-50:])


def needs(recipe: dict[str, Any]) -> None:
    if recipe["backend"] == "ao":
        pytest.importorskip("torchao", reason="the extra ao is not installed")


@pytest.mark.slow
@pytest.mark.timeout(900)  # 600 steps of training: 20 seconds of a core that has nothing else to do
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "native, rowwise"])
def test_300_steps_end_within_one_percent_of_bfloat16(name: str) -> None:
    needs(RECIPES[name])
    run = trainer(RECIPES[name])
    assert (has_ao_layers if name == "ao" else has_native_layers)(run.model)
    losses = run.run(0, STEPS)
    assert losses[0] > 4 and statistics.mean(losses[-50:]) < 2.6, "it learns"
    assert statistics.mean(losses[-50:]) == pytest.approx(bfloat16_loss(), rel=0.01)


# With a history of scales in its state; the other recipes have none.
@pytest.mark.parametrize(
    "name", ["native, delayed", *(pytest.param(name, marks=pytest.mark.slow) for name in list(RECIPES)[1:])]
)
def test_a_run_that_is_stopped_and_resumed_is_bit_for_bit_the_same(name: str) -> None:
    needs(RECIPES[name])
    run = trainer(RECIPES[name])
    run.run(0, 6)
    synchronize(run.model)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    expected = run.run(6, 12)
    again = trainer(RECIPES[name])
    again.model.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    assert again.run(6, 12) == expected
    states = run.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())
