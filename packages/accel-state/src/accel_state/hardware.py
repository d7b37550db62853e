"""What devices can do at most: operations, memory, bandwidths, from their makers' data sheets. Torch-free."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from .errors import ConfigurationError


@dataclass(frozen=True)
class HardwareProfile:
    """The limits of one device.

    Attributes:
        key: the name of the profile.
        names: how the device's driver calls it; a longer name that begins with one of them is the same device.
        memory_bytes: its memory.
        memory_bandwidth: bytes a second between its memory and its processors.
        flops: operations a second of dense matrix products, by type of number: fp8, bf16, fp16, tf32, fp32.
        link_bandwidth: bytes a second and direction to other devices of the node.
        source: where the numbers are from.
    """

    key: str
    names: tuple[str, ...]
    memory_bytes: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    link_bandwidth: float
    source: str


@functools.cache
def profiles() -> dict[str, HardwareProfile]:
    """All profiles, by key."""
    content = json.loads(resources.files(__package__ or "accel_state").joinpath("hardware.json").read_text("utf-8"))
    return {key: HardwareProfile(key, **{**entry, "names": tuple(entry["names"])}) for key, entry in content.items()}


def profile(key: str) -> HardwareProfile:
    """A profile by its key.

    Raises:
        ConfigurationError: there is none.
    """
    known = profiles()
    if key not in known:
        raise ConfigurationError(f"{key!r} is not a known device. There are: {', '.join(sorted(known))}.")
    return known[key]


def profile_of(device_name: str) -> HardwareProfile | None:
    """The profile of a device, by the name that its driver gives; None if it is not known.

    The longest matching name counts: "NVIDIA H100 96GB HBM2e" is no H100 of 80 GB.
    """
    matches = [
        (len(name), found) for found in profiles().values() for name in found.names if device_name.startswith(name)
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None
