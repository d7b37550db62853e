"""torch.compile: one graph, no break, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from accel_fp8 import FP8Recipe, autocast, convert, convert_to_native, matmul
from accel_fp8._torch_compat import constant_result
from accel_state import is_torch_version


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def always(layer: nn.Module, name: str) -> bool:
    return True


def network(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    return convert_to_native(model, FP8Recipe(amax_history_len=4, module_filter_func=always, **settings))


def train(model: nn.Module, call: Any, count: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(count):
        torch.manual_seed(step)
        loss = call(torch.randn(8, 32)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


SETTINGS = [
    {"scaling": "delayed", "fp8_format": "E4M3", "amax_compute_algo": "max", "margin": 1, "interval": 2},
    {"scaling": "rowwise"},
    # Each takes 1.5 s to compile; the test of two forward passes compiles dynamic scaling, too.
    pytest.param({"scaling": "dynamic"}, marks=pytest.mark.slow),
    pytest.param({"scaling": "delayed", "override_linear_precision": (True, False, True)}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_one_graph_without_a_break_and_the_same_numbers(settings: dict[str, Any]) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = network(**settings)
    losses, state = train(model, torch.compile(model, fullgraph=True, backend=counter))
    assert counter.frame_count == 1, "compiled once for all steps"
    plain = network(**settings)
    expected_losses, expected_state = train(plain, plain)
    assert losses == expected_losses
    assert all(torch.equal(state[name], tensor) for name, tensor in expected_state.items())


@pytest.mark.skipif(is_torch_version("<", "2.7"), reason="torch 2.6 multiplies 8-bit matrices on GPUs only")
def test_the_graph_multiplies_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "has_instruction", constant_result(lambda *_: True))
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.print_readable(False))
        return graph.forward

    torch.compile(network(), fullgraph=True, backend=backend)(torch.randn(8, 32))
    assert "_scaled_mm" in graphs[0]


def test_under_autocast_and_in_place() -> None:
    model = convert(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), FP8Recipe(backend="native"))
    model.compile(fullgraph=True, backend="aot_eager")
    with autocast(model):
        result = model(torch.randn(8, 32))
    assert result.dtype is torch.bfloat16
    result.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.slow  # runs a C++ compiler; the fast tests compile with other backends
@pytest.mark.timeout(600)  # a C++ compiler runs several times: seconds each on a free core
def test_inductor_generates_code_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # inductor tells the extension that it builds where to find a function of torch, and leaves the variable behind.
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    monkeypatch.delenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")
    model, plain = network(), network()
    # In this process: threads of inductor's own would stay when the test is over.
    with torch._inductor.config.patch(compile_threads=1):
        losses, state = train(model, torch.compile(model, fullgraph=True), count=3)
    expected_losses, expected_state = train(plain, plain, count=3)
    # Fused code rounds once where eager code rounds twice; a value on the edge then falls into the next 8-bit step.
    assert losses == pytest.approx(expected_losses, rel=0.01)
    assert torch.allclose(state["0.fp8_amax_history"], expected_state["0.fp8_amax_history"], rtol=0.02)


def test_compiled_with_two_forward_passes_before_a_backward_pass_dynamic_scaling_works() -> None:
    model = network(scaling="dynamic")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    (compiled(torch.randn(8, 32)).sum() + compiled(torch.randn(8, 32)).sum()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
