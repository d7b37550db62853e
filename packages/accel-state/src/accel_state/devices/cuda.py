"""NVIDIA GPUs, and AMD GPUs, which torch presents under the same name."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..enums import DistributedType
from .base import Device


class CudaDevice(Device):
    """CUDA (or ROCm) GPUs."""

    name = "cuda"
    collective_backend = "nccl"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    distributed_type = DistributedType.MULTI_GPU
    out_of_memory_messages = (
        "CUDA out of memory",
        "HIP out of memory",
        "CUDA error: out of memory",
        "HIP error: out of memory",
        # cuDNN answers so when the workspace of the only fitting algorithm could not be allocated.
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )

    def is_available(self) -> bool:
        """Whether there is a GPU. Asks the driver's management library where it can, which leaves the process able to
        fork.
        """
        return int(torch.cuda.device_count()) > 0

    def device_count(self) -> int:
        """How many GPUs this process sees; see :meth:`is_available`."""
        return int(torch.cuda.device_count())

    def process_group_options(self, device: torch.device) -> dict[str, Any]:
        """Binds the group to the GPU: NCCL connects at once, and never guesses which GPU a rank meant."""
        return {"device_id": device}

    def is_out_of_memory(self, exception: BaseException) -> bool:
        """Whether an allocation failed in torch's caching allocator, the driver, cuDNN or cuBLAS."""
        return isinstance(exception, torch.cuda.OutOfMemoryError) or super().is_out_of_memory(exception)

    def supports_autocast(self, dtype: torch.dtype) -> bool:
        """As in the base class; bfloat16 also needs a GPU that has it, natively or by emulation."""
        return super().supports_autocast(dtype) and (
            dtype is not torch.bfloat16 or bool(torch.cuda.is_bf16_supported())
        )

    def set_deterministic(self) -> None:
        """Deterministic kernels, cuDNN's and cuBLAS's included. A CUBLAS_WORKSPACE_CONFIG that is already set stays."""
        super().set_deterministic()
        # cuBLAS is deterministic only with a fixed workspace; torch refuses its operations otherwise.
        # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
