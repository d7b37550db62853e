"""Low-rank adapters (PEFT) of mixtures whose experts are distributed, compared with one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import expert_runs
import pytest
import torch
from expert_runs import BLOCKS, accelerator_for, batches, compare, loss_of, loss_on, optimizer_of, plain, train
from torch import nn

from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="the clients' environment has PEFT"),
    pytest.mark.timeout(600),
]

ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
plain_build = expert_runs.build


def build(kind: str, seed: int = 0, adapters: Any = None, **changes: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = plain_build(kind, seed, **changes)
    if adapters is None:
        return model
    return get_peft_model(model, LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, **adapters))


@dataclass(frozen=True)
class Case:
    """A mixture with adapters on a mesh."""

    kind: str
    adapters: dict[str, list[str]]
    sizes: dict[str, int]
    fsdp: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)


TWO = [
    Case(kind, adapters, {"dp_shard_size": 2, "ep_size": 2})
    for kind, adapters in (
        ("qwen3", ATTENTION),
        ("qwen3", EXPERTS),
        ("mixtral", EXPERTS),
        ("llama4", EXPERTS),
        ("deepseek", EXPERTS),
    )
]
TWO.append(Case("gpt oss", EXPERTS, {"dp_shard_size": 2, "ep_size": 2}, {"activation_checkpointing": True}))
FOUR = [
    Case("qwen3", EXPERTS, {"dp_shard_size": 4, "ep_size": 2}),
    Case("mixtral", ATTENTION, {"dp_shard_size": 4, "ep_size": 2}),
    Case("qwen3", EXPERTS, {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2}),
    Case("llama4", EXPERTS, {"dp_shard_size": 2, "cp_size": 2, "ep_size": 4}),
    Case("qwen3", EXPERTS, {"dp_shard_size": 2, "cp_size": 2, "ep_size": 2}),
    # A pipeline refuses the auxiliary loss.
    Case("qwen3", ATTENTION, {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2}, {}, {"output_router_logits": False}),
    Case("qwen3", EXPERTS, {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2}, {}, {"output_router_logits": False}),
]


def trained(cases: list[Case]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        with context.isolated(), mock.patch.object(expert_runs, "build", build):
            accelerator = accelerator_for(case.sizes, {**BLOCKS, **case.fsdp})
            found.append(train(accelerator, case.kind, 4, adapters=case.adapters, length=8, **case.changes))
    return found


def in_one_process(case: Case) -> dict[str, Any]:
    with mock.patch.object(expert_runs, "build", build):
        return plain(case.kind, 4, adapters=case.adapters, length=8, **case.changes)


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_adapters_train_as_in_one_process(ranks: int, cases: list[Case]) -> None:
    for case, found in zip(cases, run_world(trained, ranks, cases, timeout=400)[0], strict=True):
        expected = in_one_process(case)
        assert expected["gradients"] and all("lora" in name for name in expected["gradients"])
        assert max(compare(found, expected).values()) < 1e-5, (case, compare(found, expected))


def continued(first: dict[str, int], second: dict[str, int], folder: str) -> list[float]:
    """The losses of two steps on a mesh, and of two more on another one, from the state of the first."""
    losses = []
    for sizes, tokens in ((first, batches(4, 8)[:2]), (second, batches(4, 8)[2:])):
        with context.isolated():
            accelerator = accelerator_for(sizes, BLOCKS)
            model = build("qwen3", adapters=EXPERTS)
            model, optimizer = accelerator.prepare(model, optimizer_of(model))
            if losses:
                accelerator.load_state(folder)
            for batch in tokens:
                loss = loss_on(accelerator, model, batch)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.save_state(folder)
            accelerator.free_memory()
    return losses


@pytest.mark.slow  # trains on two meshes of four ranks; saving and loading of experts has fast tests
def test_states_of_adapters_move_between_meshes(tmp_path: Path) -> None:
    first, second = {"dp_shard_size": 4, "ep_size": 4}, {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2}
    found = run_world(continued, 4, first, second, str(tmp_path / "state"), timeout=400)[0]
    assert found == pytest.approx(in_one_process(Case("qwen3", EXPERTS, {}))["losses"], rel=1e-5)


def switched_off() -> tuple[float, float, float]:
    """The loss with adapters, without them, and with them again."""
    accelerator = accelerator_for({"dp_shard_size": 2, "ep_size": 2}, BLOCKS)
    model = accelerator.prepare(build("mixtral", adapters=EXPERTS)).eval()
    tokens = batches(1)[0]
    with torch.no_grad():
        losses = [loss_of(model, tokens).item()]
        with model.disable_adapter():
            losses.append(loss_of(model, tokens).item())
        losses.append(loss_of(model, tokens).item())
    return losses[0], losses[1], losses[2]


def test_adapters_can_be_switched_off() -> None:
    model = build("mixtral", adapters=EXPERTS).eval()
    with torch.no_grad():
        expected = loss_of(model, batches(1)[0]).item()
        with model.disable_adapter():
            bare = loss_of(model, batches(1)[0]).item()
    assert abs(bare - expected) > 1e-3
    assert run_world(switched_off, 2, timeout=250)[0] == pytest.approx((expected, bare, expected), rel=1e-5)


def refused() -> None:
    for adapters, reason in (
        (EXPERTS, "ep_size=2 with tp_size=2 does not support the low-rank adapters"),
        (ATTENTION, "have not been compared with one process under tp_size together with ep_size"),
    ):
        with context.isolated(), pytest.raises(ConfigurationError, match=reason):
            accelerator_for({"tp_size": 2, "ep_size": 2}).prepare(build("qwen3", adapters=adapters))
    model = build("qwen3", adapters=EXPERTS)
    kind = next(type(item) for item in model.modules() if type(item).__name__ == "ParamWrapper")
    with mock.patch.object(kind, "get_delta_factors", create=True):
        del kind.get_delta_factors
        with pytest.raises(ConfigurationError, match="need a newer PEFT"):
            accelerator_for({"dp_shard_size": 2, "ep_size": 2}, BLOCKS).prepare(model)


def test_what_was_not_compared_is_refused() -> None:
    run_world(refused, 2, timeout=250)
