"""How a model is split into stages, without processes."""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_bigmodel.pipeline.microbatches import drop_padding, merge, split
from accel_bigmodel.pipeline.split import balanced_starts, split_model
from accel_bigmodel.pipeline.stage import Stage, extract
from accel_state.errors import ConfigurationError


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.data())
def test_no_split_has_a_smaller_largest_stage(weights, data) -> None:
    count = data.draw(st.integers(1, len(weights)))
    starts = balanced_starts(weights, count)
    assert starts[0] == 0 and len(starts) == count and starts == sorted(set(starts)) and starts[-1] < len(weights)

    def largest(cuts):
        return max(sum(weights[a:b]) for a, b in itertools.pairwise([0, *cuts, len(weights)]))

    best = min(largest(cuts) for cuts in itertools.combinations(range(1, len(weights)), count - 1))
    assert largest(starts[1:]) == best


class Residual(nn.Module):
    """Reads a value, uses a weight of a submodule directly, adds across blocks, and changes a result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.shift = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)) for _ in range(4))
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, tokens, flip=False):
        x = first = self.embed(tokens) + self.shift
        for layer in self.layers:
            x = layer(x)
            x += 1
        if x.sum().item() > 1e9 or flip:
            x = -x
        x[:, 0] = first[:, 0]
        return {"logits": nn.functional.linear(x * self.factor, self.embed.weight), "last": x, "nothing": None}


CPU = torch.device("cpu")


def stage_of(model, plan, index, in_place=True):
    shell = extract(model, plan, [index], CPU, in_place=in_place)
    forward = model.forward if in_place else types.MethodType(type(model).forward, shell)
    stage = Stage(shell, forward, plan, index, CPU)
    stage.intercept()
    return stage


def simulate(make, plan, *args, in_place=True, **kwargs):
    """Run the stages one after the other in this process."""
    tensors, templates = (), {}
    for index in range(len(plan)):
        stage = stage_of(make(), plan, index, in_place)
        assert len(stage.received) == len(tensors)
        stage.begin([(args, kwargs)], templates, known=False)
        with torch.no_grad():
            tensors = stage.run(*tensors)
        templates = stage.templates
    return stage.outputs[0]


def build():
    torch.manual_seed(0)
    return Residual().eval()


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("whole", [None, [], ["Sequential"]])
def test_any_code_between_the_modules_gives_the_same_result(count, whole) -> None:
    tokens = torch.arange(6).reshape(2, 3)
    model = build()
    plan = split_model(model, model.forward, "auto", whole, ((tokens,), {}), count)
    assert len(plan.starts) == count
    with torch.no_grad():
        expected = build()(tokens + 3)
    result = simulate(build, plan, tokens + 3)
    assert result["nothing"] is None
    torch.testing.assert_close(result["logits"], expected["logits"], rtol=0, atol=0)
    torch.testing.assert_close(result["last"], expected["last"], rtol=0, atol=0)


def test_only_what_is_read_later_travels_and_only_what_is_used_is_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    plan = split_model(model, model.forward, ["2"], None, ((torch.randn(2, 4),), {}), 2)
    assert plan.carries == (((1, 0),),)
    stage_of(model, plan, 1)
    assert [name for name, _ in model.named_parameters()] == ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert model[0].weight.is_meta


def test_a_module_that_is_called_in_several_stages_is_kept_in_each() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.out = nn.Linear(4, 2)

        def forward(self, x):
            for _ in range(6):
                x = self.block(x)
            return self.out(x)

    def make():
        torch.manual_seed(0)
        return Shared()

    x = torch.randn(3, 4)
    model = make()
    plan = split_model(model, model.forward, "auto", ["Sequential"], ((x,), {}), 3)
    with torch.no_grad():
        torch.testing.assert_close(simulate(make, plan, x), make()(x), rtol=0, atol=0)


def test_another_path_than_that_of_the_example_is_an_error_and_not_a_wrong_number() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x, skip=False, add=False, stop=False):
            first = self.a(x)
            if stop:
                return first
            second = first if skip else self.b(first)
            return self.c(second + first if add else second)

    model, x = Optional(), torch.randn(2, 4)
    plan = split_model(model, model.forward, ["c"], None, ((x,), {}), 2)
    for kwargs, what in (
        ({"skip": True}, "call 1 was of 'c'"),
        ({"stop": True}, "the forward ended after 1 calls, not 3"),
        ({"add": True}, "the module c needs a result of an earlier stage"),
    ):
        with pytest.raises(ConfigurationError, match=f"another path.*{what}"):
            simulate(Optional, plan, x, **kwargs)


def test_shapes_that_depend_on_values_are_an_error_and_not_garbage() -> None:
    class Positive(nn.Linear):
        def forward(self, x):
            return x[x > 0]

    model = nn.Sequential(Positive(4, 4), nn.Identity(), nn.ReLU())
    x = torch.tensor([1.0, -1.0, 2.0, 3.0])
    plan = split_model(model, model.forward, ["1"], None, ((x,), {}), 2)
    stage = stage_of(model, plan, 0)
    stage.begin([((x,), {}), ((-x,), {})], {0: plan.outputs[0]}, known=True)
    with torch.no_grad():
        assert stage.run()[0].tolist() == [1.0, 2.0, 3.0]
        with pytest.raises(ConfigurationError, match="depend on the values"):
            stage.run()


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_flow_through_the_stages(count) -> None:
    tokens = torch.arange(6).reshape(2, 3)
    model, whole = build(), build()
    for net in (model, whole):
        # Autograd keeps the output of a ReLU, which the forward would modify.
        net.layers = nn.ModuleList(nn.Sequential(nn.ReLU(), layer[0]) for layer in net.layers)
    plan = split_model(model, model.forward, "auto", ["Sequential"], ((tokens,), {}), count)
    stages = [stage_of(model, plan, index, in_place=False) for index in range(count)]
    assert {name for stage in stages for name, _ in stage.module.named_parameters()} == dict(
        model.named_parameters()
    ).keys()
    received, sent = [()], []
    for stage in stages:
        stage.begin([((tokens,), {})], dict(enumerate(plan.outputs)), known=True)
        stage._select = lambda output: output["logits"]
        sent.append(stage.run(*received[-1]))
        received.append([tensor.detach().requires_grad_() for tensor in sent[-1]])
    sent[-1].square().sum().backward()
    for number in range(count - 2, -1, -1):
        assert all(tensor.grad is not None for tensor in received[number + 1])
        torch.autograd.backward(sent[number], [tensor.grad for tensor in received[number + 1]])
    whole(tokens)["logits"].square().sum().backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-5)


def test_a_cache_that_layers_write_into_is_refused() -> None:
    class Cache:
        def __init__(self) -> None:
            self.kept = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, cache):
            cache.kept.append(x)
            return self.linear(x)

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x):
            cache = Cache()
            for layer in self.layers:
                x = layer(x, cache)
            return x

    model = Caching()
    with pytest.raises(ConfigurationError, match="layers.0.*Cache.*use_cache=False"):
        split_model(model, model.forward, "auto", None, ((torch.randn(1, 4),), {}), 2)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ("1", "must be 'auto' or a list of names of modules"),
        (["7"], "'7', which is not a submodule of Sequential. Its submodules are 0, 1"),
        (["0"], "'0' is not called after the start of the previous stage"),
        (["1", "2"], r"makes 3 stages, and this run has 2 processes. Name 1 module\(s\)"),
        (["3"], "'3', which the forward does not call with the example inputs"),
    ],
)
def test_split_points_that_make_no_sense_are_refused(points, message) -> None:
    class Unused(nn.Sequential):
        def forward(self, x):
            for number in range(3):
                x = self[number](x)
            return x

    model = Unused(*(nn.Linear(4, 4) for _ in range(4)))
    model.__class__.__name__ = "Sequential"
    with pytest.raises(ConfigurationError, match=message):
        split_model(model, model.forward, points, None, ((torch.randn(1, 4),), {}), 2)


def test_too_few_parts_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    example = ((torch.randn(1, 4),), {})
    with pytest.raises(ConfigurationError, match="the 3 processes"):
        split_model(model, model.forward, "auto", None, example, 3)


def test_chunks_are_cut_and_put_together() -> None:
    data = ({"x": torch.arange(6).reshape(6, 1), "whole": torch.arange(4)}, None)
    pieces = split(data, 6, 3)
    assert [piece[0]["x"].flatten().tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5]]
    assert all(piece[0]["whole"] is data[0]["whole"] for piece in pieces)
    joined = merge(pieces, 2)
    assert joined[0]["x"].flatten().tolist() == list(range(6)) and joined[0]["whole"].tolist() == [0, 1, 2, 3]
    assert drop_padding(joined, 6, 5)[0]["x"].shape == (5, 1)
    with pytest.raises(ConfigurationError, match=r"\(\).*Call.*num_chunks=1"):
        merge([torch.tensor(1.0), torch.tensor(2.0)], 2)
