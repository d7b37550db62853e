"""Information about this machine: kernel, GPUs and driver."""

from __future__ import annotations

import platform
import shutil
import subprocess
import warnings

from packaging.version import InvalidVersion, Version

from . import devices
from .errors import MissingDependencyError

_LOWEST_KERNEL = Version("5.5.0")
# GeForce cards of the RTX 40 series support neither peer-to-peer nor InfiniBand transfers. Older drivers report that
# they do, and NCCL then hangs or fails.
_RTX_40_FIXED_DRIVER = Version("550.40.07")


def check_os_kernel() -> None:
    """Warn if the Linux kernel is older than 5.5, with which distributed processes can hang."""
    if platform.system() != "Linux":
        return
    release = platform.release()
    numbers = release.split("-")[0].rstrip("+")
    try:
        old = Version(numbers) < _LOWEST_KERNEL
    except InvalidVersion:
        return  # a vendor's version scheme, which does not tell the age
    if old:
        warnings.warn(
            f"the Linux kernel {release} is older than {_LOWEST_KERNEL}: distributed processes can hang. Upgrade the "
            "kernel if that happens.",
            RuntimeWarning,
            stacklevel=2,
        )


def get_current_device_type() -> tuple[str, str]:
    """This machine's torch device type, and the type of a distributed run on it: ``("cuda", "MULTI_GPU")``."""
    device = devices.detect()
    return device.name, str(device.distributed_type)


def get_gpu_info() -> tuple[list[str], int]:
    """Names and number of this machine's NVIDIA GPUs, from nvidia-smi, without initializing them.

    Raises:
        MissingDependencyError: nvidia-smi is not installed.
        subprocess.CalledProcessError: nvidia-smi failed.
    """
    names = _nvidia_smi("name")
    return names, len(names)


def get_driver_version() -> str:
    """The version of the NVIDIA driver, from nvidia-smi ("550.54.15").

    Raises:
        MissingDependencyError: nvidia-smi is not installed.
        subprocess.CalledProcessError: nvidia-smi failed, or sees no GPU.
    """
    versions = _nvidia_smi("driver_version")
    if not versions:
        raise subprocess.CalledProcessError(0, "nvidia-smi", output="no GPU listed")
    return versions[0]


def check_cuda_p2p_ib_support() -> bool:
    """Whether NCCL may use peer-to-peer and InfiniBand transfers between this machine's GPUs.

    False for several GeForce RTX 40 GPUs with a driver older than 550.40.07: set NCCL_P2P_DISABLE=1 and
    NCCL_IB_DISABLE=1. True without nvidia-smi.
    """
    if shutil.which("nvidia-smi") is None:
        return True
    try:
        names, count = get_gpu_info()
        return count < 2 or p2p_ib_supported(names, get_driver_version())
    except (subprocess.SubprocessError, OSError, InvalidVersion) as error:
        warnings.warn(
            f"nvidia-smi failed, so peer-to-peer transfers stay enabled: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return True


def p2p_ib_supported(gpu_names: list[str], driver_version: str) -> bool:
    """The rule of :func:`check_cuda_p2p_ib_support` for several GPUs of these names under this driver."""
    return not any("GeForce RTX 40" in name for name in gpu_names) or Version(driver_version) >= _RTX_40_FIXED_DRIVER


def _nvidia_smi(field: str) -> list[str]:
    """One field of every GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise MissingDependencyError("nvidia-smi is not on the PATH; it comes with the NVIDIA driver")
    command = [program, f"--query-gpu={field}", "--format=csv,noheader"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    return [line.strip() for line in output.splitlines() if line.strip()]
