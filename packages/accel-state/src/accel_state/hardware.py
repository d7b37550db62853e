"""What devices can do at most: operations, memory, bandwidths, from their makers' data sheets. Torch-free."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from .errors import ConfigurationError

_POSITIVE = (
    *("memory_bytes", "memory_bandwidth", "flops", "link_bandwidth", "link_latency", "network_bandwidth"),
    *("network_latency", "message_seconds", "operation_seconds", "devices_per_node", "alone_speedup"),
)
_OPTIONAL = ("link_bandwidth", "network_bandwidth")
Curve = Sequence[Sequence[float]]
"""Points of a size and the seconds that it takes, with the smallest size first."""


@dataclass(frozen=True)
class HardwareProfile:
    """The limits of one device.

    Attributes:
        key: the name of the profile.
        names: how the device's driver calls it; a longer name that begins with one of them is the same device.
        memory_bytes: its memory.
        memory_bandwidth: bytes a second between its memory and its processors.
        flops: operations a second of dense matrix products, by type of number: fp8, bf16, fp16, tf32, fp32.
        link_bandwidth: bytes a second and direction to other devices of the node; None if it was not measured.
        link_latency: seconds of a step of a collective between two devices of a node.
        network_bandwidth: bytes a second and direction and device to other nodes; None if systems differ.
        network_latency: seconds of a step of a collective between two nodes.
        message_seconds: seconds of a collective besides its steps and its bytes.
        operation_seconds: seconds in which the host prepares one operation.
        devices_per_node: number of devices that the links connect.
        sources: where each number is from, by its name.
        measured: whether the numbers were measured in use, rather than taken from data sheets.
        overlaps: whether communication and preparing operations overlap with computation.
        unit_seconds: seconds in which the host gathers or reduces the parameters of a unit of FSDP 2, besides
            operations and messages, where that does not overlap with computation.
        alone_speedup: how many times as fast a device computes while the others of its node wait: more than 1 where
            ranks share processors.
        curves: of measured devices, which reach their limits at some sizes only: seconds besides operation_seconds of
            matrix products ("products bf16", by FLOPs), attention ("attention bf16", by FLOPs), other operations with a
            new result ("memory", by bytes that they read and write), in place ("in place"), and with a function such
            as exp ("functions"); seconds of collectives of all devices of a node ("all-reduce", by the bytes that each
            sends in a ring) and of groups of some of them ("all-reduce of 2"); and seconds that a collective takes
            longer after devices have computed apart ("waiting", by the seconds of that).
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
    alone_speedup: float = 1.0
    curves: Mapping[str, Curve] = field(default_factory=dict)

    def measured_seconds(self, curve: str, size: float) -> float | None:
        """Seconds of one of :attr:`curves`, between and beyond its points; None if it was not measured.

        Sizes below the smallest take as long as that; rates beyond the largest are those of the largest.
        """
        points = self.curves.get(curve)
        if points is None:
            return None
        if size <= points[0][0]:
            return points[0][1]
        for (small, fast), (large, slow) in itertools.pairwise(points):
            if size <= large:
                share = math.log(size / small) / math.log(large / small)
                return fast * (slow / fast) ** share
        return points[-1][1] * size / points[-1][0]


@functools.cache
def profiles() -> dict[str, HardwareProfile]:
    """All profiles, by key."""
    content = json.loads(resources.files(__package__ or "accel_state").joinpath("hardware.json").read_text("utf-8"))
    return {key: _profile(key, entry) for key, entry in content.items()}


def _profile(key: str, entry: Mapping[str, Any]) -> HardwareProfile:
    return HardwareProfile(key, **{**entry, "names": tuple(entry["names"])})


def find_profile(name: str) -> HardwareProfile:
    """A profile by its key, or in a file.

    Raises:
        ConfigurationError: there is neither.
    """
    return read_profile(name) if name not in profiles() and Path(name).is_file() else profile(name)


def profile(key: str) -> HardwareProfile:
    """A profile by its key.

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
    """A profile in a JSON file: one object with the fields of a profile, except ``key``.

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
    if not isinstance(found.curves, dict):
        raise ConfigurationError(f"{file}: curves is {found.curves!r}, and must be an object of curves by name.")
    for name, points in found.curves.items():
        if not _is_curve(points):
            raise ConfigurationError(
                f"{file}: the curve {name!r} is {points!r}, and must be a list of [size, seconds], positive and with "
                "growing sizes."
            )
    return found


def _is_curve(points: object) -> bool:
    if not isinstance(points, list) or not points:
        return False
    pairs = all(isinstance(point, list) and len(point) == 2 and all(map(_is_positive, point)) for point in points)
    return pairs and all(small[0] < large[0] for small, large in itertools.pairwise(points))


def write_profile(found: HardwareProfile, path: str | os.PathLike[str]) -> None:
    """Write a profile for :func:`read_profile`; a file that exists is replaced whole.

    Raises:
        OSError: it cannot be written.
    """
    content = {name: value for name, value in asdict(found).items() if name != "key"}
    file = Path(path)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    partial.replace(file)


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def profile_of(device_name: str) -> HardwareProfile | None:
    """The profile of a device, by the name that its driver gives; None if it is not known.

    The longest matching name counts: "NVIDIA H100 96GB HBM2e" is no H100 of 80 GB.
    """
    matches = [
        (len(name), found) for found in profiles().values() for name in found.names if device_name.startswith(name)
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None
