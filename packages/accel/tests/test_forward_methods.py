"""Methods other than ``forward`` that use the parameters of a sharded model, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(300)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.fc(x))

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.fc.weight)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.proj.weight.T


class Net(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs, self.text, self.head = nn.Linear(8, 8), Text(), nn.Linear(8, 4)
        self.blocks = nn.ModuleList([Block(), Block()])

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.text(self.hidden(x)))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.hidden(x) @ self.text.proj.weight.T, dim=-1)

    def nested(self, x: torch.Tensor) -> torch.Tensor:
        """Call the model, methods of units, and another method, before parameters are used."""
        logits = self(x) + self.encode(x).sum(-1, keepdim=True) + self.blocks[0].embed(x).sum(-1, keepdim=True)
        return logits + self.head(self.text(x))

    @torch.no_grad()
    def generate(self, x: torch.Tensor, count: int = 3) -> torch.Tensor:
        found = []
        for _ in range(count):
            found.append(self(x))
            x = torch.tanh(x + found[-1].sum(-1, keepdim=True))
        return torch.cat(found, -1)


Terms = Callable[[Any, Any, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Terms] = {
    "encode": lambda model, _, x: model.encode(x).prod(-1) + model.encode(2 * x).square().mean(-1) + model(x).mean(-1),
    "nested": lambda model, _, x: torch.tanh(model.nested(x)).square().mean(-1),
    "of a submodule": lambda model, inner, x: inner.text.project(x).square().mean(-1) + model(x).square().mean(-1),
    "generate": lambda model, inner, x: model(x).square().mean(-1) + 0 * (model.generate(x) + inner.generate(x)).mean(),
}
NAMED = {"forward_methods": ["nested", "embed", "text.project"], "auto_wrap_policy": "transformer_based_wrap"}
WHOLE = {"forward_methods": ["nested", "text.project"], "auto_wrap_policy": "no_wrap"}
CASES = {
    "FSDP 1": ({"fsdp_version": 1, **NAMED}, "no"),
    "FSDP 1, bf16": ({"fsdp_version": 1, **NAMED}, "bf16"),
    "FSDP 2": ({"fsdp_version": 2, **NAMED}, "no"),
    "FSDP 2, one unit": ({"fsdp_version": 2, **WHOLE}, "no"),
}
MORE = {
    "FSDP 1, one unit": ({"fsdp_version": 1, **WHOLE}, "no"),
    "FSDP 1, gathered": ({"fsdp_version": 1, "sharding_strategy": "SHARD_GRAD_OP", **NAMED}, "no"),
    "FSDP 2, gathered": ({"fsdp_version": 2, "reshard_after_forward": False, **NAMED}, "no"),
    "FSDP 2, bf16": ({"fsdp_version": 2, **NAMED}, "bf16"),
    "FSDP 2, one unit, bf16": ({"fsdp_version": 2, **WHOLE}, "bf16"),
}


def steps(model: Any, inner: Any, optimizer: Any, terms: Terms, accelerator: Accelerator | None) -> list[float]:
    """The losses of three steps, with what the model generates after each."""
    ranks, rank = (1, 0) if accelerator is None else (accelerator.num_processes, accelerator.process_index)
    found = []
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        loss = terms(model, inner, x).mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        for value in (loss.detach(), model.generate(x).square().mean()):
            found.append((value if accelerator is None else accelerator.reduce(value, "mean")).item())
    return found


def train(settings: dict[str, Any], precision: str, terms: Terms) -> list[float]:
    plugin = FullyShardedDataParallelPlugin(**settings)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, fsdp_plugin=plugin)
    model = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    return steps(model, accelerator.unwrap_model(model), optimizer, terms, accelerator)


def train_all(cases: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    found = {}
    for case, settings in cases.items():
        for loss, terms in LOSSES.items():
            with context.isolated():
                found[case, loss] = train(*settings, terms)
    return found


def check(cases: dict[str, Any]) -> None:
    expected = {}
    for loss, terms in LOSSES.items():
        model = Net()
        expected[loss] = steps(model, model, torch.optim.SGD(model.parameters(), lr=0.1), terms, None)
    for (case, loss), found in run_world(train_all, 2, cases, timeout=250)[0].items():
        limit = 3e-2 if "bf16" in case else 1e-5
        assert found == pytest.approx(expected[loss], rel=limit, abs=limit * 0.1), (case, loss)


def test_methods_compute_what_one_process_computes() -> None:
    check(CASES)


@pytest.mark.slow
def test_methods_under_other_settings() -> None:
    check(MORE)


def refused() -> None:
    for names, message in (
        (["decode"], "the model and its units have no method decode"),
        (["txt.project"], r"the model has no module txt\. Its modules have names such as inputs, text"),
        ("encode", r"must be a list of names, such as \['encode'\]"),
    ):
        for version in (1, 2):
            with context.isolated(), pytest.raises(ConfigurationError, match=message):
                plugin = FullyShardedDataParallelPlugin(fsdp_version=version, forward_methods=names)
                Accelerator(cpu=True, fsdp_plugin=plugin).prepare(Net())


def test_names_that_match_no_method_are_refused() -> None:
    run_world(refused, 2)


def unused_forwards(precision: str) -> list[float]:
    """The losses of training with FSDP 1, with forward passes with gradients that no backward pass follows."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, mixed_precision=precision, fsdp_plugin=plugin)
    model: Any = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = []
    for step in range(4):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).chunk(2)[accelerator.process_index]
        loss = (model(x) * model(x + 1)).mean() if step == 2 else model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        model(x)
        found.append(accelerator.reduce(loss.detach(), "mean").item())
    return found


def test_a_forward_pass_without_a_backward_pass_costs_fsdp_1_no_gradients() -> None:
    exact, half = (run_world(unused_forwards, 2, precision)[0] for precision in ("no", "bf16"))
    assert half == pytest.approx(exact, rel=3e-2)
