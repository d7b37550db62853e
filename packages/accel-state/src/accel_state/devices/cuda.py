"""NVIDIA GPUs, and AMD GPUs, which torch exposes under the same name."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from ..enums import DistributedType
from .base import Device


class CudaDevice(Device):
    """CUDA (or ROCm) GPUs."""

    name = "cuda"
    collective_backend = "nccl"
    visible_devices_variable: ClassVar[str | None] = "CUDA_VISIBLE_DEVICES"
    distributed_type = DistributedType.MULTI_GPU
    out_of_memory_messages: ClassVar[tuple[str, ...]] = (
        "CUDA out of memory",
        "HIP out of memory",
        "CUDA error: out of memory",
        "HIP error: out of memory",
        # cuDNN reports this if the workspace of the only suitable algorithm cannot be allocated.
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )

    def is_available(self) -> bool:
        """Return True if there is a GPU. Queries NVML if possible, so that the process can still fork."""
        return int(torch.cuda.device_count()) > 0

    def device_count(self) -> int:
        return int(torch.cuda.device_count())

    def process_group_options(self, device: torch.device) -> dict[str, Any]:
        """Bind the group to the GPU, so that NCCL connects eagerly and uses the right GPU."""
        return {"device_id": device}

    def is_capturing(self) -> bool:
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def supports_autocast(self, dtype: torch.dtype) -> bool:
        """As in the base class; bfloat16 needs a GPU that supports it, natively or by emulation."""
        if not super().supports_autocast(dtype):
            return False
        return dtype is not torch.bfloat16 or bool(torch.cuda.is_bf16_supported())

    def set_deterministic(self) -> None:
        """As in the base class, for cuDNN and cuBLAS too. An existing CUBLAS_WORKSPACE_CONFIG is kept."""
        super().set_deterministic()
        # cuBLAS is deterministic only with a fixed workspace; otherwise torch raises.
        # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
