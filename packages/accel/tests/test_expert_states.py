"""States of models with distributed experts load with any other number of ranks for them; and the load of experts."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_runs import (
    BLOCKS,
    EXPERTS,
    SAMPLES,
    accelerator_for,
    batches,
    build,
    loss_of,
    loss_on,
    optimizer_of,
    plain,
    skew,
    train,
)
from safetensors.torch import load_file
from torch import nn
from transformers_5 import needs_transformers_5

from accel import Accelerator
from accel.parallel.axis_settings import PipelineParallelConfig
from accel.utils import expert_load
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

FULL = {**BLOCKS, "state_dict_type": "FULL_STATE_DICT"}
SAVERS: dict[int, dict[str, tuple[dict[str, int], dict[str, Any]]]] = {
    2: {"two": ({"dp_shard_size": 2, "ep_size": 2}, BLOCKS)},
    4: {
        "half": ({"dp_shard_size": 4, "ep_size": 2}, BLOCKS),
        "layers": ({"dp_shard_size": 2, "tp_size": 2, "ep_size": 4}, BLOCKS),
        "full": ({"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2}, FULL),
    },
}
LOADED: dict[int, list[tuple[str, dict[str, int]]]] = {
    2: [("half", {"dp_shard_size": 2, "ep_size": 2}), ("full", {"tp_size": 2, "ep_size": 2})],
    4: [
        ("two", {"dp_shard_size": 4, "ep_size": 2}),
        ("half", {"dp_shard_size": 4, "ep_size": 4}),
        ("half", {"dp_shard_size": 4}),
        ("layers", {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2}),
        ("full", {"dp_shard_size": 2, "tp_size": 2, "ep_size": 2}),
    ],
}
KIND = "deepseek"  # without auxiliary loss, which only distributed experts compute from the tokens of all ranks


def steps(accelerator: Accelerator, model: nn.Module, optimizer: Any, chosen: torch.Tensor) -> list[float]:
    losses = []
    for tokens in chosen:
        loss = loss_on(accelerator, model, tokens)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def prepared(sizes: dict[str, int], fsdp: dict[str, Any] | None, seed: int) -> tuple[Accelerator, Any, Any]:
    accelerator = accelerator_for(sizes, fsdp if "dp_shard_size" in sizes else None)
    model = build(KIND, seed)
    return (accelerator, *accelerator.prepare(model, optimizer_of(model)))


def save(folder: Path, cases: dict[str, tuple[dict[str, int], dict[str, Any]]]) -> dict[str, Any]:
    found = {}
    for name, (sizes, fsdp) in cases.items():
        accelerator, model, optimizer = prepared(sizes, fsdp, seed=0)
        steps(accelerator, model, optimizer, batches(4)[:2])
        accelerator.save_state(str(folder / name))
        accelerator.save_model(model, str(folder / f"{name} model"))
        weights = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
        found[name] = weights, steps(accelerator, model, optimizer, batches(4)[2:])
        accelerator.free_memory()
    return found


def load(folder: Path, cases: list[tuple[str, dict[str, int]]]) -> list[Any]:
    found = []
    for name, sizes in cases:
        accelerator, model, optimizer = prepared(sizes, BLOCKS, seed=3)
        accelerator.load_state(str(folder / name))
        weights = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
        found.append((weights, steps(accelerator, model, optimizer, batches(4)[2:])))
        accelerator.free_memory()
    return found


@pytest.mark.slow  # four launches, with ten models in all
def test_states_load_with_any_other_number_of_ranks_for_experts(tmp_path: Path) -> None:
    saved: dict[str, Any] = {}
    for size, cases in SAVERS.items():
        saved.update(run_world(save, size, tmp_path, cases, timeout=250)[0])
    for size, wanted in LOADED.items():
        for case, found in zip(wanted, run_world(load, size, tmp_path, wanted, timeout=250)[0], strict=True):
            check(found, saved[case[0]], case)
    for name in saved:
        check(in_one_process(tmp_path / name), saved[name], name)
        exported = load_file(tmp_path / f"{name} model" / "model.safetensors")
        assert all(torch.equal(exported[key], value) for key, value in saved[name][0].items()), name


def in_one_process(state: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    accelerator = Accelerator(cpu=True)
    model = build(KIND, seed=3)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    accelerator.load_state(str(state))
    weights = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
    losses = []
    for tokens in batches(4)[2:]:
        loss = loss_of(model, tokens)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return weights, losses


def check(found: Any, expected: Any, what: Any) -> None:
    assert set(found[0]) == set(expected[0]), what
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), (what, name)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=0, msg=lambda text: f"{what}: {text}")


def counted(routing: str) -> dict[str, Any]:
    accelerator = accelerator_for({"dp_shard_size": 2, "ep_size": 2}, {**BLOCKS, "activation_checkpointing": True})
    model = build("mixtral")
    skew(model, routing)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    steps(accelerator, model, optimizer, batches(2))
    first = expert_load(model, reset=False)
    model.eval()
    with torch.no_grad():
        loss_of(model, batches(1)[0])
    same = expert_load(model)
    return {
        "tokens": {name: counts.tolist() for name, counts in first.tokens.items()},
        "again": all(torch.equal(counts, same.tokens[name]) for name, counts in first.tokens.items()),
        "values": first.values(),
        "after": expert_load(model).values(),
    }


@needs_transformers_5
def test_the_load_counts_each_token_of_training_once() -> None:
    ranks = run_world(counted, 2, "two", timeout=250)
    assert ranks[0] == ranks[1]
    tokens = 2 * SAMPLES * 9
    layers = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert ranks[0]["tokens"] == {name: [tokens, tokens, *[0] * (EXPERTS - 2)] for name in layers}
    assert ranks[0]["again"]
    assert ranks[0]["values"] == {
        "experts/tokens": 2.0 * 2 * tokens,
        "experts/dropped_tokens": 0.0,
        "experts/imbalance": EXPERTS / 2,
        "experts/idle": 2.0 * (EXPERTS - 2),
        **{f"experts/imbalance/{name}": EXPERTS / 2 for name in layers},
    }
    assert ranks[0]["after"]["experts/tokens"] == 0 and ranks[0]["after"]["experts/imbalance"] == 1


def test_only_models_with_distributed_experts_have_a_load() -> None:
    with pytest.raises(ConfigurationError) as raised:
        expert_load(nn.Linear(2, 2))
    assert "Linear" in str(raised.value)


RATE = 0.05


class Rule:
    """The rule of arXiv:2408.15664 in one process, by hand, from what the routers choose."""

    def __init__(self) -> None:
        self.total: dict[str, list[int]] = {}
        self._counts: dict[str, torch.Tensor] = {}

    def observe(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if hasattr(module, "e_score_correction_bias"):
                module.register_forward_hook(partial(self._count, name.replace(".gate", ".experts")))

    def _count(self, name: str, router: nn.Module, inputs: Any, output: Any) -> None:
        chosen = torch.bincount(output[2].reshape(-1), minlength=EXPERTS)
        self._counts[name] = self._counts.get(name, 0) + chosen
        self.total[name] = (torch.tensor(self.total.get(name, [0] * EXPERTS)) + chosen).tolist()

    def step(self, model: nn.Module) -> None:
        for name, load in self._counts.items():
            router = model.get_submodule(name.replace(".experts", ".gate"))
            router.e_score_correction_bias += RATE * torch.sign(load.float().mean() - load)
        self._counts.clear()


def balanced() -> dict[str, Any]:
    accelerator = accelerator_for({"dp_shard_size": 2, "ep_size": 2}, BLOCKS, RATE, gradient_accumulation_steps=2)
    return train(accelerator, KIND, 6, window=2)


@needs_transformers_5
def test_the_bias_moves_once_a_step_from_busy_experts_to_idle_ones() -> None:
    rule = Rule()
    expected = plain(KIND, 6, window=2, after_step=rule.step, observe=rule.observe)
    found = run_world(balanced, 2, timeout=250)[0]
    names = [name for name in expected["weights"] if name.endswith("e_score_correction_bias")]
    assert names and all(expected["weights"][name].abs().max() > RATE for name in names)
    for name in names:
        torch.testing.assert_close(found["weights"][name], expected["weights"][name], rtol=0, atol=1e-6)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0)


PIPELINE = {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2}


def pipelined() -> dict[str, Any]:
    interleaved = PipelineParallelConfig(schedule="interleaved1f1b", num_microbatches=2)
    accelerator = accelerator_for(PIPELINE, BLOCKS, RATE, interleaved)
    model = build(KIND, num_hidden_layers=4)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    losses = steps(accelerator, model, optimizer, batches(3))
    weights = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
    model.eval()
    with torch.no_grad():
        loss_of(model, batches(1)[0])
    return {"losses": losses, "weights": weights, "load": expert_load(model).tokens}


@pytest.mark.slow  # four ranks
def test_pipelines_count_and_balance_the_experts_of_all_stages() -> None:
    rule = Rule()
    expected = plain(KIND, 3, max_norm=float("inf"), after_step=rule.step, observe=rule.observe, num_hidden_layers=4)
    ranks = run_world(pipelined, 4, timeout=250)
    torch.testing.assert_close(ranks[0]["losses"], expected["losses"], rtol=1e-5, atol=0)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], value, rtol=0, atol=1e-4, msg=name)
    for rank in ranks:
        assert {name: counts.tolist() for name, counts in rank["load"].items()} == rule.total
