"""What accel copies to the host has arrived when the call returns: no later work on the device completes it."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as parse
from torch import nn
from transformers import BatchFeature

from accel import Accelerator
from accel.fault_tolerance.transport import StateTransport
from accel.fsdp.checkpoint import files
from accel.parallel.documents import Documents
from accel.parallel.expert_balance import ExpertBalancer, LoadCounter
from accel.strategies.first_calls import _digest
from accel.utils import fsdp2_load_full_state_dict
from accel_bigmodel import cpu_offload
from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.base import add_hook_to_module
from accel_bigmodel.hooks.state_dicts import get_state_dict_offloaded_model
from accel_bigmodel.offload.store import offload_weight
from accel_bigmodel.tensors import set_module_tensor_to_device
from accel_checkpoint.validation import remember
from accel_quant import BnbQuantizationConfig, load_and_quantize_model
from accel_quant.quantizers.bnb_8bit import Bnb8Bit
from accel_state.collectives.single import Collectives
from accel_state.context import isolated
from accel_state.operations import send_to_device
from accel_state.safetensors_writer import write_safetensors

DEVICE = torch.device("simgpu", 0)
VALUES = np.arange(512, dtype=np.float32)


def _values() -> torch.Tensor:
    return torch.arange(512.0, device=DEVICE)


def _layer() -> nn.Module:
    layer = nn.Linear(512, 1, bias=False, device=DEVICE)
    with torch.no_grad():
        layer.weight.copy_(_values())
    return layer


def _state_dict(_: Path) -> torch.Tensor:
    return get_state_dict_offloaded_model(_layer())["weight"]


def _offloaded_state_dict(_: Path) -> torch.Tensor:
    layer = cpu_offload(_layer(), DEVICE, state_dict={"weight": _values().view(1, -1)})
    return get_state_dict_offloaded_model(layer)["weight"]


def _offloaded_weights(_: Path) -> torch.Tensor:
    return get_state_dict_offloaded_model(cpu_offload(_layer(), DEVICE))["weight"]


def _weights_of_a_hook(_: Path) -> torch.Tensor:
    layer = _layer()
    hook = AlignDevicesHook(execution_device=DEVICE, offload=True)
    add_hook_to_module(layer, hook)
    assert isinstance(hook.weights_map, dict)
    return hook.weights_map["weight"]


def _weight_moved_to_the_host(_: Path) -> torch.Tensor:
    layer = _layer()
    set_module_tensor_to_device(layer, "weight", "cpu")
    return layer.weight


def _batch_moved_to_the_host(_: Path) -> torch.Tensor:
    return send_to_device({"x": _values()}, "cpu")["x"]


def _batch_object_moved_to_the_host(_: Path) -> torch.Tensor:
    return send_to_device(BatchFeature({"x": _values()}), "cpu")["x"]


def _offloaded_file(folder: Path) -> torch.Tensor:
    offload_weight(_values(), "weight", folder)
    return torch.from_numpy(np.fromfile(folder / "weight.dat", np.float32))


def _safetensors(_: Path) -> torch.Tensor:
    target = io.BytesIO()
    write_safetensors({"x": _values()}, target)
    return parse(target.getvalue())["x"]


def _state_before_a_load(_: Path) -> torch.Tensor:
    loaded: dict[str, Any] = {}
    remember(SimpleNamespace(state_dict=lambda: {"x": [_values()]}, load_state_dict=loaded.update))()
    return loaded["x"][0]


def _file_of_a_gathered_tensor(_: Path) -> torch.Tensor:
    return files.on_disk(_values())


def _state_for_another_replica(_: Path) -> Any:
    seconds = timedelta(seconds=60)
    sender, receiver = (StateTransport("127.0.0.1", b"token", seconds) for _ in range(2))
    try:
        sender.send_checkpoint([1], 0, {"x": _values()}, seconds)
        return receiver.recv_checkpoint(0, sender.metadata(), 0, seconds)["x"].cpu()
    finally:
        sender.shutdown()
        receiver.shutdown()


def _load_of_experts(_: Path) -> torch.Tensor:
    counter = LoadCounter(512)
    counter.add(_values().long(), int(VALUES.sum()))
    (tokens,) = ExpertBalancer({"layer": counter}, {}, 0.0, Collectives(), DEVICE).load().tokens.values()
    return tokens


def _weights_of_a_model_in_host_memory(_: Path) -> torch.Tensor:
    model = nn.Linear(512, 1, bias=False)
    with isolated():
        fsdp2_load_full_state_dict(Accelerator(), model, {"weight": _values().view(1, -1)}, cpu_offload=True)
    return model.weight


@pytest.mark.parametrize(
    "copied",
    [
        _state_dict,
        _offloaded_state_dict,
        _offloaded_weights,
        _weights_of_a_hook,
        _weight_moved_to_the_host,
        _batch_moved_to_the_host,
        _batch_object_moved_to_the_host,
        _offloaded_file,
        _safetensors,
        _state_before_a_load,
        _file_of_a_gathered_tensor,
        _state_for_another_replica,
        _load_of_experts,
        _weights_of_a_model_in_host_memory,
    ],
    ids=lambda function: function.__name__.strip("_"),
)
def test_the_copy_is_complete(copied: Callable[[Path], torch.Tensor], tmp_path: Path) -> None:
    host = copied(tmp_path)
    assert host.is_cpu
    np.testing.assert_array_equal(host.detach().reshape(-1).numpy(), VALUES)


def test_a_gathered_tensor_where_files_without_names_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.Path, "exists", lambda _: False)
    np.testing.assert_array_equal(files.on_disk(_values()).numpy(), VALUES)


def test_the_digest_of_a_batch_is_that_of_its_values() -> None:
    assert _digest([_values()]) == _digest([torch.arange(512.0)]) != _digest([torch.zeros(512)])


def test_documents_are_split_by_their_lengths() -> None:
    positions = torch.cat([torch.arange(300), torch.arange(20), torch.arange(192)])[None]
    expected = Documents.of_positions(positions).split_evenly(2)
    assert torch.equal(Documents.of_positions(positions.to(DEVICE)).split_evenly(2), expected)


def test_a_weight_is_quantized_on_the_cpu_when_it_has_arrived_there() -> None:
    pytest.importorskip("bitsandbytes")
    quantizer, layers = Bnb8Bit(BnbQuantizationConfig(load_in_8bit=True)), []
    for weight in (torch.from_numpy(VALUES).view(2, -1), _values().view(2, -1)):
        layers.append(quantizer.layer(nn.Linear(256, 2, bias=False)))
        quantizer.quantize(layers[-1], weight, torch.device("cpu"))
    on_cpu, from_device = (layer.weight for layer in layers)
    assert torch.equal(from_device.data, on_cpu.data) and torch.equal(from_device.SCB, on_cpu.SCB)


def test_a_weight_that_is_quantized_on_the_device_is_complete_on_the_disk(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = BnbQuantizationConfig(load_in_8bit=True)
    model = nn.Sequential(nn.Linear(256, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[0].weight.data = torch.from_numpy(VALUES).view(2, -1)
    quantizer = Bnb8Bit(config)
    layer = quantizer.layer(nn.Linear(256, 2, bias=False))
    quantizer.quantize(layer, model[0].weight, DEVICE)
    expected = {name: tensor.cpu() for name, tensor in quantizer.tensors(layer).items()}
    load_and_quantize_model(model, config, device_map={"0": "disk", "1": 0}, offload_folder=tmp_path)
    written = parse((tmp_path / "0.quantized.safetensors").read_bytes())
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
