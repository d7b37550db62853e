"""Single tensors of models: listing, measuring, moving, writing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from bigmodel_nets import Net, net
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_bigmodel import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    calculate_maximum_sizes,
    check_device_same,
    check_tied_parameters_in_config,
    compute_module_sizes,
    compute_module_total_buffer_size,
    extract_submodules_state_dict,
    find_tied_parameters,
    get_module_children_bottom_up,
    get_module_leaves,
    get_non_persistent_buffers,
    init_empty_weights,
    init_on_device,
    load_offloaded_weight,
    load_offloaded_weights,
    named_module_tensors,
    offload_state_dict,
    offload_weight,
    retie_parameters,
    save_offload_index,
    set_module_tensor_to_device,
)
from accel_bigmodel.offload.store import are_same, origins
from accel_state import CustomDtype
from accel_state.errors import ConfigurationError
from accel_state.paths import LinkError
from accel_state.testing import run_world


def test_empty_models() -> None:
    with init_empty_weights():
        model = Net()
        nn.Linear(10**7, 10**7)  # 400 TB
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    assert all(buffer.device.type == "cpu" for buffer in model.buffers())
    assert model.head.weight is model.embed.weight and model.scale.requires_grad
    with init_empty_weights(include_buffers=True):
        assert all(tensor.device.type == "meta" for _, tensor in named_module_tensors(Net(), recurse=True))
    with init_on_device("cpu"):
        assert Net().scale.device.type == "cpu"
    assert Net().scale.device.type == "cpu", "the context is over"


def test_layers_without_values_draw_no_random_numbers() -> None:
    """torch draws them in Python on the meta device, which took a third of the time to build a linear layer."""
    drawn: list[str] = []

    class Draws(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "uniform" in str(function):
                drawn.append(args[0].device.type)
            return function(*args, **(kwargs or {}))

    with Draws(), init_empty_weights():
        with init_empty_weights():
            nn.Linear(3, 3)
        nn.Linear(3, 3)
        assert drawn == []
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            nn.Linear(2, 2).weight.uniform_(0, 1)
        torch.manual_seed(1)
        real = torch.empty(5).uniform_(2, 3)
    torch.manual_seed(1)
    assert torch.equal(real, torch.empty(5).uniform_(2, 3)) and "cpu" in drawn
    assert "uniform_" not in vars(torch.Tensor), "the context is over"


def test_empty_models_keep_ties_and_classes() -> None:
    class Special(nn.Parameter):
        pass

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.ones(4, 3).t(), requires_grad=False)
            weight.mark = "kept"  # type: ignore[attr-defined]
            self.one, self.two = weight, weight
            self.special = Special(torch.ones(2))
            self.register_parameter("absent", None)
            self.register_buffer("three", torch.ones(2)), self.register_buffer("four", self.three)

    with init_empty_weights(include_buffers=True):
        models = [Twice() for _ in range(3)]  # of equal numbers (id), where the memory of one is used again
    for model in models:
        assert model.one is model.two and model.three is model.four and model.one.mark == "kept"
        assert model.one.stride() == (1, 3) and not model.one.requires_grad and model.absent is None
        assert type(model.special) is Special and model.special.device.type == "meta"
    assert models[0].one is not models[1].one


def space_taken_by_building() -> int:
    """Bytes of address space that 64 layers take: 256 MB of values that nobody wants."""

    def space() -> int:
        return int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0]) * 1024

    with init_empty_weights():
        nn.Linear(2, 2)  # torch loads what the meta device needs
        before = space()
        layers = [nn.Linear(1024, 1024) for _ in range(64)]
    assert len(layers) == 64
    return space() - before


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the size of the address space is read as Linux tells it"
)
def test_building_takes_no_address_space() -> None:
    """The C library keeps the space of what passes through it, which a limit on the address space counts."""
    # In a process of its own: a thread that another test has left may take 64 MB at any moment.
    assert run_world(space_taken_by_building, 1, state=False)[0] < 2**26


def test_large_buffers_keep_their_values() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.empty(600, 600)
            table[:] = torch.arange(600)
            self.register_buffer("table", table)
            self.register_buffer("numbers", torch.empty((300, 300), dtype=torch.int64).fill_(3))

    with init_empty_weights():
        model = Table()
    assert torch.equal(model.table, torch.arange(600.0).expand(600, 600)) and model.numbers.eq(3).all()


def test_the_context_ends_after_an_error() -> None:
    register = nn.Module.register_parameter, nn.Module.register_buffer
    with pytest.raises(ZeroDivisionError), init_empty_weights(include_buffers=True):
        1 / 0  # noqa: B018
    assert (nn.Module.register_parameter, nn.Module.register_buffer) == register


def test_variable_includes_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "yes")
    with init_empty_weights():
        assert Net().shift.device.type == "meta"
    with init_empty_weights(include_buffers=False):
        assert Net().shift.device.type == "cpu"


def test_listing() -> None:
    model = net(blocks=1)
    assert [name for name, _ in named_module_tensors(model)] == ["scale", "shift", "mask"]
    assert [name for name, _ in named_module_tensors(model, include_buffers=False)] == ["scale"]
    assert [name for name, _ in named_module_tensors(model, remove_non_persistent=True)] == ["scale", "shift"]
    everything = dict(named_module_tensors(model, recurse=True))
    assert "blocks.0.up.weight" in everything and ("head.weight" in everything) != ("embed.weight" in everything)
    nested = nn.Sequential(model)
    assert get_non_persistent_buffers(nested) == set()
    assert get_non_persistent_buffers(nested, recurse=True) == {"mask"}
    assert get_non_persistent_buffers(nested, recurse=True, fqns=True) == {"0.mask"}
    assert [type(module).__name__ for module in get_module_children_bottom_up(nested)][-2:] == ["Net", "Sequential"]
    assert get_module_children_bottom_up(nested, return_fqns=True)[-1] == ("", nested)


def test_sizes() -> None:
    model = net(blocks=1, width=4, words=10)
    sizes = compute_module_sizes(model)
    expected = sum(tensor.numel() * 4 for _, tensor in named_module_tensors(model, recurse=True))
    assert sizes[""] == expected and sizes["embed"] == 160 and sizes["mask"] == 16
    assert sizes["blocks"] == sizes["blocks.0"] == 4 * (8 + 80 + 68)
    assert compute_module_sizes(model, dtype="float16")[""] == expected // 2
    assert compute_module_sizes(model, dtype=torch.float64)[""] == expected, "weights are never loaded larger"
    assert compute_module_sizes(model, dtype=CustomDtype.INT4)["embed"] == 20
    assert compute_module_sizes(model, dtype="int4")["embed"] == 20
    assert compute_module_sizes(model, dtype="float16", special_dtypes={"embed.weight": "float32"})["embed"] == 160
    assert (
        compute_module_total_buffer_size(model) == 32 and compute_module_sizes(model, buffers_only=True)["mask"] == 16
    )
    assert compute_module_sizes(nn.BatchNorm1d(4), dtype="float16")["num_batches_tracked"] == 8, (
        "integers stay as they are"
    )
    assert calculate_maximum_sizes(model) == (expected, (320, ["blocks.0.up"]))
    assert set(get_module_leaves(sizes)) == {name for name, _ in named_module_tensors(model, recurse=True)}


@given(st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=4))
def test_ties_are_found_and_made_again(names: list[str]) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abcd"})
    for name in names:
        model[name].weight = model[names[0]].weight
    group = sorted({f"{name}.weight" for name in names})
    assert find_tied_parameters(model) == ([group] if len(group) > 1 else [])
    for name in names[1:]:
        model[name].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    retie_parameters(model, [group])
    assert all(model.get_parameter(name) is model[names[0]].weight for name in group)


def test_configurations_that_tie() -> None:
    transformers = pytest.importorskip("transformers", reason="the configurations are those of transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=10, bos_token_id=0, eos_token_id=0)
    assert check_tied_parameters_in_config(transformers.GPT2LMHeadModel(config))
    assert not check_tied_parameters_in_config(transformers.GPT2Model(config)) and not check_tied_parameters_in_config(
        nn.Linear(1, 1)
    )


def test_moving_tensors() -> None:
    model = net()
    set_module_tensor_to_device(model, "blocks.0.up.weight", "meta")
    weight = model.blocks[0].up.weight
    assert weight.device.type == "meta" and isinstance(weight, nn.Parameter)
    value = torch.randn(64, 16)
    set_module_tensor_to_device(model, "blocks.0.up.weight", "cpu", value=value.double())
    assert torch.equal(model.blocks[0].up.weight, value) and model.blocks[0].up.weight.dtype == torch.float32
    set_module_tensor_to_device(model, "blocks.0.up.weight", "cpu", value=value, dtype="bfloat16")
    assert model.blocks[0].up.weight.dtype == torch.bfloat16
    set_module_tensor_to_device(model, "mask", "cpu", value=torch.ones(16))
    assert not isinstance(model.mask, nn.Parameter) and "mask" in dict(model.named_buffers())
    masked = nn.Module()
    masked.register_buffer("mask", torch.tensor([True, False]))
    set_module_tensor_to_device(masked, "mask", "cpu", value=torch.tensor([0, 1], dtype=torch.uint8))
    assert (~masked.mask).tolist() == [True, False]
    same = model.scale
    set_module_tensor_to_device(model, "scale", "cpu")
    assert model.scale is same
    copies = {value.data_ptr(): {}}
    for layer in (model.blocks[1].up, model.blocks[2].up):
        set_module_tensor_to_device(layer, "weight", "cpu", value=value, tied_params_map=copies)
    assert model.blocks[1].up.weight is model.blocks[2].up.weight
    for name, arguments, message in (
        ("scale", {"device": "cpu", "value": torch.ones(3)}, r"has shape \(16,\), and the given value has \(3,\)"),
        ("none", {"device": "cpu"}, "neither a parameter nor a buffer"),
        ("absent.weight", {"device": "cpu"}, "has no tensor 'absent.weight'"),
        ("scale", {"device": 0}, "this machine has none"),
        ("scale", {"device": "nowhere"}, "'nowhere' is not a device"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            set_module_tensor_to_device(model, name, **arguments)
    set_module_tensor_to_device(model, "scale", "meta")
    with pytest.raises(ConfigurationError, match="no values to put on cpu"):
        set_module_tensor_to_device(model, "scale", "cpu")


def test_devices_are_compared() -> None:
    assert check_device_same(torch.device("cuda"), torch.device("cuda:0"))
    assert not check_device_same(torch.device("cuda:1"), torch.device("cuda:0"))
    assert not check_device_same(torch.device("cpu"), torch.device("meta"))


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.randn(5).bfloat16(),
        torch.randn(5).to(torch.float8_e5m2),
        torch.tensor([True, False]),
        torch.arange(6).reshape(2, 3).t(),
    ],
    ids=lambda value: f"{value.dtype}-{tuple(value.shape)}",
)
def test_offloaded_tensors_come_back(value: torch.Tensor, tmp_path) -> None:
    index = offload_weight(value, "a.b", tmp_path)
    found = load_offloaded_weight(tmp_path / "a.b.dat", index["a.b"])
    assert found.dtype == value.dtype and found.shape == value.shape
    assert torch.equal(found.double(), value.double())
    if value.numel():
        found.zero_()
        assert torch.equal(load_offloaded_weight(tmp_path / "a.b.dat", index["a.b"]).double(), value.double()), (
            "the file is unchanged"
        )
    (tmp_path / "a.b.dat").write_bytes(b"123")
    with pytest.raises(ConfigurationError, match="has 3 bytes, but its index says"):
        load_offloaded_weight(tmp_path / "a.b.dat", index["a.b"])


@pytest.mark.parametrize("name", ["a.b.dat", "index.json"])
def test_weights_are_not_offloaded_through_links(tmp_path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).symlink_to(precious)
    with pytest.raises(LinkError, match=name):
        offload_state_dict(folder, {"a.b": torch.ones(2)})
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("name", ["../a", "/tmp/accel-a", "linked/a"])
def test_weights_stay_in_their_folder(tmp_path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "linked").symlink_to(tmp_path)
    with pytest.raises(ConfigurationError, match=name):
        offload_weight(torch.ones(2), name, folder)
    assert os.listdir(tmp_path) == ["folder"]


def test_folders_of_offloaded_weights(tmp_path) -> None:
    model = net()
    state = model.state_dict()
    offload_state_dict(tmp_path / "new" / "folder", state)
    loader = OffloadedWeightsLoader(state_dict={"more": torch.ones(1)}, save_folder=tmp_path / "new" / "folder")
    assert (
        set(loader) == {*state, "more"} and len(loader) == len(state) + 1 and "more" in loader and "less" not in loader
    )
    assert all(torch.equal(loader[name], value) for name, value in state.items())
    with pytest.raises(KeyError):
        loader["less"]
    part = PrefixedDataset(loader, "blocks.0.")
    assert (
        len(part) == 6
        and "up.weight" in part
        and set(part) == {name[9:] for name in state if name.startswith("blocks.0.")}
    )
    other = Net()
    load_offloaded_weights(other, loader.index, tmp_path / "new" / "folder")
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    load_offloaded_weights(other, {}, tmp_path)
    save_offload_index({}, tmp_path)
    assert not (tmp_path / "index.json").exists()
    save_offload_index({"a": {"dtype": "float32", "shape": [1]}}, tmp_path)
    save_offload_index({"b": {"dtype": "float32", "shape": [1]}}, tmp_path)
    assert set(OffloadedWeightsLoader(save_folder=tmp_path)) == {"a", "b"}
    assert OffloadedWeightsLoader({"a": torch.ones(1)}, tmp_path, device="meta")["a"].device.type == "cpu"
    offload_weight(torch.ones(1), "b", tmp_path)
    assert OffloadedWeightsLoader(save_folder=tmp_path, device="meta")["b"].device.type == "meta"
    assert set(extract_submodules_state_dict(state, ["blocks.0", "scale"])) == {"scale"} | {
        n for n in state if n.startswith("blocks.0.")
    }


def test_weights_in_safetensors_files(tmp_path) -> None:
    path = str(tmp_path / "model.safetensors")
    save_file({"x": torch.arange(3.0), "y": torch.arange(4.0)}, path)
    index = {
        "halved": {"safetensors_file": path, "weight_name": "x", "dtype": "float16"},
        "same": {"safetensors_file": path, "weight_name": "x", "dtype": "float32"},
        "y": {"safetensors_file": path},
    }
    loader = OffloadedWeightsLoader({"own": torch.ones(1)}, index=index)
    found = loader.read_many([*index, "own"])
    values = {name: found[name] for name in [*index, "own"]}
    assert {name: value.tolist() for name, value in values.items()} == {
        "halved": [0.0, 1.0, 2.0],
        "same": [0.0, 1.0, 2.0],
        "y": [0.0, 1.0, 2.0, 3.0],
        "own": [1.0],
    }
    assert [value.dtype for value in values.values()] == [torch.float16, torch.float32, torch.float32, torch.float32]
    assert [loader.is_mapped(name) for name in values] == [False, True, True, False]
    joined = {"experts": {"stack": object(), "dtype": "float32"}}
    assert not OffloadedWeightsLoader(index=joined).is_mapped("experts"), "tensors of experts are joined in memory"
    moved = OffloadedWeightsLoader(index=index, device="meta")
    moved.add_open_files({path: loader.open_file(path)})
    assert moved.open_file(path) is loader.open_file(path)
    assert {value.device.type for value in moved.read_many(index).values()} == {"meta"}
    assert not any(map(moved.is_mapped, index))


def test_values_that_were_replaced_or_written_to_are_told_apart(tmp_path) -> None:
    values = {"a": torch.ones(2), "b": torch.ones(2)}
    before = origins(values, ["a", "b"])
    assert are_same(before, origins(values, ["a", "b"])) and are_same([], [])
    assert not are_same(before, before[:1])
    values["b"].add_(1)
    assert not are_same(before, origins(values, ["a", "b"]))
    written = origins(values, ["a", "b"])
    values["a"] = values["a"].clone()
    assert not are_same(written, origins(values, ["a", "b"]))
    offload_state_dict(tmp_path, values)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    on_disk = origins(loader, ["a", "b"])
    assert are_same(on_disk, origins(loader, ["a", "b"]))
    loader.index["a"] = dict(loader.index["a"])
    assert not are_same(on_disk, origins(loader, ["a", "b"]))


@pytest.mark.parametrize("name", ["5.weight", "weights"])
def test_an_unknown_name_is_an_attribute_error_too(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        set_module_tensor_to_device(nn.Linear(2, 2), name, "cpu")
    assert isinstance(caught.value, ConfigurationError)
