"""Weights that FSDP 2 and ZeRO stage 3 leave gathered or free, read between the calls of a model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from deepspeed_runs import BATCH, MISSING, accelerator_of, config, data, release
from deepspeed_runs import loss_of as loss_of_net
from deepspeed_runs import net as deepspeed_net
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

Loss = Callable[[Any, torch.Tensor, Any], torch.Tensor]
UNITS: dict[str, Any] = {"fsdp_version": 2, "auto_wrap_policy": "size_based_wrap", "min_num_params": 100}


class Encoder(nn.Linear):
    """A unit with a unit in it."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.inner(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + self.weight.sum()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Encoder(), nn.Tanh(), nn.Linear(16, 4))


def distance(model: nn.Module) -> torch.Tensor:
    """The penalty of L2-SP: the distance to the first weights."""
    terms = [(now - first).square().sum() for now, first in zip(model.parameters(), net().parameters(), strict=True)]
    return 0.05 * torch.stack(terms).sum()


def with_penalty(model: Any, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    first = model(x).square().mean()
    with gathered(model):
        penalty = distance(model)
    return first + penalty + model(x + 1).square().mean()


def with_importance(model: Any, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    """EWC: the same with a weight for each element."""
    first = model(x).square().mean()
    with gathered(model[2]):
        penalty = (model[2].weight.square() * torch.arange(16)).sum() * 1e-3
    return first + penalty + model(x + 1).square().mean()


def bare(model: Any, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    return with_penalty(model, x, lambda _: nullcontext())


def bare_importance(model: Any, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    return with_importance(model, x, lambda _: nullcontext())


def two_calls(model: Any, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    return model(x).square().mean() + model[2].inner(x.repeat(1, 2)).square().mean() + model(x + 1).square().mean()


def call_in_a_call(model: Any, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    return model(x).square().mean() + model[2].encode(x.repeat(1, 2)).square().mean()


def after_a_failure(model: Any, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(x[:, :3])
    return with_penalty(model, x, gathered)


def bare_at_the_end(model: Any, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    return model(x).square().mean() + distance(model)


def train(model: Any, optimizer: Any, backward: Any, gathered: Any, loss_of: Loss) -> list[float]:
    losses = []
    for step in range(4):
        loss = loss_of(model, torch.randn(8, 8, generator=torch.Generator().manual_seed(step)), gathered)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


_OF_UNITS = (
    with_penalty,
    with_importance,
    bare,
    bare_importance,
    two_calls,
    call_in_a_call,
    after_a_failure,
    bare_at_the_end,
)
LOSSES: dict[str, Loss] = {loss.__name__: loss for loss in _OF_UNITS}


def train_sharded(cases: list[tuple[str, bool]]) -> list[Any]:
    found: list[Any] = []
    for name, reshards in cases:
        with context.isolated():
            plugin = FullyShardedDataParallelPlugin(reshard_after_forward=reshards, **UNITS)
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
            model: Any = net()
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            try:
                losses = train(model, optimizer, accelerator.backward, accelerator.gathered_parameters, LOSSES[name])
            except ConfigurationError as error:
                found.append(str(error))
                continue
            weights = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
            found.append((losses, weights))
    return found


def test_penalties_between_calls_equal_one_process_or_are_refused() -> None:
    right = [
        (loss, reshards) for loss in ("with_penalty", "with_importance", "two_calls") for reshards in (False, True)
    ]
    right += [(loss, False) for loss in ("call_in_a_call", "after_a_failure", "bare_at_the_end")]
    refused = [("bare", False), ("bare_importance", False)]
    found = run_world(train_sharded, 2, [*right, *refused], timeout=200)[0]
    for (case, reshards), result in zip(right, found, strict=False):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = train(model, optimizer, torch.Tensor.backward, lambda _: nullcontext(), LOSSES[case])
        assert result[0] == pytest.approx(losses, abs=1e-6), (case, reshards)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(result[1][name], value, atol=1e-6, rtol=0)
    for message in found[len(right) :]:
        assert "was used outside of a forward that gathers it" in message
        assert "with accelerator.gathered_parameters(model)" in message
    assert "2.weight" in found[-1]


def all_weights(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    inner = getattr(model, "module", model)
    return loss_of_net(model, x, y) + 0.1 * torch.stack([item.square().sum() for item in inner.parameters()]).sum()


def one_weight(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return loss_of_net(model, x, y) + 0.1 * getattr(model, "module", model).last.weight.square().sum()


def one_weight_first(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 0.1 * getattr(model, "module", model).middle.weight.square().sum() + loss_of_net(model, x, y)


def encode(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Call the modules of a model, as its `encode()` would."""
    inner = getattr(model, "module", model)
    return functional.cross_entropy(inner.last(functional.gelu(inner.first(x))), y)


OF_ENGINES: dict[str, Any] = {loss.__name__: loss for loss in (all_weights, one_weight, one_weight_first, encode)}


def train_engine(cases: list[tuple[str, int]]) -> list[Any]:
    found: list[Any] = []
    for name, stage in cases:
        accelerator = accelerator_of(config(stage))
        model: Any = deepspeed_net()
        loader = DataLoader(data(), batch_size=BATCH)
        model, optimizer, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        try:
            losses = []
            for x, y in DataLoader(data(4), batch_size=BATCH):
                loss = OF_ENGINES[name](model, x, y)
                accelerator.backward(loss)
                optimizer.step()
                losses.append(loss.item())
            found.append(losses)
        except ConfigurationError as error:
            found.append(str(error))
        release(accelerator)
    return found


def penalty(parameters: Iterable[torch.Tensor]) -> float:
    return sum(parameter.square().sum().item() for parameter in parameters)


# What a script does with weights between steps, without gradients.
READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda model: model.middle.weight.norm(),
    "data": lambda model: model.middle.weight.data.norm(),
    "detach": lambda model: model.middle.weight.detach().abs().sum(),
    "penalty": lambda model: penalty(model.middle.parameters()),
    "vector": lambda model: nn.utils.parameters_to_vector(model.middle.parameters()),
    "norms": lambda model: torch._foreach_norm([model.middle.weight, model.middle.bias]),
    "decay": lambda model: model.middle.weight.mul_(0.5),
    "decay of data": lambda model: model.middle.weight.data.mul_(0.5),
    "init": lambda model: nn.init.zeros_(model.middle.weight),
    "assignment": lambda model: setattr(model.middle.weight, "data", torch.ones(13, 13)),
    "state": lambda model: model.middle.state_dict(),
    "copy": lambda model: copy.deepcopy(model.middle.weight),
    "average": lambda model: torch.empty(13, 13).lerp_(model.middle.weight, 0.5),
}


def read_freed() -> dict[str, Any]:
    accelerator = accelerator_of(config(3, zero={"stage3_param_persistence_threshold": 0}))
    model: Any = deepspeed_net()
    loader = DataLoader(data(), batch_size=BATCH)
    model, optimizer, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    weight = model.module.middle.weight
    refused = pytest.raises(ConfigurationError, match=r"at ZeRO stage 3 gathers values only.*torch\.no_grad")
    with refused, accelerator.gathered_parameters(model):
        pass
    found: dict[str, Any] = {}
    for step, (x, y) in enumerate(DataLoader(data(2), batch_size=BATCH)):
        for name, read in READS.items():
            with torch.no_grad(), pytest.raises(ConfigurationError) as caught:
                read(model.module)
            found[f"{name} {step}"] = str(caught.value)
        with pytest.raises(ConfigurationError):  # a parameter that requires gradients
            weight.norm()
        for module in (model, model.module.middle):
            with torch.no_grad(), accelerator.gathered_parameters(module):
                norm = weight.norm().item()
                assert type(weight) is nn.Parameter
        # What reads no values.
        assert isinstance(weight, nn.Parameter) and not weight.is_cuda and weight.requires_grad and weight.numel() == 0
        assert "Parameter" in repr(weight) and weight in set(model.parameters()) and weight.grad is None
        model.module.to("cpu").requires_grad_(True)
        accelerator.backward(loss_of_net(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
        found[f"weights {step}"] = norm
    release(accelerator)
    return found


@pytest.mark.skipif(bool(MISSING), reason=MISSING or "deepspeed is installed")
def test_freed_weights_are_refused_and_their_values_gathered() -> None:
    norms, model = [], deepspeed_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data(2), batch_size=BATCH):
        norms.append(model.middle.weight.norm().item())
        loss_of_net(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_world(read_freed, 2):
        assert [found.pop(f"weights {step}") for step in (0, 1)] == pytest.approx(norms, abs=1e-6)
        assert len(found) == 2 * len(READS)
        for name, message in found.items():
            assert re.match(r"middle\.(weight|bias) was used outside of a forward that gathers it", message), name
            assert "torch.no_grad(), accelerator.gathered_parameters(model)" in message


@pytest.mark.skipif(bool(MISSING), reason=MISSING or "deepspeed is installed")
def test_weights_outside_of_an_engines_forward_equal_one_process_or_are_refused() -> None:
    right = [*((name, 2) for name in OF_ENGINES), ("encode", 3)]
    found = run_world(train_engine, 2, right, timeout=200)[0]
    for (case, stage), result in zip(right, found, strict=True):
        model = deepspeed_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = []
        for x, y in DataLoader(data(4), batch_size=BATCH):
            loss = OF_ENGINES[case](model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
        assert result == pytest.approx(expected, abs=1e-5), (case, stage)
    # An engine whose backward pass has failed is not used again.
    named = {"all_weights": "first.weight", "one_weight": "last.weight", "one_weight_first": "middle.weight"}
    for case, name in named.items():
        [message] = run_world(train_engine, 2, [(case, 3)])[0]
        assert f"{name} was used outside of a forward that gathers it" in message
        assert "zero_stage=2" in message
