"""Cambricon MLUs, through torch_mlu."""

from __future__ import annotations

from ..enums import DistributedType
from .base import Device


class MluDevice(Device):
    """Cambricon MLUs: torch_mlu adds ``torch.mlu`` with the functions of ``torch.cuda``."""

    name = "mlu"
    collective_backend = "cncl"
    visible_devices_variable = "MLU_VISIBLE_DEVICES"
    distributed_type = DistributedType.MULTI_MLU
    vendor_package = "torch_mlu"
    out_of_memory_messages = ("MLU out of memory",)
