"""Facts about the machine, from the programs that know them."""

from __future__ import annotations

import platform
import shutil
import subprocess
import warnings

import pytest

from accel_state import device_checks as hardware
from accel_state import devices
from accel_state.errors import MissingDependencyError


def install_nvidia_smi(folder, monkeypatch, names, driver="550.54.15", status=0):
    """A program that answers as NVIDIA's does."""
    program = folder / "nvidia-smi"
    answers = {"name": names, "driver_version": [driver] * len(names)}
    cases = "\n".join(
        f'  --query-gpu={field}) printf "%s\\n" {" ".join(map(repr, lines))};;'
        for field, lines in answers.items()
        if lines
    )
    program.write_text(
        f'#!/bin/sh\n[ "$2" = "--format=csv,noheader" ] || exit 9\ncase "$1" in\n{cases}\nesac\nexit {status}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_gpus_and_driver(tmp_path, monkeypatch):
    install_nvidia_smi(tmp_path, monkeypatch, ["NVIDIA H200", "NVIDIA H200"])
    assert hardware.get_gpu_info() == (["NVIDIA H200", "NVIDIA H200"], 2)
    assert hardware.get_driver_version() == "550.54.15"


@pytest.mark.parametrize(
    ("names", "driver", "expected"),
    [
        (["NVIDIA GeForce RTX 4090"] * 2, "535.129.03", False),
        (["NVIDIA GeForce RTX 4090"] * 2, "550.40.07", True),
        (["NVIDIA GeForce RTX 4090"] * 2, "560.28.03", True),
        (["NVIDIA GeForce RTX 4080", "NVIDIA GeForce RTX 3090"], "535.129.03", False),
        (["NVIDIA GeForce RTX 4090"], "535.129.03", True),
        (["NVIDIA RTX 4000 Ada Generation"] * 2, "535.129.03", True),
        (["NVIDIA GeForce RTX 3090"] * 2, "470.10", True),
        (["NVIDIA H200"] * 8, "535.129.03", True),
    ],
)
def test_peer_to_peer(tmp_path, monkeypatch, names, driver, expected):
    install_nvidia_smi(tmp_path, monkeypatch, names, driver)
    assert hardware.check_cuda_p2p_ib_support() is expected


def test_a_failing_nvidia_smi_is_told(tmp_path, monkeypatch):
    install_nvidia_smi(tmp_path, monkeypatch, [], status=9)
    with pytest.warns(RuntimeWarning, match="nvidia-smi failed, so peer-to-peer"):
        assert hardware.check_cuda_p2p_ib_support() is True
    with pytest.raises(subprocess.CalledProcessError):
        hardware.get_gpu_info()


def test_no_gpu_has_no_driver_version(tmp_path, monkeypatch):
    install_nvidia_smi(tmp_path, monkeypatch, [])
    assert hardware.get_gpu_info() == ([], 0)
    with pytest.raises(subprocess.CalledProcessError):
        hardware.get_driver_version()


def test_without_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("nvidia-smi") is None
    assert hardware.check_cuda_p2p_ib_support() is True
    with pytest.raises(MissingDependencyError, match="nvidia-smi is not on the PATH"):
        hardware.get_gpu_info()


@pytest.mark.parametrize(
    ("system", "release", "old"),
    [
        ("Linux", "5.4.0-150-generic", True),
        ("Linux", "4.18.0-553.el8.x86_64", True),
        ("Linux", "5.5.0", False),
        ("Linux", "6.1.0-21-amd64", False),
        ("Linux", "6.8.0+", False),
        ("Linux", "vendor kernel", False),
        ("Darwin", "3.0.0", False),
    ],
)
def test_old_kernels_are_told(monkeypatch, system, release, old):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    if old:
        with pytest.warns(RuntimeWarning, match=f"kernel {release} is older than 5.5.0"):
            hardware.check_os_kernel()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hardware.check_os_kernel()


def test_device_type_of_this_machine():
    device = devices.detect()
    assert hardware.get_current_device_type() == (device.name, str(device.distributed_type))
