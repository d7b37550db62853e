"""The known devices, and which of them this process computes on."""

from __future__ import annotations

import functools

from ..registry import Registry
from .base import Device

# The order is the order of detection. XLA is asked for explicitly (PJRT_DEVICE), so it goes first. Vendor plug-ins go
# before # CUDA because some of them answer to torch.cuda as well. The CPU is always there and so comes last.
DEVICES: Registry[type[Device]] = Registry(
    "device",
    {
        "xla": "accel_state.devices.xla:XlaDevice",
        "hpu": "accel_state.devices.hpu:HpuDevice",
        "npu": "accel_state.devices.npu:NpuDevice",
        "mlu": "accel_state.devices.mlu:MluDevice",
        "musa": "accel_state.devices.musa:MusaDevice",
        "sdaa": "accel_state.devices.sdaa:SdaaDevice",
        "cuda": "accel_state.devices.cuda:CudaDevice",
        "xpu": "accel_state.devices.xpu:XpuDevice",
        "mps": "accel_state.devices.mps:MpsDevice",
        "cpu": "accel_state.devices.cpu:CpuDevice",
    },
)


def names() -> list[str]:
    """Every known device, in the order of detection."""
    return DEVICES.names()


@functools.cache
def get(name: str) -> Device:
    """The device of a torch device type ("cuda"), whether or not this machine has one.

    Raises:
        ConfigurationError: no such device; the message lists the known ones.
    """
    return DEVICES.load(name)()


def available() -> list[Device]:
    """The devices this machine has, in the order of detection; the last is the CPU. Initialises none of them."""
    return [device for device in map(get, names()) if device.is_available()]


def detect(cpu: bool = False) -> Device:
    """The device this process computes on: the first available one in the order of :func:`names`. Initialises none.

    Args:
        cpu: take the CPU even where there is an accelerator.
    """
    if cpu:
        return get("cpu")
    return next(device for device in map(get, names()) if device.is_available())
