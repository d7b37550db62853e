"""The known devices, and the one that this process computes on."""

from __future__ import annotations

import functools
import warnings

import torch

from ..errors import AccelError, ConfigurationError
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
    """Return every known device, in the order of detection; those of other distributions come first."""
    known = DEVICES.names()
    return [name for name in known if name not in _BUILT_IN] + [name for name in known if name in _BUILT_IN]


@functools.cache
def get(name: str) -> Device:
    """Return the device of a torch device type ("cuda"), whether or not this machine has one.

    Raises:
        ConfigurationError: the device is unknown; the message lists the known ones.
    """
    return DEVICES.load(name)()


@functools.cache
def _load(name: str) -> Device | None:
    """Return a device, or None, with a warning, if the package that adds it cannot be imported."""
    if name in _BUILT_IN:
        return get(name)
    try:
        return get(name)
    except AccelError:
        raise  # the error already explains a registration that names nothing
    except Exception as error:
        # Another package's import can raise anything. Without its device the rest of the machine is still usable.
        warnings.warn(
            f"the device {name!r} is not used, because {DEVICES.target(name)} cannot be imported: "
            f"{type(error).__name__}: {error}. Repair or uninstall the package that adds it.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def known() -> list[Device]:
    """Return every device that can be used here or elsewhere, in the order of detection.

    Without those of other packages that cannot be imported, which a warning names once.
    """
    return [device for device in map(_load, names()) if device is not None]


def available() -> list[Device]:
    """Return the devices of this machine in the order of detection, the CPU last. Does not initialize them."""
    return [device for device in known() if device.is_available()]


def detect(cpu: bool = False) -> Device:
    """Return the device of this process: the first available one in the order of detection. Does not initialize it.

    Args:
        cpu: use the CPU even if an accelerator is available.

    Raises:
        ConfigurationError: the environment asks for a device that cannot be used.
    """
    if cpu:
        return get("cpu")
    for device in known():
        if (problem := device.problem()) is not None:
            raise ConfigurationError(problem)
        if device.is_available():
            return device
    raise AssertionError("the CPU is always available")


def of(device: torch.device | str | None) -> Device | None:
    """Return the device of a torch device; None for None, for the meta device, and for those that are not known."""
    kind = "meta" if device is None else torch.device(device).type
    if kind in _BUILT_IN:
        return get(kind)
    return _load(kind) if kind != "meta" and kind in DEVICES else None
