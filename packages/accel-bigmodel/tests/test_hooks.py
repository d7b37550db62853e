"""Hooks: what they see and change, in which order, and that they leave no trace."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path

import pytest
import torch
from bigmodel_nets import net, words
from torch import fx, nn

from accel_bigmodel import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    dispatch_model,
    get_state_dict_from_offload,
    has_offloaded_params,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_bigmodel.hooks import casting
from accel_state import is_torch_version
from accel_state.errors import ConfigurationError


class Add(ModelHook):
    """Adds to the input, multiplies the output, and writes down when it was called."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def init_hook(self, module):
        self.calls.append(f"init {self.name}")
        return module

    def pre_forward(self, module, *args, **kwargs):
        self.calls.append(f"pre {self.name}")
        return (args[0] + 1, *args[1:]), kwargs

    def post_forward(self, module, output):
        self.calls.append(f"post {self.name}")
        return output * 2

    def detach_hook(self, module):
        self.calls.append(f"detach {self.name}")
        return module


class Count(ModelHook):
    """Writes down when it was called."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def pre_forward(self, module, *args, **kwargs):
        self.calls.append("pre")
        return args, kwargs


def test_a_hook_changes_arguments_and_results() -> None:
    calls: list[str] = []
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    before = dict(layer.__dict__)
    plain, shifted = layer(x), layer(x + 1)
    assert add_hook_to_module(layer, Add("a", calls)) is layer
    assert torch.equal(layer(x), shifted * 2)
    assert str(inspect.signature(layer.forward)) == str(inspect.signature(nn.Linear(1, 1).forward))
    add_hook_to_module(layer, Add("b", calls))
    assert torch.equal(layer(x), shifted * 2) and layer._hf_hook.name == "b", "the second takes the place of the first"
    remove_hook_from_module(layer)
    assert torch.equal(layer(x), plain) and layer.__dict__ == before
    assert calls == ["init a", "pre a", "post a", "init b", "pre b", "post b", "detach b"]
    assert remove_hook_from_module(layer) is layer


def test_a_hooked_forward_has_the_name_and_signature_of_the_original() -> None:
    layer = nn.Linear(3, 3)
    add_hook_to_module(layer, ModelHook())
    for hooked in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert hooked.forward.__name__ == "forward"
        assert hooked.forward.__wrapped__ == nn.Linear.forward.__get__(hooked)
        assert inspect.unwrap(hooked.forward).__self__ is hooked
        assert list(inspect.signature(hooked.forward).parameters) == ["input"]


@pytest.mark.skipif(is_torch_version("<", "2.7"), reason="torch 2.6 exports no module whose forward was replaced")
def test_hooked_modules_are_exported() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    add_hook_to_module(layer, ModelHook())
    for hooked in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        exported = torch.export.export(hooked, (x,)).module()
        torch.testing.assert_close(exported(x), layer(x))
    dispatched = dispatch_model(net(), {"": "cpu"}, force_hooks=True)
    exported = torch.export.export(dispatched, (words(),)).module()
    torch.testing.assert_close(exported(words())["logits"], dispatched(words())["logits"])


def test_appended_hooks_act_in_order() -> None:
    calls: list[str] = []
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    expected = layer(x + 2) * 4
    add_hook_to_module(layer, Add("a", calls), append=True)
    add_hook_to_module(layer, Add("b", calls), append=True)
    assert isinstance(layer._hf_hook, SequentialHook) and len(layer._hf_hook.hooks) == 2
    calls.clear()
    assert torch.equal(layer(x), expected)
    assert calls == ["pre a", "pre b", "post a", "post b"]
    remove_hook_from_module(layer)
    assert calls[-2:] == ["detach b", "detach a"]


def test_a_forward_of_somebody_else_comes_back() -> None:
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: x * 5
    mine = layer.forward
    add_hook_to_module(layer, ModelHook())
    assert torch.equal(layer(torch.ones(1)), torch.tensor([5.0]))
    remove_hook_from_module(layer)
    assert layer.forward is mine


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("change", ["append", "replace", "remove", "offload", "dispatch"])
def test_a_forward_that_is_replaced_after_the_offload_stays(wraps: bool, change: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, calls = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []
    x, layer = torch.ones(1, 3), model[1]
    plain = copy.deepcopy(model)
    cpu_offload(model, "cpu")
    inner = layer.forward
    layer.forward = lambda x: 5 * (inner(x) if wraps else nn.functional.linear(x, layer.weight, layer.bias))
    expected = 5 * plain(x)
    torch.testing.assert_close(model(x), expected)
    if change in ("append", "replace"):
        add_hook_to_module(layer, Count(calls), append=change == "append")
    elif change == "offload":
        cpu_offload(model, "cpu")
    elif change == "dispatch":
        dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    else:
        remove_hook_from_submodules(model)
    torch.testing.assert_close(model(x), expected)
    assert calls == (["pre"] if change in ("append", "replace") else []), "hooks run once, around it"
    remove_hook_from_submodules(model)
    torch.testing.assert_close(model(x), expected)
    assert not {"_old_forward", "_accel_forward"} & vars(layer).keys()


def test_no_grad() -> None:
    layer, hook = nn.Linear(3, 3), ModelHook()
    hook.no_grad = True
    add_hook_to_module(layer, hook)
    assert not layer(torch.ones(1, 3)).requires_grad
    add_hook_to_module(layer, ModelHook(), append=True)
    assert not layer(torch.ones(1, 3)).requires_grad, "one of several is enough"
    remove_hook_from_module(layer)
    assert layer(torch.ones(1, 3)).requires_grad


def test_removing_from_all_submodules() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    remove_hook_from_module(model[1], recurse=True)
    assert hasattr(model[0], "_hf_hook") and not hasattr(model[1][0], "_hf_hook")
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") or hasattr(module, "_old_forward") for module in model.modules())


def test_graph_modules() -> None:
    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    x = torch.randn(2, 3)
    plain, shifted = graph(x), graph(x + 1)
    add_hook_to_module(graph, Add("a", []))
    assert torch.equal(graph(x), shifted * 2)
    remove_hook_from_module(graph)
    assert torch.equal(graph(x), plain)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True)
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, x):
        hidden, _ = self.cell(x)
        return self.conv(hidden.transpose(1, 2))


def test_modules_of_jit_stay_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.ones(2, 3)
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)), nn.Linear(3, 3))
    expected = model(x)
    with pytest.raises(ConfigurationError, match=r'^1 is a module of torch.jit.* "1": "cpu"'):
        cpu_offload(model, "cpu")
    dispatch_model(model, {"0": "disk", "1": "cpu", "2": "disk"}, offload_dir=tmp_path)
    torch.testing.assert_close(model(x), expected)
    assert model[0].weight.is_meta and model[2].weight.is_meta


def test_layers_with_weights_of_their_own_kind() -> None:
    model, x = Recurrent(), torch.randn(1, 3, 4)
    expected = model(x)
    offloaded = cpu_offload(copy.deepcopy(model))
    assert torch.equal(offloaded(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(offloaded))(x), expected)


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_an_offloading_hook(offload_buffers: bool) -> None:
    layer, x = nn.BatchNorm1d(3).eval(), torch.randn(4, 3)
    layer.register_buffer("extra", torch.ones(1), persistent=False)
    expected = layer(x)
    weights = {name: value.clone() for name, value in layer.state_dict().items()}
    add_hook_to_module(
        layer, AlignDevicesHook("cpu", offload=True, weights_map=weights, offload_buffers=offload_buffers)
    )
    assert layer.weight.device.type == "meta" and layer.extra.device.type == "cpu"
    assert layer.running_mean.device.type == ("meta" if offload_buffers else "cpu")
    assert torch.equal(layer(x), expected) and layer.weight.device.type == "meta"
    with align_module_device(layer):
        assert torch.equal(layer.weight, weights["weight"])
    with align_module_device(layer, "cpu"):
        assert layer.weight.device.type == "cpu"
    assert layer.weight.device.type == "meta" and has_offloaded_params(layer)
    found = get_state_dict_from_offload(layer, "norm.weight", {"norm.weight": "", "norm.bias": "", "other": 1})
    assert torch.equal(found["norm.weight"], weights["weight"]) and found["other"] == 1
    remove_hook_from_module(layer)
    assert torch.equal(layer(x), expected) and layer.weight.device.type == "cpu" and not has_offloaded_params(layer)


def test_aligning_a_module_without_hooks() -> None:
    layer = nn.Linear(3, 3)
    weight = layer.weight
    with align_module_device(layer):
        assert layer.weight is weight
    with align_module_device(layer, "meta"):
        assert layer.weight.device.type == "meta"
    assert layer.weight is weight


def test_shared_weights_are_one_copy_on_a_device() -> None:
    weight = torch.randn(3, 3)
    copies = {weight.data_ptr(): {torch.device("cpu"): weight}}
    layers = [nn.Linear(3, 3, bias=False) for _ in range(2)]
    for layer in layers:
        add_hook_to_module(
            layer, AlignDevicesHook("cpu", offload=True, weights_map={"weight": weight}, tied_params_map=copies)
        )
        layer._hf_hook.onload()
    assert layers[0].weight.data_ptr() == layers[1].weight.data_ptr() == weight.data_ptr()


def test_attaching_to_a_whole_model() -> None:
    expected = net()(words())["logits"]
    model = net()
    attach_execution_device_hook(model, "cpu")
    assert hasattr(model, "_hf_hook") and hasattr(model.blocks[0].up, "_hf_hook")
    assert torch.equal(model(words())["logits"], expected)
    model = net()
    attach_align_device_hook(model, execution_device="cpu", offload=True)
    assert model.head.weight.device.type == "meta" and not hasattr(model.blocks, "_hf_hook")
    assert torch.equal(model(words())["logits"], expected)
    for arguments in (
        {"execution_device": "cpu"},
        {"execution_device": "cpu", "offload": True},
        {"execution_device": {"blocks": "cpu", "head": "cpu"}, "offload": {"blocks": True}},
        {"execution_device": "cpu", "offload": {"blocks.1": True, "blocks.2": False}},
        {"execution_device": {"": "cpu"}, "offload": True},
    ):
        model = net()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        attach_align_device_hook_on_blocks(model, weights_map=weights, **arguments)
        assert torch.equal(model(words())["logits"], expected), arguments
        remove_hook_from_submodules(model)
        assert torch.equal(model(words())["logits"], expected), arguments


def test_models_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Linear(3, 3) for _ in range(3)]
    x, expected = torch.ones(1, 3), [layer(torch.ones(1, 3)) for layer in layers]
    moves: list[tuple[int, str]] = []
    hook = None
    hooks = []
    monkeypatch.setattr(
        casting, "_moved", lambda layer, device: (moves.append((layers.index(layer), str(device))), layer)[1]
    )
    for layer in layers:
        _, hook = cpu_offload_with_hook(layer, "cpu", prev_module_hook=hook)
        hooks.append(hook)
    moves.clear()
    for layer, wanted in zip(layers, expected, strict=True):
        assert torch.equal(layer(x), wanted)
    assert moves == [(0, "cpu"), (0, "cpu"), (1, "cpu"), (1, "cpu"), (2, "cpu")], (
        "each one's turn sends the one before it back"
    )
    moves.clear()
    hooks[2].offload()
    assert moves == [(2, "cpu")]
    hooks[0].remove()
    assert not hasattr(layers[0], "_hf_hook")


def test_a_model_is_moved_only_if_a_part_of_it_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    moved = []
    monkeypatch.setattr(nn.Module, "to", lambda module, device: (moved.append(str(device)), module)[1])
    hook = casting.CpuOffload("cpu")
    hook.init_hook(model)
    hook.pre_forward(model)
    assert not moved
    model[1].running_mean = torch.zeros(2, device="meta")
    hook.init_hook(model)
    assert moved == ["cpu"]


def test_layerwise_casting() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    wanted = copy.deepcopy(model)
    for layer in (wanted[0], wanted[3]):
        layer.to(torch.float8_e4m3fn).to(torch.float32)
    attach_layerwise_casting_hooks(
        model, "float8_e4m3fn", "torch.float32", skip_modules_pattern="^2", skip_modules_classes=(nn.LayerNorm,)
    )
    assert [layer.weight.dtype for layer in (model[0], model[1], model[2][0], model[3])] == [
        *(torch.float8_e4m3fn, torch.float32, torch.float32, torch.float8_e4m3fn)
    ]
    assert isinstance(model[0]._hf_hook, LayerwiseCastingHook)
    with torch.no_grad():
        assert torch.equal(model(x), wanted(x))
    assert model[0].weight.dtype == torch.float8_e4m3fn
    with pytest.raises(RuntimeError):
        model[0](torch.randn(2, 5))
    assert model[0].weight.dtype == torch.float8_e4m3fn, "after an error too"
    with pytest.raises(ConfigurationError, match=r"torch.int8 cannot hold weights"):
        attach_layerwise_casting_hooks(model, torch.int8, torch.float32)


@pytest.mark.slow  # starts torch.compile; the other tests call hooks without it
def test_compiled_models_with_hooks_compute_the_same() -> None:
    model = cpu_offload(net())
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(words())["logits"], net()(words())["logits"])
        assert torch.equal(compiled(words())["logits"], net()(words())["logits"])
