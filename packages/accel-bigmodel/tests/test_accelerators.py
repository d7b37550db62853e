"""Models over an accelerator, the CPU and the disk; skipped where there is no accelerator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bigmodel_nets import Net, blocks_on, net, save, words
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    get_max_memory,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
)
from accel_bigmodel.offload.prefetch import Prefetcher
from accel_state import devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(devices.detect().name == "cpu", reason="this machine has no accelerator"),
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    return torch.device(devices.detect().name, 0)


class Unsplit(nn.Sequential):
    _no_split_modules = ("Unsplit",)


@pytest.mark.parametrize("first", ["block", "layer"])
def test_devices_are_used_although_the_first_block_fits_on_none(
    first: str, device: torch.device, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        large = Unsplit(*(nn.Linear(32, 32) for _ in range(4))) if first == "block" else nn.Embedding(1000, 32)
        return nn.Sequential(large, nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(8, 4))

    layer = 32 * 33 * 4  # bytes
    x = torch.randn(3, 32) if first == "block" else torch.tensor([1, 7, 999])
    ran: dict[str, str] = {}
    with torch.no_grad():
        expected = build()(x)
        save_file(build().state_dict(), tmp_path / "model.safetensors")
        model = load_checkpoint_and_dispatch(
            build(),
            tmp_path / "model.safetensors",
            device_map="auto",
            max_memory={0: 3 * layer, "cpu": 0},
            no_split_module_classes=["Unsplit"],
        )
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.register_forward_hook(lambda _, __, out, name=name: ran.update({name: out.device.type}))
        for _ in range(2):
            torch.testing.assert_close(model(x).cpu(), expected)
    assert {"disk", 0} == set(model.hf_device_map.values()), model.hf_device_map
    # Layers of a block visit the device one after the other; one that is too large for it runs on the CPU.
    alone = {"0"} if first == "layer" else set()
    assert {name for name, where in ran.items() if where == "cpu"} == alone


def test_a_model_of_which_nothing_stays_on_a_device_is_computed_there(device: torch.device, tmp_path: Path) -> None:
    x = torch.randn(3, 32)
    with torch.no_grad():
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        expected = model(x)
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        memory = {0: 32 * 33 * 4 + 100, "cpu": 0}  # one layer, which another one may have to visit
        model = load_checkpoint_and_dispatch(
            model, tmp_path / "model.safetensors", device_map="auto", max_memory=memory
        )
        devices_used = set()
        model[1].register_forward_hook(lambda _, __, out: devices_used.add(out.device.type))
        torch.testing.assert_close(model(x).cpu(), expected)
    assert model.hf_device_map == {"": "disk"} and devices_used == {device.type}


@pytest.mark.parametrize("kind", ["all", "memory", "disk", "mixed"])
def test_every_mixture_gives_the_bits_of_the_accelerator(kind: str, device: torch.device, tmp_path: Path) -> None:
    plain = net(blocks=6, width=64)
    file = save(plain, tmp_path / "model.safetensors")
    device_map = {
        "all": {"": 0},
        "memory": blocks_on(plain, "cpu", others=0),
        "disk": blocks_on(plain, "disk", others=0),
        "mixed": {**blocks_on(plain, "disk", others=0), "blocks.1": "cpu", "blocks.4": 0},
    }[kind]
    with torch.no_grad():
        expected = net(blocks=6, width=64).to(device)(words().to(device))
    with init_empty_weights():
        model = Net(blocks=6, width=64).eval()
    load_checkpoint_and_dispatch(model, file, device_map=device_map)
    with torch.no_grad():
        # A model that is on one device as a whole has no hooks, so nothing moves its inputs.
        for inputs in (words().to(device),) if kind == "all" else (words(), words().to(device)):
            for _ in range(3):
                found = model(inputs)
                if kind != "all":
                    assert found["logits"].device == inputs.device, "outputs go to where inputs came from"
                assert all(torch.equal(found[key].to(device), expected[key]) for key in expected), kind


def test_offloading_to_memory_and_disk(device: torch.device, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = net().to(device)(words().to(device))["logits"].cpu()
        for offload in (
            lambda model: cpu_offload(model, device),
            lambda model: disk_offload(model, tmp_path / "o", device),
        ):
            model = offload(net())
            assert torch.equal(model(words())["logits"], expected)
            remove_hook_from_submodules(model)
            assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_no_more_than_a_few_layers_are_on_the_accelerator(device: torch.device) -> None:
    kind = devices.get(device.type)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(32)))  # 4 MB each
    dispatch_model(model, {str(index): "cpu" for index in range(1, 32)} | {"0": 0})
    base, peak = kind.memory_allocated(0), 0

    def measure(*_: object) -> None:
        nonlocal peak
        peak = max(peak, kind.memory_allocated(0))

    for layer in model:
        layer.register_forward_hook(measure)
    with torch.no_grad():
        model(torch.ones(1, 1024, device=device))
    assert peak - base <= 6 * 2**22


def test_models_take_turns(device: torch.device) -> None:
    first, first_hook = cpu_offload_with_hook(nn.Linear(3, 3), device)
    second, second_hook = cpu_offload_with_hook(nn.Linear(3, 3), device, prev_module_hook=first_hook)
    second(first(torch.ones(1, 3)))
    assert first.weight.device.type == "cpu" and second.weight.device == device
    second_hook.offload()
    assert second.weight.device.type == "cpu"


def test_its_memory_is_known(device: torch.device) -> None:
    limits = get_max_memory()
    assert limits[0] > 0 and list(limits) == [*range(len(limits) - 1), "cpu"]


def timed_layers(device: torch.device, layers: int, width: int) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    return dispatch_model(model, {**{str(index): "cpu" for index in range(layers - 1)}, str(layers - 1): device.index})


def test_the_next_weights_arrive_while_the_current_ones_are_used(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = devices.get(device.type)
    if not hasattr(kind.module, "Stream"):
        pytest.skip(f"{device.type} has no streams")
    layers, width = 8, 4096
    model = timed_layers(device, layers, width)
    arrived, computed = {}, {}
    fetch = Prefetcher._fetch

    def event(stream: object) -> Any:
        found = kind.module.Event(enable_timing=True)
        found.record(stream)
        return found

    def noting(self: Prefetcher, index: int) -> Any:
        fetched = fetch(self, index)
        arrived[index] = event(self._staging[device]._stream)
        return replace(fetched, arrival=arrived[index])

    monkeypatch.setattr(Prefetcher, "_fetch", noting)
    for index, layer in enumerate(model):
        layer.register_forward_hook(
            lambda *_, index=index: computed.update({index: event(kind.module.current_stream(device))})
        )
    rows = torch.ones(2**15, width, device=device)
    with torch.no_grad():
        for _ in range(2):
            begin = event(kind.module.current_stream(device))
            model(rows)
            kind.module.synchronize()
    # Layer k + 1 has arrived before layer k is computed.
    early = [begin.elapsed_time(arrived[k + 1]) < begin.elapsed_time(computed[k]) for k in range(layers - 2)]
    assert sum(early) >= len(early) - 1, early


def test_a_host_that_is_ahead_does_not_copy_the_whole_model(device: torch.device) -> None:
    kind = devices.get(device.type)
    if not hasattr(kind.module, "memory_stats"):
        pytest.skip(f"{device.type} does not count the memory that is still in use by its streams")
    # The simulated GPU computes at once, and keeps what was freed until the host knows that it may be used again.
    layers, width, length = (24, 64, 4) if device.type == "simgpu" else (24, 2048, 2**16)
    model = timed_layers(device, layers, width)
    rows = torch.ones(length, width, device=device)
    with torch.no_grad():
        for _ in range(2):
            kind.module.synchronize()
            kind.module.empty_cache()
            kind.module.reset_peak_memory_stats()
            base = kind.module.memory_stats()["active_bytes.all.current"]
            model(rows)
            peak = kind.module.memory_stats()["active_bytes.all.peak"]
            kind.module.synchronize()
    assert peak - base <= 3 * rows.nbytes + 5 * width * width * 4
