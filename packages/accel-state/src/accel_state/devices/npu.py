"""Huawei Ascend NPUs, through torch_npu: https://github.com/Ascend/pytorch"""

from __future__ import annotations

from typing import ClassVar

from ..enums import DistributedType
from .base import Device


class NpuDevice(Device):
    """Ascend NPUs: torch_npu adds ``torch.npu`` with the functions of ``torch.cuda``."""

    name = "npu"
    collective_backend = "hccl"
    visible_devices_variable: ClassVar[str | None] = "ASCEND_RT_VISIBLE_DEVICES"
    distributed_type = DistributedType.MULTI_NPU
    vendor_package: ClassVar[str | None] = "torch_npu"
    out_of_memory_messages: ClassVar[tuple[str, ...]] = ("NPU out of memory", "EL0004")
