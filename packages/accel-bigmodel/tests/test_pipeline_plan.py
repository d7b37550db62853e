"""How a model is split into stages, without processes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_bigmodel.pipeline.build import plan_of
from accel_bigmodel.pipeline.chunks import merge, split, take
from accel_bigmodel.pipeline.plan import balanced_starts
from accel_bigmodel.pipeline.schedule import _Worker
from accel_bigmodel.pipeline.stage import Stage
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


def simulate(make, plan, *args, **kwargs):
    """Run the stages one after the other in this process."""
    received, templates = {}, {}
    for index in range(len(plan.starts)):
        model = make()
        stage = Stage(model, model.forward, plan, index, torch.device("cpu"))
        assert set(stage.received) == set(received)
        with torch.no_grad():
            result = stage.run(args, kwargs, received, templates)
        if index < len(plan.starts) - 1:
            received, templates = dict(zip(stage.sent, result, strict=True)), stage.templates
    return result


def build():
    torch.manual_seed(0)
    return Residual().eval()


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("whole", [None, [], ["Sequential"]])
def test_any_code_between_the_modules_gives_the_same_result(count, whole) -> None:
    tokens = torch.arange(6).reshape(2, 3)
    model = build()
    plan = plan_of(model, model.forward, "auto", whole, ((tokens,), {}), count)
    assert len(plan.starts) == count
    with torch.no_grad():
        expected = build()(tokens + 3)
    result = simulate(build, plan, tokens + 3)
    assert result["nothing"] is None
    torch.testing.assert_close(result["logits"], expected["logits"], rtol=0, atol=0)
    torch.testing.assert_close(result["last"], expected["last"], rtol=0, atol=0)


def test_only_what_is_read_later_travels_and_only_what_is_used_is_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    plan = plan_of(model, model.forward, ["2"], None, ((torch.randn(2, 4),), {}), 2)
    assert plan.carries == (((1, 0),),)
    Stage(model, model.forward, plan, 1, torch.device("cpu"))
    assert [parameter.is_meta for parameter in model.parameters()] == [True, True, False, False, False, False]


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
    plan = plan_of(model, model.forward, "auto", ["Sequential"], ((x,), {}), 3)
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
    plan = plan_of(model, model.forward, ["c"], None, ((x,), {}), 2)
    for kwargs, what in (
        ({"skip": True}, "call 1 was of 'c'"),
        ({"stop": True}, "the forward ended after 1 calls, not 3"),
        ({"add": True}, "the module c needs a result of an earlier stage"),
    ):
        with pytest.raises(ConfigurationError, match=f"takes another path than with the example.*{what}"):
            simulate(Optional, plan, x, **kwargs)


def test_shapes_that_depend_on_values_are_an_error_and_not_garbage() -> None:
    class Positive(nn.Linear):
        def forward(self, x):
            return x[x > 0]

    model = nn.Sequential(Positive(4, 4), nn.Identity(), nn.ReLU())
    x = torch.tensor([1.0, -1.0, 2.0, 3.0])
    plan = plan_of(model, model.forward, ["1"], None, ((x,), {}), 2)
    stage = Stage(model, model.forward, plan, 0, torch.device("cpu"))
    worker = _Worker(stage, 2, [], stage.run((x,), {}, {}, {}))
    worker.chunks = [((x,), {}), ((-x,), {})]
    assert worker(torch.tensor([0]))[1].tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ConfigurationError, match="the shapes of its results depend on the values of the inputs"):
        worker(torch.tensor([1]))


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
    with pytest.raises(ConfigurationError, match="layers.0 writes into a Cache.*use_cache=False"):
        plan_of(model, model.forward, "auto", None, ((torch.randn(1, 4),), {}), 2)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ("1", "must be 'auto' or a list of names of modules"),
        (["7"], "'7', which is no submodule of Sequential. Its submodules are 0, 1"),
        (["0"], "'0' is not called after what begins the stage before it"),
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
        plan_of(model, model.forward, points, None, ((torch.randn(1, 4),), {}), 2)


def test_too_few_parts_and_missing_weights_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    example = ((torch.randn(1, 4),), {})
    with pytest.raises(
        ConfigurationError, match="fewer parts .* than the 3 processes of this run. Start fewer processes"
    ):
        plan_of(model, model.forward, "auto", None, example, 3)
    with pytest.raises(ConfigurationError, match="4 tensors of the model have no values.*meta device"):
        plan_of(model.to("meta"), model.forward, "auto", None, example, 2)


def test_chunks_are_cut_and_put_together() -> None:
    data = ({"x": torch.arange(6).reshape(6, 1), "whole": torch.arange(4)}, None)
    pieces = split(data, 6, 3)
    assert [piece[0]["x"].flatten().tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5]]
    assert all(piece[0]["whole"] is data[0]["whole"] for piece in pieces)
    joined = merge(pieces, 2)
    assert joined[0]["x"].flatten().tolist() == list(range(6)) and joined[0]["whole"].tolist() == [0, 1, 2, 3]
    assert take(joined, 6, 5)[0]["x"].shape == (5, 1)
    with pytest.raises(
        ConfigurationError,
        match=r"tensor of shape \(\).*Call the model without labels, or prepare it with num_chunks=1",
    ):
        merge([torch.tensor(1.0), torch.tensor(2.0)], 2)
