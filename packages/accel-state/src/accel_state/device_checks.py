"""This machine's devices, kernel and driver. Does not initialize a device, except where a docstring states it."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from packaging.version import InvalidVersion, Version

from . import devices
from .errors import ConfigurationError, MissingDependencyError
from .imports import is_package_available, is_torch_version


def is_cuda_available() -> bool:
    """Return True if there is an NVIDIA GPU, or an AMD GPU, which torch exposes under the same name."""
    return devices.get("cuda").is_available()


def is_rocm_available() -> bool:
    """Return True if there is an AMD GPU and torch is built for it."""
    return torch.version.hip is not None and is_cuda_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return True if there is an Apple GPU, and torch has this version or a newer one."""
    return is_torch_version(">=", min_version) and devices.get("mps").is_available()


def _device_check(device_type: str, title: str) -> Callable[..., bool]:
    """Make ``is_<device_type>_available``."""

    def is_available(check_device: bool = False) -> bool:
        device = devices.get(device_type)
        return device.is_available() and (not check_device or device.device_count() > 0)

    is_available.__name__ = is_available.__qualname__ = f"is_{device_type}_available"
    is_available.__doc__ = (
        f"Whether there is {title}; with ``check_device=True``, whether this process sees at least one."
    )
    return is_available


is_xpu_available: Callable[..., bool] = _device_check("xpu", "an Intel GPU")
is_npu_available: Callable[..., bool] = _device_check("npu", "an Ascend NPU")
is_mlu_available: Callable[..., bool] = _device_check("mlu", "a Cambricon MLU")
is_musa_available: Callable[..., bool] = _device_check("musa", "a Moore Threads GPU")
is_sdaa_available: Callable[..., bool] = _device_check("sdaa", "a Tecorigin accelerator")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return True if there is a Gaudi accelerator; ``init_hccl`` also registers its backend with torch.distributed."""
    available = devices.get("hpu").is_available()
    if available and init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return available


def is_habana_gaudi1() -> bool:
    """Return True if there is a first-generation Gaudi, which has no float16. Initializes the device."""
    return is_hpu_available() and devices.get("hpu").module.get_device_name().strip().upper() == "GAUDI"


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return True if torch_xla is installed and has a device (PJRT_DEVICE, or a TPU library) of the given type."""
    if check_is_tpu and check_is_gpu:
        raise ConfigurationError("check_is_tpu and check_is_gpu are both True: a run has one kind of XLA device")
    if not devices.get("xla").is_available():
        return False
    # Without the variable, XLA is available through the TPU library.
    kind = os.environ.get("PJRT_DEVICE", "TPU").upper()
    return (not check_is_tpu or kind == "TPU") and (not check_is_gpu or kind in ("CUDA", "ROCM", "GPU"))


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return True if this machine's device computes in bfloat16; False on a TPU with ``ignore_tpu``.

    May initialize CUDA.
    """
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return devices.detect().supports_autocast(torch.bfloat16)


def is_fp16_available() -> bool:
    """Return True if this machine's device computes in float16."""
    return not is_habana_gaudi1() and devices.detect().supports_autocast(torch.float16)


def is_transformer_engine_mxfp8_available() -> bool:
    """Return True if Transformer Engine (2.0) and the GPU (compute capability 10.0) support MXFP8.

    May initialize CUDA.
    """
    installed = is_package_available("transformer_engine", min_version="2.0.0")
    return installed and is_cuda_available() and torch.cuda.get_device_capability() >= (10, 0)


def is_torch_distributed_available() -> bool:
    """Return True if torch is built with torch.distributed."""
    return torch.distributed.is_available()


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Return True if an object is a tensor on an Intel GPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def is_xccl_available() -> bool:
    """Return True if torch is built with XCCL, the collectives of Intel GPUs."""
    return devices.get("xpu").collective_backend == "xccl"


def is_pippy_available() -> bool:
    """Return True if torch has ``torch.distributed.pipelining``, which PiPPy has moved into."""
    return is_torch_distributed_available()


def is_weights_only_available() -> bool:
    """Return True if ``torch.load(weights_only=True)`` has an allow-list of classes; True for every supported torch."""
    return True


def is_neuron_available(check_device: bool = False) -> bool:
    """Return True if there is an AWS Neuron device.

    With ``check_device=True``, this process must see at least one.
    """
    neuron = getattr(torch, "neuron", None)
    if not is_package_available("torch_neuronx") or neuron is None or not neuron.is_available():
        return False
    return not check_device or neuron.device_count() > 0


def check_cuda_fp8_capability() -> bool:
    """Return True if the current CUDA device multiplies in 8-bit floating point (compute capability 8.9 or higher)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


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
    """Return this machine's torch device type, and the type of a distributed run on it: ``("cuda", "MULTI_GPU")``."""
    device = devices.detect()
    return device.name, str(device.distributed_type)


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names and number of this machine's NVIDIA GPUs, from nvidia-smi, without initializing them.

    Raises:
        MissingDependencyError: nvidia-smi is not installed.
        subprocess.CalledProcessError: nvidia-smi failed.
    """
    names = _nvidia_smi("name")
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of the NVIDIA driver, from nvidia-smi ("550.54.15").

    Raises:
        MissingDependencyError: nvidia-smi is not installed.
        subprocess.CalledProcessError: nvidia-smi failed, or sees no GPU.
    """
    versions = _nvidia_smi("driver_version")
    if not versions:
        raise subprocess.CalledProcessError(0, "nvidia-smi", output="no GPU listed")
    return versions[0]


def check_cuda_p2p_ib_support() -> bool:
    """Return True if NCCL may use peer-to-peer and InfiniBand transfers between this machine's GPUs.

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
    """Return the rule of :func:`check_cuda_p2p_ib_support` for several GPUs of these names under this driver."""
    return not any("GeForce RTX 40" in name for name in gpu_names) or Version(driver_version) >= _RTX_40_FIXED_DRIVER


def _nvidia_smi(field: str) -> list[str]:
    """Return one field of every GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise MissingDependencyError("nvidia-smi is not on the PATH; it comes with the NVIDIA driver")
    command = [program, f"--query-gpu={field}", "--format=csv,noheader"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    return [line.strip() for line in output.splitlines() if line.strip()]
