"""Optimizers that look at whole parameters are refused where ranks step pieces of them: their numbers would differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accel.core.elementwise import is_elementwise, refuse_global_statistics, refuse_unless_elementwise
from accel_state.errors import ConfigurationError
from accel_state.imports import is_package_available
from accel_state.testing import run_world

needs_deepspeed = pytest.mark.skipif(not is_package_available("deepspeed"), reason="needs DeepSpeed")


class LayerWise(torch.optim.Optimizer):
    """The ratio of norms of LARS and LAMB."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm() / parameter.grad.norm()
                    parameter.sub_(parameter.grad * ratio * group["lr"])


class Estimating(torch.optim.Optimizer):
    """A step size estimated from all parameters, as in Prodigy; kept by the optimizer itself."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1.0})
        self.seen = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        used = [parameter for parameter in parameters if parameter.grad is not None]
        self.seen += sum((parameter.grad.square().sum() for parameter in used), torch.zeros(()))  # type: ignore[union-attr]
        for parameter in used:
            parameter.sub_(parameter.grad / self.seen.sqrt())  # type: ignore[arg-type]


class Reading(LayerWise):
    """The same ratio, of two numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = float(parameter.norm()) / parameter.grad.norm().item()
                parameter.sub_(parameter.grad * ratio * group["lr"])


class Averaging(torch.optim.SGD):
    """SGD that adds its gradients up in an attribute, in place."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.sums: dict[str, list[torch.Tensor]] = {"all": [torch.zeros(())]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.sums["all"][0].add_(parameter.grad.sum())
        super().step()


class Langevin(torch.optim.SGD):
    """Stochastic gradient Langevin dynamics: gradients and noise."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.1 * torch.randn_like(parameter))


class Looking(torch.optim.Optimizer):
    """Steps another optimizer, which has the parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class Closing(LayerWise):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()


ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False, amsgrad=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW in warm-up": lambda p: torch.optim.AdamW(p, lr=0.0),
    **{
        name: partial(getattr(torch.optim, name), lr=0.1)
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
    "Averaging": Averaging,
    "one that needs a closure": Closing,  # which is not known
    "one around another": lambda p: Looking(torch.optim.SGD(p, lr=0.1)),
}
OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "LayerWise": LayerWise,
    "LayerWise in warm-up": lambda p: LayerWise(p, 0.0),
    "Estimating": Estimating,
}


@pytest.mark.parametrize("name", [*ELEMENTWISE, *OTHERS])
def test_what_an_update_depends_on_is_found_out_without_changes(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    layer(torch.ones(3)).sum().backward()
    optimizer = {**ELEMENTWISE, **OTHERS}[name](layer.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # puts a counting method in place of `step`
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    random, seen = torch.get_rng_state(), getattr(optimizer, "seen", torch.zeros(())).clone()
    sums: list[torch.Tensor] = getattr(optimizer, "sums", {"all": []})["all"]
    assert is_elementwise(optimizer) == (name in ELEMENTWISE)
    with pytest.raises(ConfigurationError, match="from all") if name == "Estimating" else nullcontext():
        refuse_global_statistics(optimizer, "FSDP2Strategy")
    assert torch.equal(random, torch.get_rng_state()) and torch.equal(seen, getattr(optimizer, "seen", torch.zeros(())))
    assert all(map(torch.equal, before, layer.parameters())) and not calls and not any(sums)
    assert not any("step" in state and state["step"] for state in optimizer.state.values())
    assert optimizer.param_groups[0]["params"][0] is layer.weight and schedule.last_epoch == 0


def test_random_updates_are_refused_for_what_they_are() -> None:
    optimizer = Langevin(nn.Linear(3, 2).parameters())
    random = torch.get_rng_state()
    for refuse in (refuse_global_statistics, partial(refuse_unless_elementwise, instead="DDP")):
        with pytest.raises(ConfigurationError, match="FSDP: its updates contain random numbers"):
            refuse(optimizer, where="FSDP")
    assert torch.equal(random, torch.get_rng_state())


def refused(kind: str) -> list[str]:
    messages = []
    plugin: Any = {
        "zero": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=1)},
        "flat": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=False)},
        "whole": lambda: {
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                fsdp_version=1, use_orig_params=False, sharding_strategy="NO_SHARD"
            )
        },
        "orig": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True)},
    }[kind]()
    accelerator = Accelerator(cpu=True, **plugin)
    loader: Any = torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=2)  # type: ignore[arg-type]
    for make in (*OTHERS.values(), ELEMENTWISE["Adam"]):
        layer = nn.Linear(3, 2)
        try:
            accelerator.prepare(layer, make(layer.parameters()), loader)
        except ConfigurationError as error:
            messages.append(str(error))
        accelerator.free_memory()
    return messages


@pytest.mark.parametrize("kind", ["flat", "whole", "orig", pytest.param("zero", marks=needs_deepspeed)])
def test_ranks_with_pieces_of_parameters_refuse_them(kind: str) -> None:
    where = "ZeRO stage 1" if kind == "zero" else "fsdp_version=1"
    for messages in run_world(refused, 2, kind, timeout=200):
        assert [message.split()[0] for message in messages] == ["Adafactor", "LayerWise", "LayerWise", "Estimating"]
        assert all(f"cannot be used with {where}" in message for message in messages)


def refused_under_fsdp2() -> str:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    for make in (LayerWise, ELEMENTWISE["Adam"], Estimating):
        layer = nn.Linear(4, 2)
        with pytest.raises(ConfigurationError) if make is Estimating else nullcontext() as caught:
            accelerator.prepare(layer, make(layer.parameters()))
    return str(caught.value)  # type: ignore[union-attr]


def test_statistics_of_all_parameters_are_refused_under_fsdp2() -> None:
    for message in run_world(refused_under_fsdp2, 2):
        assert message.startswith("Estimating cannot be used with FSDP2Strategy")


def trained_by_norms(fsdp: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The norms of all gradients that the script adds up, and the weights after them."""
    plugin: Any = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)} if fsdp else {}
    accelerator = Accelerator(cpu=True, **plugin)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    samples: Any = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=2 if fsdp else 4)
    model, optimizer, loader = accelerator.prepare(net, Reading(net.parameters()), loader)
    norms = []
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        norms.append(sum(parameter.grad.norm().item() ** 2 for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return norms, [value.clone() for value in accelerator.get_state_dict(model).values()]


def test_norms_that_are_read_as_numbers_are_those_of_whole_tensors_under_fsdp2() -> None:
    ((norms, weights),) = run_world(trained_by_norms, 1, False)
    ranks = run_world(trained_by_norms, 2, True)
    assert [found for found, _ in ranks] == [pytest.approx(norms, rel=1e-5)] * 2
    for one, other in zip(ranks[0][1], weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
