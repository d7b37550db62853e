"""What devices can do at most: operations, memory, bandwidths, from their makers' data sheets. Torch-free."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from .errors import ConfigurationError

_POSITIVE = (
    *("memory_bytes", "memory_bandwidth", "flops", "link_bandwidth", "link_latency", "network_bandwidth"),
    *("network_latency", "message_seconds", "operation_seconds", "devices_per_node", "alone_speedup"),
)
_AT_LEAST_ZERO = ("unit_seconds", "context_bytes", "communicator_bytes", "allocator_share")
_OPTIONAL = ("link_bandwidth", "network_bandwidth")


@dataclass(frozen=True)
class HardwareProfile:
    """The limits of one device.

    Attributes:
        key: the name of the profile.
        names: how the device's driver calls it; a longer name that begins with one of them is the same device.
        memory_bytes: its memory.
        memory_bandwidth: bytes per second between its memory and its processors.
        flops: operations per second of dense matrix products, by type of number: fp8, bf16, fp16, tf32, fp32.
        link_bandwidth: bytes per second and direction to other devices of the node; None if it was not measured.
        link_latency: seconds of a step of a collective between two devices of a node.
        network_bandwidth: bytes per second and direction and device to other nodes; None if systems differ.
        network_latency: seconds of a step of a collective between two nodes.
        message_seconds: seconds of a collective besides its steps and its bytes.
        operation_seconds: seconds in which the host prepares one operation.
        devices_per_node: number of devices that the links connect.
        sources: where each number is from, by its name.
        measured: whether the numbers were measured in use, rather than taken from data sheets.
        overlaps: whether communication and preparing operations overlap with computation.
        unit_seconds: seconds in which the host gathers or reduces the parameters of a unit of FSDP 2, besides
            operations and messages, where that does not overlap with computation.
        context_bytes: bytes of the driver's context and of libraries in a process.
        communicator_bytes: bytes of the buffers of one communicator.
        allocator_share: what torch's caching allocator reserves in addition to the tensors at the peak, as a share of
            them.
        alone_speedup: how many times as fast a device computes while the others of its node wait: more than 1 where
            ranks share processors.
    """

    key: str
    names: tuple[str, ...]
    memory_bytes: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    link_bandwidth: float | None
    link_latency: float
    network_bandwidth: float | None
    network_latency: float
    message_seconds: float
    operation_seconds: float
    devices_per_node: int
    sources: Mapping[str, str]
    measured: bool = False
    overlaps: bool = True
    unit_seconds: float = 0.0
    context_bytes: int = 0
    communicator_bytes: int = 0
    allocator_share: float = 0.0
    alone_speedup: float = 1.0


@functools.cache
def profiles() -> dict[str, HardwareProfile]:
    """Return all profiles, by key."""
    content = json.loads(resources.files(__package__ or "accel_state").joinpath("hardware.json").read_text("utf-8"))
    return {key: _profile(key, entry) for key, entry in content.items()}


def _profile(key: str, entry: Mapping[str, Any]) -> HardwareProfile:
    return HardwareProfile(key, **{**entry, "names": tuple(entry["names"])})


def find_profile(name: str) -> HardwareProfile:
    """Return a profile by its key, or in a file.

    Raises:
        ConfigurationError: there is neither.
    """
    return read_profile(name) if name not in profiles() and Path(name).is_file() else profile(name)


def profile(key: str) -> HardwareProfile:
    """Return a profile by its key.

    Raises:
        ConfigurationError: there is none.
    """
    known = profiles()
    if key not in known:
        raise ConfigurationError(
            f"{key!r} is not a known device. There are: {', '.join(sorted(known))}; the path of a JSON file "
            "with the fields of a profile can be given as well."
        )
    return known[key]


def read_profile(path: str | os.PathLike[str]) -> HardwareProfile:
    """Return a profile in a JSON file: one object with the fields of a profile, except ``key``.

    Raises:
        ConfigurationError: the file cannot be read, or a field is missing, unknown or not a positive number.
    """
    file = Path(path)
    try:
        content = json.loads(file.read_text("utf-8"))
        found = _profile(file.stem, content)
    except (OSError, ValueError, TypeError, KeyError) as error:
        names = ", ".join(item.name for item in fields(HardwareProfile) if item.name != "key")
        raise ConfigurationError(
            f"{file} is not a hardware profile: {' '.join(str(error).split())}. It is an object of {names}."
        ) from None
    for name in _POSITIVE:
        value = getattr(found, name)
        if name in _OPTIONAL and value is None:
            continue
        numbers = list(value.values()) if isinstance(value, dict) else [value]
        if not numbers or not all(map(_is_positive, numbers)):
            raise ConfigurationError(f"{file}: {name} is {value!r}, and must be positive.")
    for name in _AT_LEAST_ZERO:
        value = getattr(found, name)
        if value != 0 and not _is_positive(value):
            raise ConfigurationError(f"{file}: {name} is {value!r}, and must be at least 0.")
    return found


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def profile_of(device_name: str) -> HardwareProfile | None:
    """Return the profile of a device, by the name that its driver gives; None if it is not known.

    The longest matching name counts: "NVIDIA H100 96GB HBM2e" is no H100 of 80 GB.
    """
    matches = [
        (len(name), found) for found in profiles().values() for name in found.names if device_name.startswith(name)
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None
