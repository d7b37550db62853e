"""Intel GPUs."""

from __future__ import annotations

import torch

from ..enums import DistributedType
from .base import Device


def _has_xccl() -> bool:
    # torch.distributed is empty in builds without it; is_xccl_available came with torch 2.7.
    probe = getattr(torch.distributed, "is_xccl_available", None)
    return probe is not None and bool(probe())


class XpuDevice(Device):
    """Intel GPUs, part of torch since 2.5 (``torch.xpu``)."""

    name = "xpu"
    # Before torch had its own back end, oneccl_bindings_for_pytorch registered one named ccl.
    collective_backend = "xccl" if _has_xccl() else "ccl"
    visible_devices_variable = "ZE_AFFINITY_MASK"
    distributed_type = DistributedType.MULTI_XPU
    out_of_memory_messages = ("XPU out of memory", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", "UR error: 39")

    def is_out_of_memory(self, exception: BaseException) -> bool:
        """Whether an allocation failed in torch's allocator or in the driver."""
        specific = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
        return isinstance(exception, specific) or super().is_out_of_memory(exception)
