"""What is assigned to a hook while it is attached takes effect at the next use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from accel_bigmodel import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    align_module_device,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    get_state_dict_offloaded_model,
    offload_state_dict,
    remove_hook_from_module,
)
from accel_bigmodel.hooks.experts import RoutedExpertsHook
from accel_bigmodel.offload.store import OffloadedWeightsLoader, PrefixedDataset
from accel_state.errors import ConfigurationError

X = torch.tensor([[1.0, -2.0, 3.0]])


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))


def on_cpu(model: nn.Module, directory: Path) -> nn.Module:
    return cpu_offload(model, "cpu")


def on_disk(model: nn.Module, directory: Path) -> nn.Module:
    return disk_offload(model, directory, "cpu")


def kept_mapped(model: nn.Module, directory: Path) -> nn.Module:
    """On the disk, with room for the pages of all layers to stay mapped."""
    offload_state_dict(directory, model.state_dict())
    return dispatch_model(model, {"": "disk"}, offload_dir=directory, max_memory={"cpu": 2**30})


def values_of(layer: nn.Linear) -> dict[str, torch.Tensor]:
    return {"weight": layer.weight.detach().clone(), "bias": layer.bias.detach().clone()}


offloads = pytest.mark.parametrize("offload", [on_cpu, on_disk, kept_mapped])


@offloads
@pytest.mark.parametrize("with_partial_forward", [False, True])
def test_weights_map(offload: Callable[..., nn.Module], with_partial_forward: bool, tmp_path: Path) -> None:
    plain = layers()
    model = offload(copy.deepcopy(plain), tmp_path)
    torch.testing.assert_close(model(X), plain(X))
    with torch.no_grad():
        plain[1].weight.mul_(3)
    if with_partial_forward:
        model[0](X)  # fetches the weights of the next layer ahead
    model[1]._hf_hook.weights_map = values_of(plain[1])
    for _ in range(2):
        torch.testing.assert_close(model(X), plain(X))
    torch.testing.assert_close(get_state_dict_offloaded_model(model)["1.weight"], plain[1].weight.detach())
    with align_module_device(model[1]):
        torch.testing.assert_close(model[1].weight.detach(), plain[1].weight.detach())
    with torch.no_grad():
        plain[1].weight.add_(1)
    if with_partial_forward:
        model[0](X)
    model[1]._hf_hook.weights_map["weight"] = plain[1].weight.detach()
    torch.testing.assert_close(model(X), plain(X))
    remove_hook_from_module(model, recurse=True)
    torch.testing.assert_close(model(X), plain(X))


@offloads
def test_the_merge_of_an_adapter(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    """PEFT's sequence: bring the weights, add to them, assign them as the map, finish the forward."""
    plain = layers()
    model = offload(copy.deepcopy(plain), tmp_path)
    for layer, module in zip(plain, model, strict=True):
        with torch.no_grad():
            layer.weight.add_(0.5)
        hook = module._hf_hook
        hook.pre_forward(module)
        module.weight.data += 0.5
        hook.weights_map = {name: value.to("cpu") for name, value in module.named_parameters()}
        hook.post_forward(module, torch.tensor([]))
        assert module.weight.is_meta
    for _ in range(2):
        torch.testing.assert_close(model(X), plain(X))


def test_the_backward_reads_the_weights_of_its_forward() -> None:
    plain = layers()
    model = cpu_offload(copy.deepcopy(plain), "cpu")
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    output = model(x)
    model[1]._hf_hook.weights_map = {name: torch.zeros_like(value) for name, value in values_of(plain[1]).items()}
    output.sum().backward()
    plain(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("write", ["mul", "load_state_dict"])
def test_a_backward_refuses_weights_that_were_written_after_its_forward(write: str) -> None:
    plain = layers()
    model = cpu_offload(copy.deepcopy(plain), "cpu")
    for one in (plain, model):
        x = X.clone().requires_grad_()
        outputs = one(x).sum()
        if write == "mul":
            with torch.no_grad():
                one[1].weight.mul_(2)
        else:
            one.load_state_dict({name: value * 2 for name, value in one.state_dict().items()})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outputs.backward()
    gradients = []
    for one in (plain, model):
        x = X.clone().requires_grad_()
        one(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


@offloads
def test_offload_is_switched_off(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    plain = layers()
    model = offload(copy.deepcopy(plain), tmp_path)
    model(X)
    model[1]._hf_hook.offload = False
    torch.testing.assert_close(model(X), plain(X))
    assert not model[1].weight.is_meta and model[0].weight.is_meta, "the weights stay from now on"
    with torch.no_grad():
        model[1].weight.zero_()
        plain[1].weight.zero_()
    torch.testing.assert_close(model(X), plain(X))


@offloads
def test_offload_is_switched_off_to_remove_the_hook_without_reading(
    offload: Callable[..., nn.Module], tmp_path: Path
) -> None:
    model = offload(layers(), tmp_path)
    model(X)
    for file in tmp_path.glob("*.dat"):
        file.unlink()
    mine = nn.Parameter(torch.ones(3, 3))
    placeholder = model[1].weight
    model[0].weight = mine
    for layer in model:
        layer._hf_hook.offload = False
        remove_hook_from_module(layer)
    assert model[0].weight is mine, "what a client has put there stays"
    assert model[1].weight is placeholder


def test_offload_is_switched_on() -> None:
    layer = nn.Linear(3, 3)
    expected = layer(X)
    add_hook_to_module(layer, AlignDevicesHook("cpu"))
    layer(X)
    layer._hf_hook.offload = True
    assert torch.equal(layer(X), expected)
    assert layer.weight.is_meta and set(layer._hf_hook.weights_map) == {"weight", "bias"}
    remove_hook_from_module(layer)
    assert torch.equal(layer(X), expected)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_hook_that_was_attached_without_its_init(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """compressed-tensors attaches hooks like this, to modules with or without values."""
    layer = nn.Linear(3, 3)
    expected, values = layer(X), values_of(layer)
    if where == "disk":
        layer.to("meta")
    hook = AlignDevicesHook("cpu", offload=True, io_same_device=True, weights_map=values, offload_buffers=True)
    with monkeypatch.context() as patch:
        patch.setattr(AlignDevicesHook, "init_hook", lambda self, module: module)
        add_hook_to_module(layer, hook)
    hook.original_devices = {"weight": torch.device("cpu"), "bias": torch.device("cpu")}
    for use in (lambda: layer(X), lambda: remove_hook_from_module(layer)(X)):
        assert torch.equal(use(), expected)
    assert not layer.weight.is_meta


def test_original_devices() -> None:
    layer = nn.Linear(3, 3)
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    layer(X)
    layer._hf_hook.original_devices = {"weight": torch.device("meta"), "bias": torch.device("cpu")}
    remove_hook_from_module(layer)
    assert layer.weight.is_meta and layer.bias.device.type == "cpu", "only what was elsewhere is brought back"


def test_execution_device() -> None:
    for offload in (False, True):
        layer = nn.BatchNorm1d(3).eval()
        expected = layer(X)
        add_hook_to_module(layer, AlignDevicesHook("cpu", offload=offload))
        layer(X)
        layer._hf_hook.execution_device = "meta"
        args, kwargs = layer._hf_hook.pre_forward(layer, X, other=X)
        assert args[0].is_meta and kwargs["other"].is_meta
        layer._hf_hook.post_forward(layer, X)
        layer._hf_hook.execution_device = "cpu"
        assert torch.equal(layer(X), expected)
    model = cpu_offload(layers(), "cpu")
    expected = model(X)
    model[1]._hf_hook.execution_device = torch.device("meta")
    assert model[1](X).is_meta
    model[1]._hf_hook.execution_device = "cpu"
    assert torch.equal(model(X), expected)


def test_io_same_device_and_skip_keys() -> None:
    layer = nn.Linear(3, 3)
    add_hook_to_module(layer, AlignDevicesHook("meta"))
    hook = layer._hf_hook
    hook.pre_forward(layer, X)
    assert hook.post_forward(layer, torch.ones(1, device="meta")).is_meta
    hook.io_same_device, hook.skip_keys = True, ["aside"]
    _, kwargs = hook.pre_forward(layer, X.to("meta"), aside=X, other=X)
    assert kwargs["aside"] is X and kwargs["other"].is_meta
    assert hook.post_forward(layer, {"x": X})["x"].is_meta


def test_offload_buffers() -> None:
    layer, x = nn.BatchNorm1d(3).eval(), torch.randn(4, 3)
    layer.running_mean.add_(1)
    expected = layer(x)
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    for flag in (True, False, True):
        layer._hf_hook.offload_buffers = flag
        assert torch.equal(layer(x), expected)
        assert layer.running_mean.is_meta is flag and layer.weight.is_meta
    remove_hook_from_module(layer)
    assert torch.equal(layer(x), expected)


def test_place_submodules() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    expected = model(X)
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True))
    for flag in (True, False, True):
        model._hf_hook.place_submodules = flag
        assert torch.equal(model(X), expected) and model[0].weight.is_meta is flag
    remove_hook_from_module(model)
    assert torch.equal(model(X), expected)


def test_tied_params_map() -> None:
    plain = layers()
    model = cpu_offload(copy.deepcopy(plain), "cpu")
    model(X)
    hook = model[1]._hf_hook
    stored, copied = hook.weights_map["weight"], torch.full((3, 3), 0.25)
    hook.tied_params_map = {stored.data_ptr(): {torch.device("cpu"): copied}}
    nn.init.constant_(plain[1].weight, 0.25)
    torch.testing.assert_close(model(X), plain(X))
    hook.tied_params_map = None
    with torch.no_grad():
        plain[1].weight.copy_(stored)
    torch.testing.assert_close(model(X), plain(X))


@offloads
def test_a_weight_that_is_assigned_to_the_module(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    plain = layers()
    model = offload(copy.deepcopy(plain), tmp_path)
    model(X)
    mine = nn.Parameter(torch.full((3, 3), 0.5))
    changed = {"1.weight": mine, "1.bias": torch.ones(3)}
    torch.testing.assert_close(
        torch.func.functional_call(model, changed, (X,)), torch.func.functional_call(plain, changed, (X,))
    )
    torch.testing.assert_close(model(X), plain(X), msg="functional_call leaves nothing behind")
    model[1].weight = plain[1].weight = mine
    for _ in range(2):
        torch.testing.assert_close(model(X), plain(X))
    torch.testing.assert_close(get_state_dict_offloaded_model(model)["1.weight"], mine.detach())
    nn.init.ones_(plain[2].weight)
    model.load_state_dict(plain.state_dict(), assign=True)
    torch.testing.assert_close(model(X), plain(X))
    remove_hook_from_module(model, recurse=True)
    torch.testing.assert_close(model(X), plain(X))
    assert model[1].weight.detach().equal(mine)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


def without_bias(layer: nn.Linear) -> None:
    layer.bias = None


def with_constant_bias(layer: nn.Linear) -> None:
    value = layer.bias.detach().clone()
    del layer.bias
    layer.register_buffer("bias", value)


@offloads
@pytest.mark.parametrize(
    "change",
    [
        without_bias,
        with_constant_bias,
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric()),
        lambda layer: nn.utils.parametrizations.spectral_norm(layer.eval()),
    ],
    ids=["none", "buffer", "prune", "parametrize", "spectral_norm"],
)
def test_a_weight_that_is_taken_away_from_the_module(
    change: Callable[[nn.Linear], Any], offload: Callable[..., nn.Module], tmp_path: Path
) -> None:
    plain = layers()
    model = offload(copy.deepcopy(plain), tmp_path)
    model(X)
    for one in (plain, model):
        torch.manual_seed(0)
        change(one[1])
    copied = copy.deepcopy(model)
    for _ in range(2):
        torch.testing.assert_close(model(X), plain(X))
    torch.testing.assert_close(copied(X), plain(X))
    torch.testing.assert_close(get_state_dict_offloaded_model(model), dict(plain.state_dict()))
    remove_hook_from_module(model, recurse=True)
    torch.testing.assert_close(model(X), plain(X))


def map_of(model: nn.Module, name: str) -> tuple[Any, str]:
    """The weights map that has a weight, and the name in it; below the prefixes, as clients look for it."""
    owner, _, key = name.rpartition(".")
    hook: Any = getattr(model.get_submodule(owner), "_hf_hook", None)
    weights, key = (hook.weights_map, key) if isinstance(hook, AlignDevicesHook) else (model._hf_hook.weights_map, name)
    while isinstance(weights, PrefixedDataset):
        weights, key = weights.dataset, f"{weights.prefix}{key}"
    return weights, key


@offloads
def test_weights_map_has_what_was_assigned_to_the_module(offload: Callable[..., nn.Module], tmp_path: Path) -> None:
    plain = layers()
    model = offload(copy.deepcopy(plain), tmp_path)
    placeholder, mine = model[1].weight, nn.Parameter(torch.full((3, 3), 0.5))
    model[1].weight = mine
    weights, key = map_of(model, "1.weight")
    held = weights.state_dict if isinstance(weights, OffloadedWeightsLoader) else weights
    assert held[key].equal(mine), "and not in a file only, where compressed-tensors expects an empty parameter"
    assert weights[key].equal(mine)
    # What is written to other weights of this view lasts, and reading it changed nothing.
    held[map_of(model, "1.bias")[1]] = plain[1].bias.data.fill_(2)
    model[1].weight = placeholder
    weights, key = map_of(model, "1.weight")
    assert weights[key].equal(plain[1].weight)
    torch.testing.assert_close(model(X), plain(X))


def test_a_hook_of_another_module() -> None:
    """Transformers gives the hook of an embedding to the larger one that takes its place."""
    small, large = nn.Linear(3, 3), nn.Linear(3, 4)
    expected = large(X)
    add_hook_to_module(small, AlignDevicesHook("cpu", offload=True))
    small(X)
    hook = small._hf_hook
    hook.weights_map = None
    add_hook_to_module(large, hook)
    assert torch.equal(large(X), expected) and large.weight.is_meta


def test_a_module_without_values_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="bias"):
        add_hook_to_module(
            nn.Linear(3, 3, device="meta"), AlignDevicesHook("cpu", offload=True, weights_map={"weight": X})
        )


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 3, 3))

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        return torch.stack([hidden[row] @ self.up[int(expert)] for row, expert in enumerate(top_k_index[:, 0])])


@pytest.mark.parametrize("capacity", [0, 2])
def test_the_experts_that_a_hook_keeps(capacity: int) -> None:
    plain, choice = Experts(), torch.tensor([[3], [1]])
    model, hidden = copy.deepcopy(plain), torch.randn(2, 3)
    hook = RoutedExpertsHook("cpu", offload=True, weights_map={"up": plain.up.detach().clone()})
    add_hook_to_module(model, hook)
    hook.set_capacity(capacity)
    with torch.no_grad():
        torch.testing.assert_close(model(hidden, choice), plain(hidden, choice))
        plain.up.mul_(2)
        hook.weights_map = {"up": plain.up.detach().clone()}
        torch.testing.assert_close(model(hidden, choice), plain(hidden, choice))
        plain.up.mul_(2)
        hook.weights_map["up"] = plain.up.detach().clone()
        torch.testing.assert_close(model(hidden, choice), plain(hidden, choice))
        plain.up.mul_(2)
        hook.weights_map["up"].mul_(2)
        torch.testing.assert_close(model(hidden, choice), plain(hidden, choice))


def test_the_hooks_of_a_sequence() -> None:
    layer = nn.Linear(3, 3)
    expected, values = layer(X), values_of(layer)
    add_hook_to_module(layer, SequentialHook(ModelHook(), ModelHook()))
    layer._hf_hook.hooks = (ModelHook(), AlignDevicesHook("cpu", offload=True, weights_map=values))
    assert torch.equal(layer(X), expected) and layer.weight.is_meta
    x = X.clone().requires_grad_()
    assert layer(x).requires_grad
    layer._hf_hook.no_grad = True
    assert not layer(x).requires_grad


def test_casting_and_turns() -> None:
    layer = nn.Linear(3, 3)
    add_hook_to_module(layer, LayerwiseCastingHook(torch.bfloat16, torch.float32, non_blocking=False))
    layer._hf_hook.storage_dtype, layer._hf_hook.compute_dtype = torch.float16, torch.float64
    assert layer(X.double()).dtype == torch.float64 and layer.weight.dtype == torch.float16
    first, first_handle = cpu_offload_with_hook(nn.Linear(3, 3), "cpu")
    second, handle = cpu_offload_with_hook(nn.Linear(3, 3), "cpu")
    assert isinstance(handle.hook, CpuOffload)
    handle.hook.execution_device = "meta"
    assert second(X).is_meta
    released: list[bool] = []
    first_handle.hook.init_hook = lambda model: released.append(model is first)
    handle.hook.prev_module_hook = first_handle
    second(X)
    assert released == [True]
