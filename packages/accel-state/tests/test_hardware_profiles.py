"""Profiles of devices: complete, and found by the names that drivers give."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from accel_state import ConfigurationError
from accel_state.hardware import profile, profile_of, profiles, read_profile, write_profile


def test_every_profile_is_complete_and_says_where_its_numbers_are_from() -> None:
    for key, found in profiles().items():
        assert profile(key) is found and found.names
        # One source for each number, in words.
        numbers = {field.name for field in fields(found)} - {"key", "names", "sources", "measured", "overlaps"}
        numbers -= {"curves", "alone_speedup", "unit_seconds"}  # of measured devices
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


def test_a_curve_gives_seconds_at_and_between_its_points_and_beyond_them(tmp_path: Path) -> None:
    curves = {"memory": [[100.0, 1.0], [10_000.0, 4.0], [20_000.0, 10.0]]}
    write_profile(replace(profile("h200"), measured=True, curves=curves), tmp_path / "here.json")
    found = read_profile(tmp_path / "here.json")
    assert [found.measured_seconds("memory", size) for size in (100, 10_000, 20_000)] == [1, 4, 10]
    assert found.measured_seconds("memory", 1000) == pytest.approx(2)  # ten times the size is twice the time here
    assert found.measured_seconds("memory", 1) == 1
    assert found.measured_seconds("memory", 60_000) == pytest.approx(30)
    assert found.measured_seconds("functions", 1000) is None


@pytest.mark.parametrize(
    "points", [[], [[1.0]], [[1.0, 0.0]], [[2.0, 1.0], [2.0, 2.0]], [[2.0, 1.0], [1.0, 2.0]], [["1", 2.0]], 5]
)
def test_a_file_with_a_curve_that_is_none_is_refused(tmp_path: Path, points: object) -> None:
    write_profile(replace(profile("h200"), curves={"memory": points}), tmp_path / "here.json")  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="curve 'memory' is .*growing sizes"):
        read_profile(tmp_path / "here.json")
    write_profile(replace(profile("h200"), curves=points), tmp_path / "here.json")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="curves is .*an object of curves by name"):
        read_profile(tmp_path / "here.json")
