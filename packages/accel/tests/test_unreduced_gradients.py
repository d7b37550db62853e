"""Gradients that DDP's reducer leaves alone: of parameters that are trained later, and of the unwrapped model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.kwargs.ddp import DistributedDataParallelKwargs
from accel.parallel.config import ParallelismConfig
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

STEPS = 5
Loss = Callable[[Any, Any, int, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.adapters = nn.ModuleDict({name: nn.Linear(6, 6, bias=False) for name in ("a", "b")})
        self.active = ["a"]
        self.skips_first = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.skips_first else torch.tanh(self.first(x))
        for name in self.active:
            x = x + self.adapters[name](x)
        return self.second(x)


class Scenario:
    """What a loop changes in the model between steps, and how it computes the loss."""

    frozen: tuple[str, ...] = ("adapters.b",)

    def change(self, step: int, net: Any, optimizer: Any, rank: int) -> None:
        pass

    def loss(self, model: Any, net: Any, step: int, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()


class Thawed(Scenario):
    """Layers join the training one by one; all of them are in the optimizer from the start."""

    frozen = ("adapters.b", "first", "second")

    def change(self, step: int, net: Any, optimizer: Any, rank: int) -> None:
        if step in (1, 3):
            (net.second if step == 1 else net.first).requires_grad_(True)


class ThawedFromNothing(Scenario):
    """Nothing is trained when the model is prepared."""

    frozen = ("adapters", "first", "second")

    def change(self, step: int, net: Any, optimizer: Any, rank: int) -> None:
        if step in (0, 3):
            (net.first if step == 0 else net.second).requires_grad_(True)


class AddedGroup(Scenario):
    """A layer that another rank would have initialised with other values."""

    def change(self, step: int, net: Any, optimizer: Any, rank: int) -> None:
        if step == 2:
            torch.manual_seed(10 + rank)
            net.adapters["c"] = nn.Linear(6, 6, bias=False).double()
            net.active = ["a", "c"]
            optimizer.add_param_group({"params": list(net.adapters["c"].parameters()), "lr": 0.03})


class ReplacedHead(Scenario):
    def change(self, step: int, net: Any, optimizer: Any, rank: int) -> None:
        if step == 2:
            torch.manual_seed(10 + rank)
            net.second = nn.Linear(6, 6).double()
            optimizer.add_param_group({"params": list(net.second.parameters())})


class SwitchedAdapters(Scenario):
    """One adapter is frozen and the other one trained, and back."""

    def change(self, step: int, net: Any, optimizer: Any, rank: int) -> None:
        if step in (1, 3):
            net.active = ["b"] if step == 1 else ["a"]
            for name, adapter in net.adapters.items():
                adapter.requires_grad_(name in net.active)


class Frozen(Scenario):
    def change(self, step: int, net: Any, optimizer: Any, rank: int) -> None:
        if step in (1, 3):
            net.first.requires_grad_(step == 3)


class Alternating(Scenario):
    """Every other forward goes through the model that was given to prepare."""

    def loss(self, model: Any, net: Any, step: int, x: torch.Tensor) -> torch.Tensor:
        return (model, net)[step % 2](x).square().mean()


class AlternatingWithUnused(Alternating):
    """The first layer is not used in forwards of the prepared model."""

    def change(self, step: int, net: Any, optimizer: Any, rank: int) -> None:
        net.skips_first = step % 2 == 0


class FirstEpochIsRight(Scenario):
    def loss(self, model: Any, net: Any, step: int, x: torch.Tensor) -> torch.Tensor:
        return (model if step < STEPS - 1 else net)(x).square().mean()


class PartOfTheModel(Scenario):
    """Some losses reach a layer only, without the wrapper."""

    def loss(self, model: Any, net: Any, step: int, x: torch.Tensor) -> torch.Tensor:
        return (net.first(x) if step in (1, 2) else model(x)).square().mean()


class BothInOneLoss(Scenario):
    def loss(self, model: Any, net: Any, step: int, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() + net.first(x).mean()


class ThawedAndAlternating(Thawed, Alternating):
    pass


class UsedInSomeBatches(Thawed):
    """A layer that is trained later is not reached by the last micro batch of a window."""

    frozen = ("adapters.b",)

    def change(self, step: int, net: Any, optimizer: Any, rank: int) -> None:
        net.adapters["b"].requires_grad_(True)
        net.active = ["a", "b"] if step % 2 == 0 else ["a"]


SCENARIOS: list[tuple[type[Scenario], dict[str, Any]]] = [
    (Thawed, {}),
    (Thawed, {"find_unused_parameters": True}),
    (Thawed, {"mesh": True}),
    (ThawedFromNothing, {}),
    (ThawedFromNothing, {"window": 2}),
    (AddedGroup, {}),
    (AddedGroup, {"find_unused_parameters": True}),
    (ReplacedHead, {}),
    (SwitchedAdapters, {}),
    (SwitchedAdapters, {"find_unused_parameters": True}),
    (Frozen, {}),
    (Alternating, {}),
    (Alternating, {"gradient_as_bucket_view": True}),
    (Alternating, {"set_to_none": False}),
    (Alternating, {"gradient_as_bucket_view": True, "set_to_none": False}),
    (Alternating, {"find_unused_parameters": True}),
    (AlternatingWithUnused, {"find_unused_parameters": True}),
    (Alternating, {"window": 2}),
    (Alternating, {"static_graph": True}),
    (FirstEpochIsRight, {}),
    (PartOfTheModel, {}),
    (PartOfTheModel, {"window": 2}),
    (BothInOneLoss, {}),
    (ThawedAndAlternating, {}),
    (ThawedAndAlternating, {"window": 2}),
    (UsedInSomeBatches, {"window": 2}),
]


def train(kind: type[Scenario], options: dict[str, Any], accelerator: Accelerator | None) -> list[torch.Tensor]:
    """The norms of the gradients, and the weights."""
    settings = dict(options)
    scenario, window, set_to_none = kind(), settings.pop("window", 1), settings.pop("set_to_none", True)
    net: Any = Net().double()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.startswith(scenario.frozen))
    model: Any = net
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.05, eps=1e-3)
    ranks, rank = 1, 0
    if accelerator is not None:
        model, optimizer = accelerator.prepare(net, optimizer)
        ranks, rank = accelerator.num_processes, accelerator.process_index
    norms = []
    for step in range(STEPS * window):
        if step % window == 0:
            scenario.change(step // window, net, optimizer, rank)
        if kind is UsedInSomeBatches:
            scenario.change(step, net, optimizer, rank)
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        if accelerator is None:
            (scenario.loss(model, net, step, x) / window).backward()
            if (step + 1) % window:
                continue
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            continue
        with accelerator.accumulate(model):
            accelerator.backward(scenario.loss(model, net, step, x))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(net.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return [*norms, *(parameter.detach() for parameter in net.parameters())]


def accelerator_for(options: dict[str, Any]) -> Accelerator:
    ddp = {name: value for name, value in options.items() if name not in ("window", "set_to_none", "mesh")}
    mesh = {"parallelism_config": ParallelismConfig(dp_replicate_size=2)} if options.pop("mesh", False) else {}
    handlers = [DistributedDataParallelKwargs(**ddp)]
    return Accelerator(cpu=True, gradient_accumulation_steps=options.get("window", 1), kwargs_handlers=handlers, **mesh)


def train_all() -> list[list[torch.Tensor]]:
    found = []
    for kind, options in SCENARIOS:
        with context.isolated():
            settings = dict(options)
            accelerator = accelerator_for(settings)
            found.append(train(kind, settings, accelerator))
    return found


def test_every_gradient_is_that_of_one_process() -> None:
    found = run_world(train_all, 2, timeout=150)
    wrong = []
    for index, (kind, options) in enumerate(SCENARIOS):
        expected = train(kind, {name: value for name, value in options.items() if name == "window"}, None)
        for rank in found:
            try:
                torch.testing.assert_close(rank[index], expected, rtol=0, atol=1e-12)
            except AssertionError as error:
                wrong.append(f"{kind.__name__} {options}: {error}")
                break
    assert not wrong, "\n".join(wrong)


class Features(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def adversarial(accelerator: Accelerator | None) -> tuple[list[torch.Tensor], int]:
    """Two networks, of which each step uses both, and a part of one without its wrapper; how often we averaged."""
    generator: Any = nn.Linear(6, 6).double()
    torch.manual_seed(3)
    generator.reset_parameters()
    critic: Any = Features(1).double()
    features = critic.body
    optimizers: Any = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (generator, critic)]
    backward, ranks, rank, averages = torch.Tensor.backward, 1, 0, 0
    if accelerator is not None:
        generator, critic, *optimizers = accelerator.prepare(generator, critic, *optimizers)
        backward, ranks, rank = accelerator.backward, accelerator.num_processes, accelerator.process_index
        collectives: Any = accelerator.state.collectives
        average = collectives.all_reduce_many

        def counted(*args: Any) -> Any:
            nonlocal averages
            averages += 1
            return average(*args)

        collectives.all_reduce_many = counted
    for step in range(STEPS):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        fake = generator(x)
        backward((critic(x) - critic(fake.detach())).mean())
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        matched = features(fake) if step == 2 else critic(fake)
        backward(matched.square().mean())
        optimizers[0].step()
    if accelerator is not None:
        del collectives.all_reduce_many
    return [parameter.detach() for model in (generator, critic) for parameter in model.parameters()], averages


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [head(x) for head in self.heads]


def two_losses() -> tuple[list[float], int]:
    """The differences between ranks, where one backward pass reaches each half of a model."""
    accelerator, net = Accelerator(cpu=True), Heads()
    model = accelerator.prepare(net)
    collectives: Any = accelerator.state.collectives
    average, averages = collectives.all_reduce_many, 0

    def counted(*args: Any) -> Any:
        nonlocal averages
        averages += 1
        return average(*args)

    collectives.all_reduce_many = counted
    for output in model(torch.full((1, 6), float(accelerator.process_index))):
        accelerator.backward(output.mean())
    del collectives.all_reduce_many
    gradients = [accelerator.gather(item.grad[None]) for item in net.parameters()]
    return [gradient.var(0).sum().item() for gradient in gradients], averages


def test_two_losses_of_one_forward_are_averaged_once() -> None:
    assert run_world(two_losses, 2) == [([0.0] * 4, 0)] * 2


def adversarial_in_ddp() -> tuple[list[torch.Tensor], int]:
    return adversarial(Accelerator(cpu=True))


def test_two_networks_train_as_in_one_process_and_are_not_averaged_twice() -> None:
    expected, _ = adversarial(None)
    for found, averages in run_world(adversarial_in_ddp, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert averages == 1, "the features of one step"


def prepared(**options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    net: Any = Net()
    net.adapters.requires_grad_(False)
    net.active = ["a", "b"]
    return accelerator, accelerator.prepare(net), net


def refused() -> None:
    x = torch.randn(4, 6)
    with context.isolated():
        accelerator, model, net = prepared()
        net.adapters["ab"[accelerator.process_index]].requires_grad_(True)
        with pytest.raises(ConfigurationError, match=r"different parameters .*: adapters\.a\.weight, adapters\.b"):
            accelerator.backward(model(x).mean())
    with context.isolated():
        accelerator, model, net = prepared()
        torch.manual_seed(accelerator.process_index)
        net.extra = nn.Linear(6, 6)
        with pytest.raises(ConfigurationError, match=r"extra\.weight was added .* after prepare"):
            accelerator.backward(net.extra(net(x)).mean())
    with context.isolated():
        accelerator, model, net = prepared()
        net.table = nn.Embedding(3, 6, sparse=True)
        with pytest.raises(ConfigurationError, match=r"shape \(3, 6\) is sparse"):
            accelerator.backward(model(net.table(torch.tensor([0]))).mean())
    with context.isolated():
        accelerator, model, net = prepared(static_graph=True)
        accelerator.backward(model(x).mean())
        net.adapters.requires_grad_(True)
        with pytest.raises(ConfigurationError, match="Leave static_graph out"):
            accelerator.backward(model(x).mean())
    with context.isolated():
        accelerator, model, net = prepared(static_graph=True)
        accelerator.backward(model(x).mean())
        net.first.requires_grad_(False)
        with pytest.raises(ConfigurationError, match="Leave static_graph out"):
            model(x)
    with context.isolated():
        accelerator, model, net = prepared()
        with accelerator.join_uneven_inputs([model]):
            accelerator.backward(model(x).mean())
            with pytest.raises(ConfigurationError, match="in join_uneven_inputs"):
                accelerator.backward(net(x).mean())


def test_what_cannot_be_averaged_is_refused() -> None:
    run_world(refused, 2)


def kept_local() -> list[bool]:
    """Whether gradients differ between ranks within no_sync, of a wrapped model and of one that was frozen."""
    found = []
    for frozen in (False, True):
        with context.isolated():
            accelerator, net = Accelerator(cpu=True), nn.Linear(6, 6)
            net.requires_grad_(not frozen)
            model = accelerator.prepare(net)
            net.requires_grad_(True)
            x = torch.full((1, 6), float(accelerator.process_index))
            for module in (model, net):
                with accelerator.no_sync(model):
                    accelerator.backward(module(x).mean())
                found.append(bool(accelerator.gather(net.weight.grad[None]).var(0).sum() > 0))
            accelerator.backward(net(x).mean())
            found.append(not accelerator.gather(net.weight.grad[None]).var(0).sum() > 0)
    return found


def test_no_sync_keeps_gradients_local() -> None:
    assert all(map(all, run_world(kept_local, 2)))


def compiled_outside() -> bool:
    with context.isolated():
        accelerator, net = Accelerator(cpu=True), nn.Linear(6, 6)
        wrapped = accelerator.prepare(net)
        model: Any = torch.compile(wrapped, backend="eager")
        gradients = []
        for module in (model, net, model, net):
            x = torch.full((1, 6), float(accelerator.process_index))
            accelerator.backward(module(x).mean())
            gradients.append(accelerator.gather(net.weight.grad[None]).var(0).sum().item())
            net.zero_grad()
    return gradients == [0.0] * 4


def test_a_compiled_wrapper_alternates_too() -> None:
    assert all(run_world(compiled_outside, 2))


def half_sum(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that halves every gradient, so that a gradient without it is twice as large."""
    import torch.distributed as dist

    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / (2 * dist.get_world_size()))


half_sum.__annotations__.clear()  # torch does not read those of this file, which are texts


def train_with_hook(case: str) -> dict[str, torch.Tensor] | str:
    """Weights after steps of DDP with a hook, or the error of accel; "torch" is torch's own DDP."""
    unused = "unused" in case
    handler = DistributedDataParallelKwargs(find_unused_parameters=unused)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    net: Any = Net()
    net.adapters["b"].requires_grad_(False)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    if case.startswith("torch"):
        model: Any = nn.parallel.DistributedDataParallel(net, find_unused_parameters=unused)
    else:
        model, optimizer = accelerator.prepare(net, optimizer)
    model.register_comm_hook(None, half_sum)
    for step in range(4):
        if step == 2:
            net.second.requires_grad_("freezes" not in case)
            net.adapters["b"].requires_grad_("thaws" in case)
            net.active = ["a", "b"] if "thaws" in case else ["a"]
        called = net if "by itself" in case and step == 2 else model
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + accelerator.process_index))
        loss = called(x).square().mean()
        try:
            loss.backward() if case.startswith("torch") else accelerator.backward(loss)
        except ConfigurationError as error:
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in net.named_parameters()}


def train_with_hooks(cases: tuple[str, ...]) -> list[Any]:
    return [train_with_hook(case) for case in cases]


def test_no_gradient_passes_by_a_communication_hook() -> None:
    cases = ("torch", "accel", "torch freezes, unused", "accel freezes, unused", "accel freezes", "accel thaws")
    plain, found, plain_later, later, *refused = run_world(train_with_hooks, 2, (*cases, "accel by itself"))[0]
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)
        torch.testing.assert_close(later[name], plain_later[name], atol=1e-6, rtol=0)
    assert not torch.equal(plain["first.weight"], plain_later["first.weight"])
    names = ("first.weight", r"adapters.b.weight", "first.weight")
    for name, error in zip(names, refused, strict=True):
        assert f"the gradient of {name} would be averaged without the communication hook half_sum" in error
        assert "Freeze and unfreeze before prepare()" in error
