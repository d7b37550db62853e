"""Profiles of devices: complete, and found by the names that drivers give."""

from __future__ import annotations

from dataclasses import fields

import pytest

from accel_state import ConfigurationError
from accel_state.hardware import profile, profile_of, profiles


def test_every_profile_is_complete_and_says_where_its_numbers_are_from() -> None:
    for key, found in profiles().items():
        assert profile(key) is found and found.names
        # One source for each number, in words.
        numbers = {field.name for field in fields(found)} - {"key", "names", "sources", "measured", "overlaps"}
        numbers -= {"alone_speedup", "unit_seconds"}  # of measured devices
        if key.startswith("tpu"):  # what XLA keeps besides tensors is not known
            numbers -= {"context_bytes", "communicator_bytes", "allocator_share"}
        assert set(found.sources) == numbers and all(len(source) > 20 for source in found.sources.values())
        assert found.memory_bytes > 2**35 and found.flops["bf16"] > 1e14
        # Narrower numbers are never slower.
        order = [found.flops[name] for name in ("fp8", "bf16", "tf32", "fp32") if name in found.flops]
        assert order == sorted(order, reverse=True)
        assert found.memory_bandwidth > found.link_bandwidth


def test_devices_are_found_by_the_longest_name_that_fits() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "h100-sxm",
        "NVIDIA H100 96GB HBM2e": "h100-96gb",
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-80GB": "a100-80gb",
        "AMD Instinct MI300X": "mi300x",
    }
    for name, key in names.items():
        found = profile_of(name)
        assert found is not None and found.key == key
    assert profile_of("NVIDIA GeForce RTX 4090") is None
    with pytest.raises(ConfigurationError, match="h300"):
        profile("h300")
