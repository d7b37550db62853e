"""Whether this machine has a device, and what its torch can do. No device is initialised, unless a docstring says so."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import torch.distributed

from . import devices
from .errors import ConfigurationError
from .imports import is_package_available
from .versions import is_torch_version


def is_cuda_available() -> bool:
    """Whether there is an NVIDIA GPU, or an AMD GPU, which torch presents under the same name."""
    return devices.get("cuda").is_available()


def is_rocm_available() -> bool:
    """Whether there is an AMD GPU and torch is built for it."""
    return torch.version.hip is not None and is_cuda_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether there is an Apple GPU, and torch has this version or a newer one."""
    return is_torch_version(">=", min_version) and devices.get("mps").is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether there is an Intel GPU.

    Args:
        check_device: as for :func:`is_npu_available`.
    """
    return _has("xpu", check_device)


def is_npu_available(check_device: bool = False) -> bool:
    """Whether there is an Ascend NPU.

    Args:
        check_device: also make sure that this process sees at least one.
    """
    return _has("npu", check_device)


def is_mlu_available(check_device: bool = False) -> bool:
    """Whether there is a Cambricon MLU.

    Args:
        check_device: as for :func:`is_npu_available`.
    """
    return _has("mlu", check_device)


def is_musa_available(check_device: bool = False) -> bool:
    """Whether there is a Moore Threads GPU.

    Args:
        check_device: as for :func:`is_npu_available`.
    """
    return _has("musa", check_device)


def is_sdaa_available(check_device: bool = False) -> bool:
    """Whether there is a Tecorigin accelerator.

    Args:
        check_device: as for :func:`is_npu_available`.
    """
    return _has("sdaa", check_device)


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether there is a Gaudi accelerator.

    Args:
        init_hccl: also import its collectives, which registers their back end with torch.distributed.
    """
    found = devices.get("hpu").is_available()
    if found and init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return found


def is_habana_gaudi1() -> bool:
    """Whether there is a Gaudi of the first generation, which has no float16. Asks the device for its name."""
    return is_hpu_available() and devices.get("hpu").module.get_device_name().strip().upper() == "GAUDI"


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed and told what to run on (PJRT_DEVICE, or a TPU library).

    Args:
        check_is_tpu: and that is a TPU.
        check_is_gpu: and that is a GPU.

    Raises:
        ConfigurationError: both are asked for.
    """
    if check_is_tpu and check_is_gpu:
        raise ConfigurationError(
            "check_is_tpu and check_is_gpu are both True, but a run has one kind of XLA device: ask for one"
        )
    if not devices.get("xla").is_available():
        return False
    # Without the variable it is the TPU library that makes XLA available.
    kind = os.environ.get("PJRT_DEVICE", "TPU").upper()
    return (not check_is_tpu or kind == "TPU") and (not check_is_gpu or kind in ("CUDA", "ROCM", "GPU"))


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether this machine's device computes in bfloat16. May initialise CUDA.

    Args:
        ignore_tpu: answer False for a TPU.
    """
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return devices.detect().supports_autocast(torch.bfloat16)


def is_fp16_available() -> bool:
    """Whether this machine's device computes in float16."""
    return not is_habana_gaudi1() and devices.detect().supports_autocast(torch.float16)


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether Transformer Engine and the GPU have block-scaled 8-bit floating point (version 2, compute capability
    10.0).

    Initialises CUDA where Transformer Engine is new enough.
    """
    installed = is_package_available("transformer_engine", min_version="2.0.0")
    return installed and is_cuda_available() and torch.cuda.get_device_capability() >= (10, 0)


def is_torch_distributed_available() -> bool:
    """Whether torch is built with torch.distributed."""
    return torch.distributed.is_available()


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Whether an object is a tensor on an Intel GPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def is_xccl_available() -> bool:
    """Whether torch is built with the collectives of Intel GPUs."""
    return devices.get("xpu").collective_backend == "xccl"


def is_pippy_available() -> bool:
    """Whether torch has ``torch.distributed.pipelining``, into which PiPPy has moved."""
    return is_torch_distributed_available() and is_torch_version(">=", "2.4.0")


def is_weights_only_available() -> bool:
    """Whether ``torch.load(weights_only=True)`` knows an allow-list of classes (torch 2.4)."""
    return is_torch_version(">=", "2.4.0")


def _has(name: str, check_device: bool) -> bool:
    device = devices.get(name)
    return device.is_available() and (not check_device or device.device_count() > 0)
