"""The known devices, and the one that this process computes on."""

from __future__ import annotations

import functools

import torch

from ..errors import ConfigurationError
from ..registry import Registry
from .base import Device

# In the order of detection: XLA first, because it is requested explicitly (PJRT_DEVICE); vendor plug-ins before CUDA,
# because some of them also implement torch.cuda; the CPU last, because it is always available.
_BUILT_IN = {
    "xla": "accel_state.devices.xla:XlaDevice",
    "tpu": "accel_state.devices.tpu:TpuDevice",
    "hpu": "accel_state.devices.hpu:HpuDevice",
    "npu": "accel_state.devices.npu:NpuDevice",
    "mlu": "accel_state.devices.mlu:MluDevice",
    "musa": "accel_state.devices.musa:MusaDevice",
    "sdaa": "accel_state.devices.sdaa:SdaaDevice",
    "cuda": "accel_state.devices.cuda:CudaDevice",
    "xpu": "accel_state.devices.xpu:XpuDevice",
    "mps": "accel_state.devices.mps:MpsDevice",
    "cpu": "accel_state.devices.cpu:CpuDevice",
}

DEVICES: Registry[type[Device]] = Registry("device", _BUILT_IN, entry_point_group="accel.devices")


def names() -> list[str]:
    """Every known device, in the order of detection; those of other distributions come first."""
    known = DEVICES.names()
    return [name for name in known if name not in _BUILT_IN] + [name for name in known if name in _BUILT_IN]


@functools.cache
def get(name: str) -> Device:
    """The device of a torch device type ("cuda"), whether or not this machine has one.

    Raises:
        ConfigurationError: the device is unknown; the message lists the known ones.
    """
    return DEVICES.load(name)()


def available() -> list[Device]:
    """The devices of this machine in the order of detection, the CPU last. Does not initialize them."""
    return [device for device in map(get, names()) if device.is_available()]


def detect(cpu: bool = False) -> Device:
    """The device of this process: the first available one in the order of detection. Does not initialize it.

    Args:
        cpu: use the CPU even if an accelerator is available.

    Raises:
        ConfigurationError: the environment asks for a device that cannot be used.
    """
    if cpu:
        return get("cpu")
    for device in map(get, names()):
        if (problem := device.problem()) is not None:
            raise ConfigurationError(problem)
        if device.is_available():
            return device
    raise AssertionError("the CPU is always available")


def of(device: torch.device | str | None) -> Device | None:
    """The device of a torch device; None for None, for the meta device, and for those that are not known."""
    kind = "meta" if device is None else torch.device(device).type
    return get(kind) if kind != "meta" and kind in DEVICES else None
