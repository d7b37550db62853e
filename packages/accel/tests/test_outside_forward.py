"""Weights of a sharded model outside of a forward: the result of one process, or an error that names the weight."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.config import ParallelismConfig, TorchTensorParallelConfig
from accel_state import context, is_torch_version
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(300)
BLOCKS = {"auto_wrap_policy": "transformer_based_wrap"}
CASES: dict[str, dict[str, Any]] = {
    "FSDP 1": {"fsdp_version": 1, **BLOCKS},
    "flat": {"fsdp_version": 1, "use_orig_params": False, **BLOCKS},
    "whole": {"fsdp_version": 1, "sharding_strategy": "NO_SHARD", **BLOCKS},
    "method": {"fsdp_version": 1, "forward_methods": ["penalty"], **BLOCKS},
    "FSDP 2": {"fsdp_version": 2, **BLOCKS},
    "kept": {"fsdp_version": 2, "reshard_after_forward": False, **BLOCKS},
    "tp": {},
}
ADVICE = {"FSDP 1": r"forward_methods=.*fsdp_version=2", "flat": r"forward_methods=.*fsdp_version=2"}
Term = Callable[[Any], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


class Net(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def penalty(self) -> torch.Tensor:
        return torch.stack([parameter.norm() for parameter in self.head.parameters()]).sum()

    def get_head(self) -> nn.Linear:
        return self.head


def norms(model: Any) -> torch.Tensor:
    """A penalty whose gradients are those of one process on the whole weight only."""
    return model.blocks[0].layer.weight.norm() + model.head.weight.norm()


def accelerator_of(case: str) -> Accelerator:
    if case == "tp":
        plan: dict[str, Any] = {"blocks.*.layer": "colwise_rep", "head": "colwise_rep"}
        sizes = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
        return Accelerator(cpu=True, parallelism_config=sizes)
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**CASES[case]))


def train(accelerator: Accelerator | None, term: Term, before: bool, evaluates: bool) -> list[Any]:
    """Losses and final weights of three steps with a penalty, computed before or after the forward."""
    model: Any = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks, rank = 1, 0
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        ranks, rank = accelerator.strategy.data_collectives.world_size, accelerator.strategy.data_collectives.rank
    batches, losses = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1), requires_grad=True), []
    for batch in batches:
        x = batch.chunk(ranks)[rank]
        if evaluates:
            with torch.no_grad():
                model(x)
        early = term(model) if before else 0.0
        loss = model(x).square().mean() + 0.1 * early
        if not before:
            loss = loss + 0.1 * term(model)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() if accelerator is None else accelerator.reduce(loss.detach(), "mean")
        losses.append(total.item())
    weights = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    return [torch.tensor(losses), *(value.clone() for value in weights.values())]


def each(cases: Iterable[str], run: Callable[[str], Any]) -> dict[str, Any]:
    found = {}
    for case in cases:
        with context.isolated():
            found[case] = run(case)
    return found


def refused(case: str) -> None:
    """Penalties of what a rank has between two forwards, whose error is raised in the backward pass."""
    head: Term = lambda model: model.head.weight.norm()  # noqa: E731  # in no unit
    flat: Term = lambda model: sum(item.norm() for item in model.parameters())  # noqa: E731
    runs = [(flat, False)] if case == "flat" else [(norms, False), (norms, True), (head, True)]
    for term, evaluates in runs:
        own = r"blocks\.\d\.layer\.weight|head\.weight|the flat parameter "
        expected = rf"({own}).* was used outside of a forward.*{ADVICE.get(case, 'gathered_parameters')}"
        with context.isolated(), pytest.raises(ConfigurationError, match=expected):
            train(accelerator_of(case), term, True, evaluates)


def all_refused() -> None:
    each(("FSDP 1", "flat", "FSDP 2", "kept", "tp"), refused)


def test_a_loss_of_parts_of_weights_is_refused() -> None:
    run_world(all_refused, 2)


def trained() -> dict[str, list[Any]]:
    found = each(("whole", "kept"), lambda case: train(accelerator_of(case), norms, False, True))
    method = lambda case: train(accelerator_of(case), lambda model: model.penalty(), False, False)  # noqa: E731
    return {**found, **each(("method",), method)}


@pytest.mark.skipif(is_torch_version("<", "2.7"), reason="FSDP 1 of torch 2.6 refuses gradients of gathered weights")
def test_penalties_of_whole_weights_train_as_in_one_process() -> None:
    found = run_world(trained, 2)[0]
    for case, term in (("whole", norms), ("kept", norms), ("method", lambda model: model.penalty())):
        torch.testing.assert_close(found[case], train(None, term, False, False), rtol=1e-5, atol=1e-6)


def head_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, model.blocks[1].layer.weight)


def uses(case: str) -> None:
    """Errors that torch raises where the weight is used: named in ``accumulate``, and where Python prints them."""
    accelerator = accelerator_of(case)
    anchors = {name: item.detach().clone() for name, item in Net().named_parameters()}
    model: Any = accelerator.prepare(Net())
    x = torch.ones(2, 6)
    expected = r"blocks\.1\.layer\.weight was used outside of a forward"
    for use in (
        lambda: head_of(model, x),
        lambda: torch.addmm(x, x, model.blocks[1].layer.weight),
        lambda: [item - anchors["blocks.1.layer.weight"] for item in [model.blocks[1].layer.weight]],
    ):
        with pytest.raises(ConfigurationError, match=expected) as raised, accelerator.accumulate(model):
            use()
        assert type(raised.value.__cause__) is RuntimeError
    printed = io.StringIO()
    with pytest.raises(RuntimeError) as raised_error:
        head_of(model, x)
    with contextlib.redirect_stderr(printed):
        sys.excepthook(raised_error.type, raised_error.value, raised_error.value.__traceback__)
    assert str(raised_error.value) in printed.getvalue()
    assert "ConfigurationError: blocks.1.layer.weight was used outside" in printed.getvalue()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), accelerator.accumulate(model):
        torch.ones(2, 3) @ torch.ones(2, 3)  # no weight
    if case != "FSDP 1":
        with pytest.raises(ConfigurationError, match="a weight of a sharded model"), accelerator.accumulate(model):
            functional.linear(x, model.get_head().weight)
    own_errors(accelerator, model)


def own_errors(accelerator: Accelerator, model: Any) -> None:
    """Errors at a line that reads what the model has computed, and of memory that ran out, are left as they are."""
    for error, use in (
        (RuntimeError, lambda output: output @ torch.ones(9, 9)),
        (IndexError, lambda output: functional.cross_entropy(output, torch.full((2,), 99))),
        (RuntimeError, lambda output: exhaust(output, model.blocks[1].layer.weight)),
    ):
        with pytest.raises(error), accelerator.accumulate(model):
            use(model(torch.ones(2, 6)))


def exhaust(*tensors: torch.Tensor) -> None:
    raise RuntimeError(f"CUDA out of memory, with {len(tensors)} tensors")


def all_uses() -> None:
    each(("FSDP 1", "FSDP 2", "tp"), uses)
    each(("flat",), lambda case: own_errors(merged := accelerator_of(case), merged.prepare(Net())))


def test_errors_of_torch_name_the_weight() -> None:
    run_world(all_uses, 2)


def assigned(case: str) -> None:
    model: Any = accelerator_of(case).prepare(Net())
    for values in (model.head.weight.data * 2, torch.ones(3, 6)):
        with pytest.raises(ConfigurationError, match=r"^head\.weight\.data was assigned, which would change nothing"):
            model.head.weight.data = values
    before = model.head.weight.detach().full_tensor()
    model.head.weight.data.copy_(model.head.weight.data * 2)
    assert torch.equal(model.head.weight.detach().full_tensor(), 2 * before)
    model.head.weight.data *= 2
    assert torch.equal(model.head.weight.detach().full_tensor(), 4 * before)


def all_assigned() -> None:
    each(("FSDP 2", "tp"), assigned)


def test_values_that_are_assigned_to_data_are_refused() -> None:
    """A DTensor would keep its own, without an error."""
    run_world(all_assigned, 2)


def gradient_penalty(model: Any) -> torch.Tensor:
    """A loss that contains a gradient, as in WGAN-GP."""
    x = torch.ones(2, 6, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient.norm()


def penalised() -> list[Any]:
    expected = r"weights of a sharded model.*torch\.autograd\.grad.*Train this model with DDP"
    for case in ("FSDP 1", "FSDP 2", "kept"):
        with context.isolated(), pytest.raises(ConfigurationError, match=expected):
            train(accelerator_of(case), gradient_penalty, False, False)
    with context.isolated():
        return train(Accelerator(cpu=True), gradient_penalty, False, False)


def test_gradient_penalties_train_with_ddp_and_are_refused_where_weights_are_sharded() -> None:
    torch.testing.assert_close(
        run_world(penalised, 2)[0], train(None, gradient_penalty, False, False), rtol=1e-5, atol=1e-6
    )
