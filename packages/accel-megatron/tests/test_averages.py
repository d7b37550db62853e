"""Moving averages of the weights of Megatron-core, against torch's AveragedModel in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matrix
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel import Accelerator
from accel_megatron import MegatronLMPlugin
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

DECAY, WINDOW, STEPS, SAVED = 0.7, 2, 4, 2
SHARDED = {"use_distributed_optimizer": True}
TWO: list[matrix.Case] = [
    ("gpt2", {}),
    ("gpt2", {"tp_degree": 2}),
    ("gpt2", {"pp_degree": 2, "num_micro_batches": 2}),
    ("gpt2", SHARDED),
    ("gpt2", {**SHARDED, "other_megatron_args": {"overlap_param_gather": True, "overlap_grad_reduce": True}}),
    ("gpt2", {"use_custom_fsdp": True}),
    ("gpt2", {**SHARDED, "optimizer_cpu_offload": True}),
    ("llama", {"context_parallel_size": 2}),
    ("mixtral", {"expert_model_parallel_size": 2, **SHARDED}),
]
FOUR: list[matrix.Case] = [
    ("gpt2", {"tp_degree": 2, "pp_degree": 2, "sequence_parallelism": True}),
    ("gpt2", {"tp_degree": 2, **SHARDED}),
    ("gpt2", {"pp_degree": 2, "num_micro_batches": 2, **SHARDED}),
    ("mixtral", {"expert_model_parallel_size": 2}),
]


def model_and_optimizer(name: str) -> tuple[Any, torch.optim.Optimizer]:
    """AdamW, which all cases have, with an epsilon that does not amplify rounding."""
    model = matrix.create(name)
    if name == "gpt2":
        model.transformer.wpe.weight.requires_grad_(False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def batches(name: str) -> list[dict[str, torch.Tensor]]:
    """Batches with the same number of tokens on each rank, as in plain averages of losses."""
    found = matrix.batches(name, STEPS * WINDOW, matrix.create(name).config.vocab_size)
    return [{**batch, "labels": batch["input_ids"].clone()} for batch in found]


def expected(name: str) -> tuple[dict[str, Any], dict[str, Any], float]:
    model, optimizer = model_and_optimizer(name)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    data = batches(name)
    for step in range(STEPS):
        for batch in data[step * WINDOW : (step + 1) * WINDOW]:
            (model(**batch).loss / WINDOW).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    with torch.no_grad():
        loss = average.module(**data[0]).loss.item()
    return average.module.state_dict(), model.state_dict(), loss


class Run:
    def __init__(self, name: str, plugin: dict[str, Any], precision: str = "no", folder: str = "") -> None:
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=precision,
            gradient_accumulation_steps=WINDOW,
            megatron_lm_plugin=MegatronLMPlugin(**plugin),
        )
        self.model, self.optimizer = self.accelerator.prepare(*model_and_optimizer(name))
        self.average = self.accelerator.moving_average(self.model, DECAY)
        data = self.accelerator.strategy.data_collectives
        rows = matrix.ROWS // data.world_size
        part = slice(data.rank * rows, (data.rank + 1) * rows)
        self.batches = [{key: value[part] for key, value in batch.items()} for batch in batches(name)]
        if folder:
            self.accelerator.load_state(folder)

    def train(self, begin: int, end: int) -> None:
        for micro, batch in enumerate(self.batches[begin * WINDOW : end * WINDOW]):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch).loss)
                self.optimizer.step()
                assert self.average.update() == ((micro + 1) % WINDOW == 0)
                self.optimizer.zero_grad()
            if begin == 0 and micro in (2, 3):  # in an open window, and after it
                before = copied(self.accelerator.get_state_dict(self.model))
                with self.average.applied():
                    self.model(**batch)
                    if self.accelerator.sync_gradients:
                        with pytest.raises(ConfigurationError, match=r"optimizer\.step\(\) was called while moving"):
                            self.optimizer.step()
                after = self.accelerator.get_state_dict(self.model)
                assert all(torch.equal(value, after[name]) for name, value in before.items())

    def found(self) -> tuple[dict[str, Any], dict[str, Any], float]:
        with self.average.applied():
            loss = self.model(**self.batches[0]).loss.item()
            average = copied(self.accelerator.get_state_dict(self.model))
        return average, copied(self.accelerator.get_state_dict(self.model)), loss


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items()}


def train_all(cases: list[matrix.Case], folder: str, resumed_only: bool = False) -> list[Any]:
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    found = []
    for number, (name, plugin) in enumerate(cases):
        for resumed in (True,) if resumed_only else (False, True):
            run = Run(name, plugin, folder=f"{folder}/{number}" if resumed else "")
            if not resumed:
                run.train(0, SAVED)
                run.accelerator.save_state(f"{folder}/{number}")
            run.train(SAVED, STEPS)
            found.append((name, plugin, run.found()))
            matrix.close(run.accelerator)
    return found


def check(found: list[Any]) -> None:
    plain = {name: expected(name) for name in {name for name, *_ in found}}
    for name, plugin, (average, weights, loss) in found:
        where = f"{name} {plugin}"
        for state, wanted in ((average, plain[name][0]), (weights, plain[name][1])):
            assert set(state) == set(wanted), where
            for key, value in wanted.items():
                torch.testing.assert_close(state[key], value, atol=1e-6, rtol=0, msg=f"{where}: {key}")
        assert loss == pytest.approx(plain[name][2], abs=1e-5), where


@pytest.mark.timeout(300)
def test_averages_equal_those_of_one_process(tmp_path: Path) -> None:
    found = run_world(train_all, 2, TWO, str(tmp_path), timeout=280)[0]
    assert len(found) == 2 * len(TWO)
    check(found)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_averages_on_four_ranks(tmp_path: Path) -> None:
    check(run_world(train_all, 4, FOUR, str(tmp_path), timeout=480)[0])


@pytest.mark.timeout(200)
def test_averages_load_at_other_sizes_and_of_one_process(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run_world(train_all, 2, [("gpt2", SHARDED)], str(tmp_path), timeout=100)
    check(run_world(train_all, 2, [("gpt2", {"tp_degree": 2})], str(tmp_path), True, timeout=100)[0])
    (accelerator,) = run_world(train_plain, 1, str(tmp_path / "one"))
    saved = load_file(tmp_path / "0" / "moving_average.safetensors")
    assert saved.keys() == accelerator.keys()
    for key, value in accelerator.items():
        torch.testing.assert_close(saved[key], value, atol=1e-6, rtol=0, msg=key)


def train_plain(folder: str) -> dict[str, torch.Tensor]:
    """The averages that an Accelerator in one process saves after the same steps."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    model, optimizer = accelerator.prepare(*model_and_optimizer("gpt2"))
    average = accelerator.moving_average(model, DECAY)
    for batch in batches("gpt2")[: SAVED * WINDOW]:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            average.update()
            optimizer.zero_grad()
    return average.averages


HALF = [("gpt2", "bf16", {"tp_degree": 2}), ("gpt2", "bf16", SHARDED), ("gpt2", "fp16", {}), ("gpt2", "fp16", SHARDED)]


def follow(cases: list[Any], folder: str) -> list[Any]:
    """Averages in half precision, and averages of the float32 weights after each step."""
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    found = []
    for name, precision, plugin in cases:
        run = Run(name, plugin, precision)
        wanted: dict[str, torch.Tensor] = {}
        for batch in run.batches:
            with run.accelerator.accumulate(run.model):
                run.accelerator.backward(run.model(**batch).loss)
                run.optimizer.step()
                updated = run.average.update()
                assert updated == (run.accelerator.sync_gradients and not run.optimizer.step_was_skipped)
                run.optimizer.zero_grad()
            for key, value in run.accelerator.get_state_dict(run.model).items() if updated else ():
                wanted[key] = wanted[key].lerp(value, 1 - DECAY) if key in wanted else value.clone()
        average, weights, _ = run.found()
        _, again, _ = run.found()
        assert all(torch.equal(value, again[key]) for key, value in weights.items())
        run.average.copy_to_model()
        with torch.no_grad():
            run.model(**run.batches[0])
        found.append((average, wanted, copied(run.accelerator.get_state_dict(run.model))))
        matrix.close(run.accelerator)
    return found


@pytest.mark.timeout(200)
def test_averages_in_half_precision_are_those_of_the_float32_weights(tmp_path: Path) -> None:
    found = run_world(follow, 2, HALF, str(tmp_path), timeout=180)[0]
    assert len(found) == len(HALF)
    for case, (average, wanted, kept) in zip(HALF, found, strict=True):
        for key, value in wanted.items():
            torch.testing.assert_close(average[key], value, atol=1e-6, rtol=0, msg=f"{case}: {key}")
            assert torch.equal(kept[key], average[key]), (case, key)


def refuse() -> list[str]:
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    model = accelerator.prepare(matrix.create("gpt2"))
    with pytest.raises(ConfigurationError) as caught:
        accelerator.moving_average(model)
    matrix.close(accelerator)
    return [str(caught.value)]


def test_models_without_an_optimizer_are_refused() -> None:
    assert "prepared without an optimizer. Pass both" in run_world(refuse, 2)[0][0]
