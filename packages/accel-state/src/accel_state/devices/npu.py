"""Huawei Ascend NPUs, through torch_npu: https://github.com/Ascend/pytorch"""

from __future__ import annotations

from ..enums import DistributedType
from .base import Device


class NpuDevice(Device):
    """Ascend NPUs: torch_npu adds ``torch.npu`` with the functions of ``torch.cuda``."""

    name = "npu"
    collective_backend = "hccl"
    visible_devices_variable = "ASCEND_RT_VISIBLE_DEVICES"
    distributed_type = DistributedType.MULTI_NPU
    vendor_package = "torch_npu"
    out_of_memory_messages = ("NPU out of memory", "EL0004")
