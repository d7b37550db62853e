"""An offloaded weight is its values, however a model or its user reads it, writes it, ties it or shares it."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    align_module_device,
    attach_layerwise_casting_hooks,
    cpu_offload,
    disk_offload,
    dispatch_model,
    get_state_dict_offloaded_model,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
)
from accel_bigmodel.offload.store import OffloadedWeightsLoader
from accel_bigmodel.placeholder import Placeholder
from accel_state.errors import ConfigurationError


def on_cpu(model: nn.Module, directory: Path) -> nn.Module:
    return cpu_offload(model, "cpu")


def on_disk(model: nn.Module, directory: Path) -> nn.Module:
    return disk_offload(model, directory / "offload", "cpu")


def by_map(model: nn.Module, directory: Path) -> nn.Module:
    """The first child stays in memory, the others are in a file."""
    names = [name for name, _ in model.named_children()]
    own = [name for name, _ in model.named_parameters(recurse=False)]
    device_map = {**dict.fromkeys(own + names, "disk"), names[-1]: "cpu"} if names else {"": "disk"}
    return dispatch_model(model, device_map, offload_dir=directory / "map")


def from_checkpoint(model: nn.Module, directory: Path) -> nn.Module:
    """Loaded without ever being in memory."""
    save_file({name: value.clone() for name, value in model.state_dict().items()}, directory / "model.safetensors")
    empty = copy.deepcopy(model)
    for module in empty.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().to("meta")))
    return load_checkpoint_and_dispatch(empty, directory / "model.safetensors", {"": "disk"}).train(model.training)


MODES: list[Callable[[nn.Module, Path], nn.Module]] = [on_cpu, on_disk, by_map, from_checkpoint]
modes = pytest.mark.parametrize("offload", MODES)
in_files = pytest.mark.parametrize("offload", [on_disk, from_checkpoint])
SQUARE = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))

WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "linear": lambda w: F.linear(SQUARE, w),
    "matmul": lambda w: SQUARE @ w.T,
    "right_matmul": lambda w: w.mT @ SQUARE,
    "einsum": lambda w: torch.einsum("bi,oi->bo", SQUARE, w),
    "conv1d": lambda w: F.conv1d(SQUARE[None], w[:, :, None]),
    "conv2d": lambda w: F.conv2d(SQUARE[None, :, :, None], w.reshape(6, 6, 1, 1)),
    "bilinear": lambda w: F.bilinear(SQUARE, SQUARE, w[None]),
    "embedding": lambda w: F.embedding(torch.tensor([1, 2]), w),
    "index": lambda w: w[0],
    "mask": lambda w: SQUARE.clone().masked_fill(w > 0, 0),
    "assigned": lambda w: SQUARE.clone().index_put_((torch.tensor(0),), w[1]),
    "copied": lambda w: torch.zeros(6, 6).copy_(w),
    "setitem": lambda w: _with_row(SQUARE, w),
    "where": lambda w: torch.where(w > 0, w, 0),
    "cat": lambda w: torch.cat([w, SQUARE, w]),
    "stack": lambda w: torch.stack((w, w)),
    "block_diag": lambda w: torch.block_diag(w, w),
    "multi_dot": lambda w: torch.linalg.multi_dot([SQUARE, w, SQUARE]),
    "baddbmm": lambda w: torch.baddbmm(SQUARE[None], SQUARE[None], w[None]),
    "norm": lambda w: w.norm(dim=-1),
    "svd": lambda w: torch.linalg.svdvals(w),
    "item": lambda w: torch.tensor(w[0, 0].item()),
    "list": lambda w: torch.tensor(w.tolist()),
    "numpy": lambda w: torch.tensor(w.detach().numpy()),
    "float64": lambda w: w.to(torch.float64),
    "same_dtype": lambda w: w.float() + 0,
    "half": lambda w: w.half(),
    "clone": lambda w: w.clone(),
    "detach": lambda w: SQUARE @ w.detach(),
    "data": lambda w: SQUARE @ w.data,
    "data_row": lambda w: w.data[1] * 2,
    "radd": lambda w: 1 + w,
    "rsub": lambda w: 1 - w,
    "power": lambda w: w**2,
    "neg": lambda w: -w,
    "compare": lambda w: (w == w).float() + (w != SQUARE).float(),
    "view": lambda w: w.view(2, 18) + w.reshape(2, 18) + w.flatten().unflatten(0, (2, 18)),
    "chunks": lambda w: torch.cat(w.chunk(3)) - torch.cat(torch.split(w, 2)),
    "unbind": lambda w: sum(w.unbind()),
    "iterate": lambda w: sum(row for row in w),
    "topk": lambda w: w.topk(2).values,
    "softmax": lambda w: F.softmax(w, -1),
    "layer_norm": lambda w: F.layer_norm(SQUARE, (6,), w[0], w[1]),
    "dot_product": lambda w: F.scaled_dot_product_attention(SQUARE[None], w[None], w[None]),
    "new_zeros": lambda w: w.new_zeros(3) + w.new_tensor([1.0, 2.0, 3.0]),
    "zeros_like": lambda w: torch.zeros_like(w) + torch.ones_like(w),
    "apply_function": lambda w: torch.func.vmap(torch.sum)(w),
    "gradient": lambda w: torch.func.grad(lambda x: (x @ w).sum())(SQUARE),
    "out": lambda w: torch.add(SQUARE, w, out=torch.empty(6, 6)),
    "keyword": lambda w: F.linear(input=SQUARE, weight=w),
    "where_keyword": lambda w: torch.where(condition=w > 0, input=w, other=SQUARE),
    "device": lambda w: w.sum().to(torch.float32) + 0,
    "deepcopy": lambda w: copy.deepcopy(w).data,
    "saved": lambda w: _saved(w.detach()),
}


def _with_row(base: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    result = base.clone()
    result[torch.tensor([True, False] * 3)] = w[0]
    return result


def _saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


class Reads(nn.Module):
    """Reads a weight of a child that it does not call, at any depth and in several ways."""

    def __init__(self, ways: list[str], depth: int) -> None:
        super().__init__()
        self.table = nn.Linear(6, 6, bias=False)
        self.inner: nn.Module = Reads(ways, depth - 1) if depth else nn.Linear(6, 6)
        self.ways = ways

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.inner(x)
        for way in self.ways:
            total = total + WAYS[way](self.table.weight).double().sum().float()
        return total


@modes
def test_every_way_of_reading(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Reads([], 0)
    model = offload(copy.deepcopy(plain), tmp_path)
    with torch.no_grad():
        for name, way in WAYS.items():
            found, expected = way(model.table.weight), way(plain.table.weight)
            assert type(found) is torch.Tensor and not found.is_meta, name
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)
    weight = model.table.weight
    assert isinstance(weight, nn.Parameter) and weight.is_meta and weight.device.type == "meta"
    assert weight.shape == (6, 6) and weight.dtype == torch.float32 and "meta" in repr(weight)
    assert model.state_dict()["table.weight"].is_meta


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(sorted(WAYS)), min_size=1, max_size=4), st.integers(0, 3), st.sampled_from([0, 1, 3]))
def test_a_parent_reads_the_weight_of_a_child(ways: list[str], depth: int, mode: int) -> None:
    import tempfile

    torch.manual_seed(0)
    plain = Reads(ways, depth)
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        model = MODES[mode](copy.deepcopy(plain), Path(directory))
        for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(one(SQUARE), plain(SQUARE))


class Marked(torch.Tensor):
    """A class of tensors with functions of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        is_product = func is torch.Tensor.matmul and result is not NotImplemented
        return result + 1 if is_product else result


def test_an_operand_with_functions_of_its_own(tmp_path: Path) -> None:
    plain = nn.Linear(6, 6)
    model = on_disk(copy.deepcopy(plain), tmp_path)
    with torch.no_grad():
        for call in (lambda w: w.matmul(SQUARE.as_subclass(Marked)), lambda w: SQUARE.as_subclass(Marked).matmul(w)):
            found = call(model.weight)
            assert type(found) is Marked
            torch.testing.assert_close(found.as_subclass(torch.Tensor), call(plain.weight).as_subclass(torch.Tensor))


class Devices(nn.Module):
    """Creates tensors on the device of a weight of a child, and moves its input there."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.table.weight
        assert not weight.is_meta and weight.is_cpu
        positions = torch.arange(6, device=weight.device, dtype=weight.dtype)
        return self.head(self.table(x.to(weight.device)) + positions) + self.encode(x.to(self.head.weight))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.head.weight, self.head.bias)


@modes
def test_the_device_of_a_weight_in_a_forward_and_a_method_outside_it(
    offload: Callable[..., nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = Devices()
    model = offload(copy.deepcopy(plain), tmp_path)
    torch.testing.assert_close(model(SQUARE), plain(SQUARE))
    torch.testing.assert_close(model.encode(SQUARE), plain.encode(SQUARE))


def test_an_input_that_was_created_on_the_device_of_placeholders_is_refused() -> None:
    model = cpu_offload(nn.Sequential(nn.Linear(6, 6)), "cpu")
    with pytest.raises(ConfigurationError, match=r"model\.device.*device_map"):
        model(torch.ones(1, 6, device=model[0].weight.device))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the weights that were read from files."""
    names: list[str] = []
    original = OffloadedWeightsLoader.read_many

    def reading(self: Any, keys: Any, read_now: bool = False) -> Any:
        names.extend(keys := list(keys))
        return original(self, keys, read_now)

    monkeypatch.setattr(OffloadedWeightsLoader, "read_many", reading)
    return names


def test_a_weight_is_read_from_the_disk_once_in_a_forward(tmp_path: Path, read: list[str]) -> None:
    model = on_disk(Reads(["matmul"] * 50, 0), tmp_path)
    for times in (1, 2):
        model(SQUARE)
        assert read.count("table.weight") == times


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)

    def tie_weights(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


@modes
def test_weights_are_tied_after_the_offload(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, ids = Tied(), torch.arange(5)
    model = offload(copy.deepcopy(plain), tmp_path)
    model(ids)
    for one in (plain, model):
        one.tie_weights()
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(one(ids), plain(ids))
    values = get_state_dict_offloaded_model(model)
    assert torch.equal(values["head.weight"], plain.embedding.weight)
    remove_hook_from_submodules(model)
    torch.testing.assert_close(model(ids), plain(ids))


# Threads and forwards within forwards.


def in_threads(count: int, act: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            act(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@modes
@pytest.mark.parametrize("with_grad", [False, True])
def test_threads_share_a_model(offload: Callable[..., nn.Module], with_grad: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Reads(["matmul"], 1) for _ in range(3)))
    model = offload(copy.deepcopy(plain), tmp_path)
    inputs = [torch.randn(8, 6) for _ in range(4)]
    expected = [plain(x).detach() for x in inputs]

    def serve(index: int) -> None:
        x = inputs[index].clone().requires_grad_(with_grad)
        for _ in range(25):
            torch.testing.assert_close(model(x).detach(), expected[index])

    in_threads(4, serve)
    assert all(parameter.is_meta for parameter in model[0].parameters()), "the values left with the last thread"


class Waits(nn.Module):
    """Stops in its forward until another thread has looked at its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.started, self.looked = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.started.set()
        assert self.looked.wait(60)
        assert self.weight.device.type == "cpu"
        return self.norm(x @ self.weight + self.weight[0])


@pytest.mark.parametrize("offload", [on_cpu, on_disk])
def test_a_thread_does_not_see_the_weights_of_another_one(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    inner = Waits()
    inner.looked.set()
    with torch.no_grad():
        expected = inner(SQUARE)
        inner.norm.reset_running_stats()
    inner.looked.clear()
    inner.started.clear()
    model = offload(nn.Sequential(inner), tmp_path)
    outputs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(model(SQUARE)))
    thread.start()
    try:
        assert inner.started.wait(60)
        assert inner.weight.device.type == "meta" and inner.weight.is_meta
    finally:
        inner.looked.set()
        thread.join()
    torch.testing.assert_close(outputs[0].detach(), expected)
    torch.testing.assert_close(inner.norm.running_mean, 0.1 * (SQUARE @ inner.weight + inner.weight[0]).mean(0))


class Meets(nn.Linear):
    """Lets calls meet inside its forward, as the first number of their input says."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.both, self.may_end = threading.Barrier(2), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] < 2:
            self.both.wait(60)
        if x[0, 0] == 1:
            assert self.may_end.wait(60)
        return super().forward(x)


def meeting(model: nn.Module, layer: Meets) -> list[torch.Tensor]:
    """Outputs of a call that ends while another one is inside, of one that begins then, and of the other one."""
    inputs = [torch.full((2, 6), float(number)) for number in range(3)]
    outputs: list[Any] = [None] * 3

    def call(number: int) -> None:
        outputs[number] = model(inputs[number]).detach()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for number in (0, 1):
        threads[number].start()
    threads[0].join()
    threads[2].start()
    threads[2].join()
    layer.may_end.set()
    threads[1].join()
    return outputs


def test_forwards_at_the_same_time_share_what_was_read(tmp_path: Path, read: list[str]) -> None:
    torch.manual_seed(0)
    layer = Meets()
    plain = [F.linear(torch.full((2, 6), float(number)), layer.weight, layer.bias).detach() for number in range(3)]
    model = on_disk(nn.Sequential(layer), tmp_path)
    torch.testing.assert_close(meeting(model, layer), plain)
    assert read.count("0.weight") == 1


@pytest.mark.parametrize("offload", [None, on_cpu, on_disk])
def test_a_layer_stays_converted_while_a_thread_computes(offload: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = Meets()
    model: nn.Module = nn.Sequential(layer)
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
    weight, bias = layer.weight.float(), layer.bias.float()
    plain = [F.linear(torch.full((2, 6), float(number)), weight, bias).detach() for number in range(3)]
    if offload is not None:
        model = offload(model, tmp_path)
    torch.testing.assert_close(meeting(model, layer), plain)
    assert layer.weight.dtype == torch.float8_e4m3fn


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_does_not_wait_for_threads_of_its_parent(tmp_path: Path) -> None:
    model = on_disk(nn.Sequential(nn.Linear(6, 6)), tmp_path)
    expected = model(SQUARE).detach()
    held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with model[0]._hf_hook._lock:
            held.set()
            may_end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if torch.equal(model(SQUARE), expected) else 1)
    may_end.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.callback: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        if self.callback is not None and depth == 1:
            x = x + self.callback(x)
        return (self(x, depth - 1) if depth else x) @ self.weight


@modes
def test_a_forward_enters_itself(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Tree(), nn.Linear(6, 6))
    model = offload(copy.deepcopy(plain), tmp_path)
    for one in (plain, model):
        one[0].callback = lambda x, one=one: one[1](one[0](x, 0))
    x = SQUARE.clone().requires_grad_()
    for depth in (0, 1, 3):
        gradients = []
        for one in (plain, model):
            output = one[1](one[0](x, depth))
            gradients.append((output, *torch.autograd.grad(output.square().sum(), x)))
        torch.testing.assert_close(*gradients)
    assert torch.func.grad(lambda y: y.square().sum())(torch.ones(2)).tolist() == [2.0, 2.0]
    assert model[0].weight.is_meta


def test_an_exception_in_a_nested_forward_leaves_nothing_behind(tmp_path: Path) -> None:
    model = on_disk(nn.Sequential(Tree(), nn.Linear(6, 6)), tmp_path)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    model[0].callback = fail
    with pytest.raises(RuntimeError, match="no"):
        model[0](SQUARE.clone().requires_grad_(), 2)
    assert model[0].weight.is_meta and model[0].weight.device.type == "meta"
    assert torch.func.grad(lambda y: y.square().sum())(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("offload", [on_cpu, on_disk])
def test_hooks_of_a_layer_end_in_any_order(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    """PEFT brings the adapters and the layer, merges, and ends the adapters' hooks first."""
    torch.manual_seed(0)
    plain = nn.Sequential(Adapter(nn.Linear(6, 6), follow=False))
    model = offload(copy.deepcopy(plain), tmp_path)
    x = SQUARE.clone().requires_grad_()
    adapter = model[0]
    modules = [adapter.down, adapter.up, adapter.base_layer]
    for module in modules:
        module._hf_hook.pre_forward(module)
    for one in (plain[0], adapter):
        one.merge()
    for module in modules[:2]:
        module._hf_hook.post_forward(module, torch.tensor([]))
    hook = adapter.base_layer._hf_hook
    hook.weights_map = {name: value.to("cpu") for name, value in adapter.base_layer.named_parameters()}
    hook.post_forward(adapter.base_layer, torch.tensor([]))
    torch.testing.assert_close(model(x), plain(x))
    assert adapter.down.weight.is_meta and adapter.base_layer.weight.device.type == "meta"
    assert torch.func.grad(lambda y: y.square().sum())(torch.ones(2)).tolist() == [2.0, 2.0]


@modes
def test_transforms(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    model = offload(copy.deepcopy(plain), tmp_path)
    for transform in (
        lambda f: torch.func.grad(lambda x: f(x).sum())(SQUARE),
        lambda f: torch.func.vmap(f)(SQUARE),
        lambda f: torch.func.jacrev(f)(SQUARE[0]),
        lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(SQUARE),
    ):
        torch.testing.assert_close(transform(model), transform(plain))


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian, torch.func.vmap])
def test_transforms_after_a_weight_was_written(transform: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    model = cpu_offload(copy.deepcopy(plain), "cpu")
    for one in (plain, model):
        with torch.no_grad():
            one[0].weight.mul_(2)
    for _ in range(2):
        torch.testing.assert_close(transform(model)(SQUARE), transform(plain)(SQUARE))


# Writing.


def _new(module: nn.Module) -> torch.Tensor:
    return module.weight.detach() * 2 + 1


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "copy": lambda m: m.weight.copy_(_new(m)),
    "mul": lambda m: m.weight.mul_(3),
    "iadd": lambda m: _augmented(m),
    "data_iadd": lambda m: setattr(m.weight, "data", m.weight.data.add_(1)),
    "data": lambda m: setattr(m.weight, "data", _new(m)),
    "data_copy": lambda m: m.weight.data.copy_(_new(m)),
    "setitem": lambda m: m.weight.__setitem__((slice(None), 0), 7.0),
    "detach": lambda m: m.weight.detach().sub_(1),
    "init": lambda m: nn.init.constant_(m.weight, 0.25),
    "out": lambda m: torch.add(SQUARE, 1, out=m.weight.data),
    "foreach": lambda m: torch._foreach_mul_([m.weight.data, m.bias.data], 2.0),
    "load": lambda m: m.load_state_dict({"weight": SQUARE, "bias": torch.ones(6)}),
    "own": lambda m: m.weight.add_(m.weight),
}


def _augmented(module: nn.Module) -> None:
    weight = module.weight
    weight += 1
    assert weight is module.weight


@pytest.mark.parametrize("write", list(WRITES))
def test_a_write_goes_to_the_weight_in_host_memory(write: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = on_cpu(copy.deepcopy(plain), tmp_path)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (plain, model):
            one(SQUARE)
            WRITES[write](one[1])
        torch.testing.assert_close(model(SQUARE), plain(SQUARE))
    assert model[1].weight.is_meta
    remove_hook_from_submodules(model)
    assert torch.equal(model[1].weight, plain[1].weight) and model[1].weight.requires_grad


@in_files
@pytest.mark.parametrize("write", list(WRITES))
def test_a_write_to_a_weight_in_a_file_is_refused(
    write: str, offload: Callable[..., nn.Module], tmp_path: Path
) -> None:
    model = offload(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), tmp_path)
    expected = model(SQUARE).detach()
    with torch.no_grad(), pytest.raises((ConfigurationError, RuntimeError), match=r"1\.weight.*remove_hook"):
        WRITES[write](model[1])
    assert torch.equal(model(SQUARE), expected)


def test_a_state_dict_is_loaded_into_all_weights_or_none(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    expected = model(SQUARE).detach()
    with pytest.raises(ConfigurationError, match=r"1\.weight"):
        model.load_state_dict(other.state_dict())
    assert torch.equal(model(SQUARE), expected)
    model.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(model(SQUARE), other(SQUARE))


@pytest.mark.parametrize("offload", [on_cpu, on_disk])
def test_align_module_device_keeps_what_is_written_or_refuses_it(
    offload: Callable[..., nn.Module], tmp_path: Path
) -> None:
    plain = nn.Sequential(nn.Linear(6, 6))
    model = offload(copy.deepcopy(plain), tmp_path)
    for write in (lambda m: m.weight.data.mul_(2), lambda m: m.weight.detach().add_(1)):
        if offload is on_disk:
            with pytest.raises(ConfigurationError, match=r"0\.weight"), align_module_device(model[0]):
                write(model[0])
        else:
            with align_module_device(model[0]):
                write(model[0])
            write(plain[0])
        torch.testing.assert_close(model(SQUARE), plain(SQUARE))


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_statistics_of_batch_norm_in_training(where: str, offload_buffers: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model = copy.deepcopy(plain)
    options: dict[str, Any] = {"execution_device": "cpu", "offload_buffers": offload_buffers}
    model = cpu_offload(model, **options) if where == "cpu" else disk_offload(model, tmp_path, **options)
    for scale in (1, 2, 3):
        torch.testing.assert_close(model(SQUARE * scale), plain(SQUARE * scale))
    for one in (plain, model):
        one.eval()
    torch.testing.assert_close(model(SQUARE), plain(SQUARE))
    state = get_state_dict_offloaded_model(model)
    torch.testing.assert_close(state["1.running_mean"], plain[1].running_mean)
    assert state["1.num_batches_tracked"] == 3


@in_files
def test_the_model_is_brought_into_memory_to_write(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    plain = Tied()
    plain.tie_weights()
    model = offload(copy.deepcopy(plain), tmp_path)
    remove_hook_from_submodules(model)
    model.to("cpu")
    with torch.no_grad():
        for one in (plain, model):
            one.embedding.weight.mul_(2)
    assert not model.embedding.weight.is_meta
    torch.testing.assert_close(model.embedding(torch.arange(3)), plain.embedding(torch.arange(3)))


# Offloading together with other things.


@modes
def test_layers_are_stored_in_8_bits_and_offloaded(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
    model = copy.deepcopy(plain)
    for one in (plain, model):
        attach_layerwise_casting_hooks(one, torch.float8_e4m3fn, torch.float32)
    model = offload(model, tmp_path)
    assert model[0].weight.is_meta and model[0].weight.dtype == torch.float8_e4m3fn
    for _ in range(2):
        torch.testing.assert_close(model(SQUARE), plain(SQUARE))
    in_threads(4, lambda _: torch.testing.assert_close(model(SQUARE), plain(SQUARE)))


@modes
def test_layers_cannot_be_stored_in_8_bits_after_the_offload(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offload(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), tmp_path)
    expected = model(SQUARE)
    with pytest.raises(ConfigurationError, match=r"\d\.weight.*before"):
        attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
    torch.testing.assert_close(model(SQUARE), expected)


@modes
@pytest.mark.parametrize("again", MODES)
def test_a_model_is_offloaded_again(
    offload: Callable[..., nn.Module], again: Callable[..., nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 6)).eval()
    model = offload(copy.deepcopy(plain), tmp_path)
    (tmp_path / "again").mkdir()
    other = again(model, tmp_path / "again")
    torch.testing.assert_close(other(SQUARE), plain(SQUARE))
    torch.testing.assert_close(other(SQUARE), plain(SQUARE))
    if again is on_cpu:
        with torch.no_grad():
            for one in (plain, other):
                one[0].weight.mul_(2)
        torch.testing.assert_close(other(SQUARE), plain(SQUARE))
    for name, value in get_state_dict_offloaded_model(other).items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_weights_in_files_stay_there_when_they_are_offloaded_again(tmp_path: Path) -> None:
    model = on_disk(nn.Sequential(nn.Linear(6, 6)), tmp_path)
    expected, placeholder = model(SQUARE), model[0].weight
    disk_offload(model, tmp_path / "offload", "cpu")
    assert model[0].weight is placeholder, "the weight was in memory in between"
    torch.testing.assert_close(model(SQUARE), expected)


@modes
@pytest.mark.parametrize("again", [on_cpu, on_disk, by_map])
def test_a_component_of_two_models(
    offload: Callable[..., nn.Module], again: Callable[..., nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    first, second = nn.Sequential(shared, nn.Linear(6, 6)), nn.Sequential(nn.Linear(6, 6), shared)
    expected = [first(SQUARE), second(SQUARE)]
    first = offload(first, tmp_path)
    second[1] = first[0]
    (tmp_path / "again").mkdir()
    again(second, tmp_path / "again")
    for _ in range(2):
        for model, wanted in zip((first, second), expected, strict=True):
            torch.testing.assert_close(model(SQUARE), wanted)


@pytest.mark.parametrize("offload", [on_cpu, on_disk, by_map])
def test_a_compiled_model(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    compiled = torch.compile(copy.deepcopy(plain), backend="eager")
    if offload is by_map:
        result = dispatch_model(compiled, {"0": "cpu", "1": "cpu", "2": "disk"}, offload_dir=tmp_path)
    else:
        result = offload(compiled, tmp_path)
    assert result is compiled
    for _ in range(2):
        torch.testing.assert_close(result(SQUARE), plain(SQUARE))
    reads = torch.compile(on_disk(Reads(["matmul", "data", "einsum"], 1), tmp_path / "reads"), backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(reads(SQUARE), reads._orig_mod(SQUARE))


class Adapter(nn.Module):
    """An adapter of low rank, as libraries put it around a layer."""

    def __init__(self, base: nn.Linear, follow: bool) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        if follow:  # as PEFT does
            self.down.to(base.weight.device), self.up.to(base.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))

    def merge(self) -> None:
        self.base_layer.weight.data += self.up.weight @ self.down.weight

    def merge_safely(self) -> None:
        merged = self.base_layer.weight.data.clone()
        merged += self.up.weight @ self.down.weight
        self.base_layer.weight.data = merged


@modes
def test_adapters_after_the_offload(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model = offload(copy.deepcopy(plain), tmp_path)
    with torch.no_grad():
        for one in (plain, model):
            torch.manual_seed(1)
            one[0] = Adapter(one[0], follow=False)
        torch.testing.assert_close(model(SQUARE), plain(SQUARE))
        if offload is on_cpu:
            for merge in (Adapter.merge, Adapter.merge_safely):
                for one in (plain, model):
                    merge(one[0])
                torch.testing.assert_close(model(SQUARE), plain(SQUARE))
        else:
            with pytest.raises(ConfigurationError, match="remove_hook"):
                model[0].merge()
        # The values of an adapter that was moved to the meta device are gone.
        model[1] = Adapter(model[1], follow=True)
        with pytest.raises(ConfigurationError, match="before the model is offloaded"):
            model[1].base_layer.weight @ model[1].down.weight.T
        with pytest.raises(ConfigurationError, match=r"1\.down\.weight.*before"):
            model(SQUARE)


class Counts(nn.Module):
    """Counts its calls in a buffer, in a way that torch does not count as a change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls.data.add_(1)
        return x + self.calls


def test_a_buffer_that_is_changed_in_training_without_notice(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Counts())
    disk_offload(model, tmp_path, "cpu", offload_buffers=True)
    for _ in range(3):
        model(SQUARE)
    assert get_state_dict_offloaded_model(model)["1.calls"] == 3


def test_values_that_get_the_class_of_their_placeholder_stay_values() -> None:
    """compressed-tensors gives what it reads from files the class and attributes of the tensor in the module."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    cpu_offload(model, "cpu", offload_buffers=True)
    for placeholder, kind in ((model[0].weight, nn.Parameter), (model[1].running_mean, torch.Tensor)):
        placeholder.__class__ = placeholder.__class__
        assert isinstance(placeholder, Placeholder) and placeholder.__class__ is kind
        values = torch.full(placeholder.shape, 7.0)
        values.__class__ = placeholder.__class__
        values.__dict__ = placeholder.__dict__.copy()
        assert torch.equal(values * 2, torch.full(placeholder.shape, 14.0))
        with torch.no_grad():
            values += 1
        assert torch.equal(values.detach(), torch.full(placeholder.shape, 8.0))
