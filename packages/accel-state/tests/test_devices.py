"""Devices: a conformance test over every registered name, the CPU for real, and the base class behind a vendor's
plug-in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import torch

from accel_state import devices
from accel_state.devices.base import Device
from accel_state.enums import DistributedType
from accel_state.errors import ConfigurationError, MissingDependencyError
from accel_state.memory import clear_device_cache
from accel_state.random import rng_kind
from accel_state.testing import WorldError, run_world

NAMES = devices.names()

PLUG_IN = """
    import types, torch
    if {broken}:
        raise ImportError("libhccl.so: cannot open shared object file")
    current, states = [0], [torch.zeros(4, dtype=torch.uint8) for _ in range({count})]
    npu = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: {count},
        set_device=lambda device: current.__setitem__(0, device.index), current_device=lambda: current[0],
        synchronize=lambda: None, empty_cache=lambda: None,
        manual_seed_all=lambda seed: [state.fill_(seed) for state in states],
        get_rng_state=lambda: states[current[0]].clone(), set_rng_state=lambda state: states[current[0]].copy_(state),
        get_rng_state_all=lambda: [state.clone() for state in states],
        set_rng_state_all=lambda new: [state.copy_(value) for state, value in zip(states, new)],
        get_device_properties=lambda index: types.SimpleNamespace(
            total_memory=1000 + index, pci_bus_id=0x3B, pci_domain_id=0, pci_device_id=0),
        memory_reserved=lambda index: 300, memory_allocated=lambda index: 200,
    )
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", npu)
"""


def install_plug_in(folder: Path, count: int = 2, broken: bool = False) -> str:
    """A package that registers a device with torch as vendors' plug-ins do. Returns the folder to put on the path."""
    package = folder / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(PLUG_IN).format(count=count, broken=broken))
    return str(folder)


def use_plug_in(folder: str) -> dict[str, object]:
    sys.path.insert(0, folder)
    npu = devices.detect()
    assert npu is devices.get("npu")
    npu.set_current(npu.device(1))
    npu.manual_seed_all(7)
    seeded = npu.get_rng_state_all()
    npu.set_rng_state(torch.full((4,), 9, dtype=torch.uint8))
    changed = [int(state[0]) for state in npu.get_rng_state_all()]
    npu.set_rng_state_all(seeded)
    return {
        "device": str(npu.device(1)),
        "current": str(npu.current()),
        "count": npu.device_count(),
        "seeded": [int(state[0]) for state in seeded],
        "changed": changed,
        "restored": [int(state[0]) for state in npu.get_rng_state_all()],
        "memory": (npu.memory_free(1), npu.memory_total(1), npu.memory_allocated(1)),
        "pci": npu.pci_address(1),
        "cpu": devices.detect(cpu=True).name,
    }


def device_of_local_rank(folder: str, local_rank: int) -> str:
    sys.path.insert(0, folder)
    return str(devices.get("npu").device(local_rank))


def use_broken_plug_in(folder: str) -> tuple[str, str]:
    sys.path.insert(0, folder)
    with pytest.warns(RuntimeWarning, match="torch_npu.*loaded.*libhccl"):
        name = devices.detect().name
    with pytest.raises(MissingDependencyError, match="torch_npu") as caught:
        devices.get("npu").synchronize()
    return name, str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_conformance(name):
    device = devices.get(name)
    assert isinstance(device, Device)
    assert device.name == name
    assert device is devices.get(name)
    assert isinstance(device.collective_backend, str)
    assert isinstance(device.distributed_type, DistributedType)
    assert device.visible_devices_variable is None or device.visible_devices_variable.isupper()
    assert all(isinstance(dtype, torch.dtype) for dtype in device.autocast_dtypes)
    assert device.out_of_memory_messages
    assert not device.is_out_of_memory(RuntimeError("something else"))
    assert not device.is_out_of_memory(ValueError(device.out_of_memory_messages[0]))
    assert all(
        device.is_out_of_memory(RuntimeError(f"{message}. Tried to allocate 2 GiB"))
        for message in device.out_of_memory_messages
    )
    assert repr(name) in repr(device)
    # Its generator can be synchronised under its own name; Apple's has no name in the list.
    assert name in ("cpu", "mps") or str(rng_kind(name)) == name


@pytest.mark.parametrize("name", NAMES)
def test_asking_for_a_device_that_is_not_there_fails_nowhere(name):
    device = devices.get(name)
    available = device.is_available()
    assert isinstance(available, bool)
    if not available:
        assert device.device_count() == 0
        assert not device.supports_autocast(torch.bfloat16)
    assert available == (device in devices.available())


@pytest.mark.parametrize("name", ["npu", "mlu", "musa", "sdaa", "hpu", "tpu"])
def test_a_missing_plug_in_is_named(name):
    device = devices.get(name)
    if device.is_available():
        pytest.skip(f"this machine has {name}")
    with pytest.raises(MissingDependencyError, match=str(device.vendor_package)):
        device.synchronize()


def test_a_device_that_is_not_there_cannot_be_assigned():
    missing = next(name for name in ("cuda", "mps", "xpu") if not devices.get(name).is_available())
    with pytest.raises(ConfigurationError, match=f"no {missing} device for local rank 1: this process sees 0"):
        devices.get(missing).device(1)


def test_unknown_name():
    with pytest.raises(ConfigurationError, match="'gpu'.*cuda"):
        devices.get("gpu")


def test_the_cpu_is_the_last_resort():
    assert devices.available()[-1].name == "cpu"
    assert devices.detect(cpu=True).name == "cpu"


def test_cpu():
    cpu = devices.get("cpu")
    assert cpu.device(0) == cpu.device(7) == cpu.current() == torch.device("cpu")
    cpu.set_current(torch.device("cpu"))
    cpu.synchronize()
    cpu.empty_cache()
    assert 0 < cpu.memory_free() <= cpu.memory_total() == psutil.virtual_memory().total
    assert 0 < cpu.memory_allocated() < cpu.memory_total()
    assert cpu.supports_autocast(torch.bfloat16)
    assert not cpu.supports_autocast(torch.float32)
    assert cpu.pci_address(0) is None


def test_cpu_autocast_computes_in_what_is_called_supported():
    for dtype in devices.get("cpu").autocast_dtypes:
        with torch.autocast("cpu", dtype):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_cpu_generator_round_trip():
    cpu = devices.get("cpu")
    cpu.manual_seed_all(11)
    state, all_states = cpu.get_rng_state(), cpu.get_rng_state_all()
    first = torch.rand(5)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(5), first)
    cpu.set_rng_state_all(all_states)
    assert torch.equal(torch.rand(5), first)
    torch.manual_seed(11)
    assert torch.equal(torch.rand(5), first)


def test_the_host_allocators_own_message_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert devices.get("cpu").is_out_of_memory(caught.value)
    assert devices.get("cpu").is_out_of_memory(MemoryError("Unable to allocate 1.00 EiB for an array"))


def test_cuda_recognises_torchs_own_exception():
    assert devices.get("cuda").is_out_of_memory(torch.cuda.OutOfMemoryError("out of memory"))


def test_deterministic_mode_on_the_cpu():
    was = torch.are_deterministic_algorithms_enabled()
    try:
        devices.get("cpu").set_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(was)


def test_the_base_class_drives_a_plug_in(tmp_path):
    (seen,) = run_world(use_plug_in, 1, install_plug_in(tmp_path), state=False)
    assert seen == {
        "device": "npu:1",
        "current": "npu:1",
        "count": 2,
        "seeded": [7, 7],
        "changed": [7, 9],
        "restored": [7, 7],
        "memory": (701, 1001, 200),
        "pci": "0000:3b:00.0",
        "cpu": "cpu",
    }


def test_one_visible_device_is_the_ranks_own(tmp_path):
    folder = install_plug_in(tmp_path, count=1)
    assert run_world(device_of_local_rank, 1, folder, 3, state=False, env={"ASCEND_RT_VISIBLE_DEVICES": "5"}) == [
        "npu:0"
    ]
    with pytest.raises(WorldError, match="rank 3: this.*sees 1"):
        run_world(device_of_local_rank, 1, folder, 3, state=False)


def test_a_plug_in_that_cannot_be_loaded_is_told_and_not_used(tmp_path):
    ((name, error),) = run_world(use_broken_plug_in, 1, install_plug_in(tmp_path, broken=True), state=False)
    assert name == "cpu"
    assert "cannot be loaded here" in error


BROKEN_ENTRY_POINT = """
import json, warnings
from accel_state import devices
from accel_state.memory import clear_device_cache
from accel_state.random import rng_kind
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    detected = devices.detect().name
    clear_device_cache()
    known = [device.name for device in devices.known()]
try:
    devices.get("farm")
except ImportError as error:
    raised = str(error)
messages = [str(item.message) for item in caught if "'farm'" in str(item.message)]
print(json.dumps([detected, messages, known, devices.names()[0], raised]))
"""


def test_a_device_of_another_package_that_cannot_be_imported_is_told_once_and_not_used(tmp_path):
    about = tmp_path / "farm-1.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: farm\nVersion: 1\n")
    about.joinpath("entry_points.txt").write_text("[accel.devices]\nfarm = farm.device:Farm\n")
    package = tmp_path / "farm"
    package.mkdir()
    package.joinpath("__init__.py").write_text("raise ImportError('libfarm.so: cannot open shared object file')")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    output = subprocess.run(
        [sys.executable, "-c", BROKEN_ENTRY_POINT], env=variables, capture_output=True, text=True, check=True
    ).stdout
    detected, messages, known, first, raised = json.loads(output)
    assert first == "farm" and "farm" not in known and "libfarm" in raised
    assert detected == "cpu"
    (message,) = messages
    assert "farm.device:Farm" in message and "libfarm.so" in message


def test_clearing_caches_asks_no_device_that_has_none(monkeypatch):
    asked = []
    for name in devices.names():
        device = devices.get(name)
        monkeypatch.setattr(type(device), "is_available", lambda self: bool(asked.append(self.name)))
    clear_device_cache()
    assert "cuda" in asked and not {"cpu", "xla", "tpu", "hpu"} & set(asked)
