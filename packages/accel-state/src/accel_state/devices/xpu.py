"""Intel GPUs."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..enums import DistributedType
from .base import Device

# Missing before torch 2.7, and in builds without torch.distributed.
_has_xccl = getattr(torch.distributed, "is_xccl_available", lambda: False)


class XpuDevice(Device):
    """Intel GPUs (``torch.xpu``)."""

    name = "xpu"
    # Without xccl in torch, oneccl_bindings_for_pytorch registers a backend named ccl.
    collective_backend = "xccl" if _has_xccl() else "ccl"
    visible_devices_variable: ClassVar[str | None] = "ZE_AFFINITY_MASK"
    distributed_type = DistributedType.MULTI_XPU
    out_of_memory_messages: ClassVar[tuple[str, ...]] = (
        "XPU out of memory",
        "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
        "UR error: 39",
    )
