"""Histories and scales against a plain Python model; overflows, checkpoints and compilation."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_fp8 import FP8Recipe, convert_to_native
from accel_fp8.linear import GRADIENT, INPUT, WEIGHT

ENDS = {"HYBRID": (448.0, 448.0, 57344.0), "E4M3": (448.0, 448.0, 448.0)}


def always(layer: nn.Module, name: str) -> bool:
    return True


def network(**settings: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    return convert_to_native(model, FP8Recipe(backend="native", module_filter_func=always, **settings))  # type: ignore[arg-type, return-value]


class Watch:
    """What really goes through a layer: the largest input, weight and output gradient of each step."""

    def __init__(self, layer: nn.Linear) -> None:
        self.seen: list[list[float]] = []
        layer.register_forward_hook(self._forward)
        layer.register_full_backward_hook(self._backward)

    def _forward(self, layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.seen.append([inputs[0].abs().max().item(), layer.weight.abs().max().item(), 0.0])

    def _backward(self, layer: nn.Module, grad_input: tuple, grad_output: tuple) -> None:
        self.seen[-1][GRADIENT] = grad_output[0].abs().max().item()


def steps(model: nn.Module, count: int, size: float = 1.0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(count):
        torch.manual_seed(100 + step)
        model(torch.randn(8, 32, requires_grad=True) * size * (1 + step % 3)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("fp8_format", "algorithm", "margin", "interval", "length"),
    [
        ("HYBRID", "max", 0, 1, 3),
        ("HYBRID", "most_recent", 0, 1, 3),
        ("E4M3", "max", 2, 1, 4),
        ("E4M3", "most_recent", 1, 3, 2),
        ("HYBRID", "max", 0, 2, 1),
    ],
)
def test_histories_and_scales_follow_the_recipe(
    fp8_format: str, algorithm: str, margin: int, interval: int, length: int
) -> None:
    model = network(
        fp8_format=fp8_format,
        amax_compute_algo=algorithm,
        margin=margin,
        interval=interval,
        amax_history_len=length,
        scaling="delayed",
    )
    watches = {0: Watch(model[0]), 2: Watch(model[2])}
    steps(model, 7)
    for index, watch in watches.items():
        # Before the 7th forward pass, the 6 before it have been written; before the first there was nothing to write.
        written = [[0.0, 0.0, 0.0], *watch.seen[:6]]
        scale = [0.0, 0.0, 0.0]
        for number in range(7):
            window = written[max(0, number - length + 1) : number + 1]
            if number % interval == 0:
                for place in range(3):
                    amax = max(entry[place] for entry in window) if algorithm == "max" else window[-1][place]
                    scale[place] = ENDS[fp8_format][place] / amax / 2**margin if amax else scale[place]
        expected = list(itertools.islice([*reversed(written), *([[0.0] * 3] * length)], length))
        assert torch.allclose(model[index].fp8_amax_history.t(), torch.tensor(expected), rtol=1e-6)
        assert torch.allclose(model[index].fp8_scale, torch.tensor(scale), rtol=1e-6)
        assert model[index].fp8_updates == 7


def test_the_first_step_scales_by_what_it_sees() -> None:
    delayed, dynamic = network(), network(scaling="dynamic")
    x = torch.randn(8, 32) * 1e-6
    assert torch.equal(delayed(x), dynamic(x))
    gradients = []
    for model in (delayed, dynamic):
        model(x).sum().backward()
        gradients.append(model[2].weight.grad)
    assert torch.equal(*gradients)


def test_nothing_is_recorded_outside_of_training() -> None:
    model = network(use_autocast_during_eval=True)
    steps(model, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()
    model(torch.randn(4, 32) * 1e3)
    model.train()
    with torch.no_grad():
        model(torch.randn(4, 32) * 1e3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_part_that_is_called_without_the_whole_scales_by_what_it_sees() -> None:
    model = network()
    for _ in range(3):
        model[0](torch.randn(4, 32)).sum().backward()
    assert model[0].fp8_updates == 0 and not model[0].fp8_scale.any() and model[0].fp8_forward_amax.all()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_activation_checkpointing_changes_neither_results_nor_histories(reentrant: bool | None) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, layers: nn.Sequential) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[assignment]
            return x

    def train(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            torch.manual_seed(step)
            model(torch.randn(8, 32, requires_grad=True)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    torch.manual_seed(0)
    recipe = FP8Recipe(amax_history_len=4, module_filter_func=always)
    state = train(
        convert_to_native(Checkpointed(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))), recipe)
    )
    expected = train(network(amax_history_len=4))
    assert all(torch.equal(state[f"layers.{name}"], tensor) for name, tensor in expected.items())
    assert expected["0.fp8_updates"] == 4


def test_gradient_accumulation_writes_once_a_forward_pass() -> None:
    model = network(amax_history_len=8)
    for _ in range(3):
        for _ in range(2):
            model(torch.randn(4, 32)).sum().backward()
    assert model[0].fp8_updates == 6


def test_two_forward_passes_before_their_backward_passes() -> None:
    model = network(amax_history_len=4)
    x, y = torch.randn(4, 32), torch.randn(4, 32) * 5
    for _ in range(3):
        (model(x).sum() + model(y).sum()).backward()
    assert model[0].fp8_updates == 6 and model[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_is_seen_in_its_step_and_leaves_no_trace_in_the_histories(bad: float) -> None:
    model = network(amax_history_len=16, amax_compute_algo="max")
    steps(model, 2)
    x = torch.randn(8, 32)
    x[0, 0] = bad
    loss = model(x).sum()
    assert loss.isnan()
    loss.backward()
    assert not model[0].weight.grad.isfinite().all()
    model.zero_grad()
    for _ in range(2):
        loss = model(torch.randn(8, 32)).pow(2).mean()
        loss.backward()
    assert loss.isfinite() and all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert model[0].fp8_amax_history.isfinite().all() and model[0].fp8_scale.isfinite().all()


@pytest.mark.parametrize("scaling", ["delayed", "dynamic", "rowwise"])
@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
def test_outliers_leave_gradients_finite(scaling: str, fp8_format: str) -> None:
    model = network(scaling=scaling, fp8_format=fp8_format)
    steps(model, 2)
    for size in (1e3, 1e6, 1e12):
        x = torch.randn(8, 32)
        x[3, 5] *= size
        model.zero_grad()
        model(x).float().abs().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_places_of_the_three_tensors() -> None:
    model = network()
    steps(model, 1, size=1e-3)
    seen = model[0].fp8_forward_amax
    assert seen[INPUT] < 1e-2 < seen[WEIGHT] and model[0].fp8_gradient_amax > 0
