"""Cambricon MLUs, through torch_mlu."""

from __future__ import annotations

from typing import ClassVar

from ..enums import DistributedType
from .base import Device


class MluDevice(Device):
    """Cambricon MLUs: torch_mlu adds ``torch.mlu`` with the functions of ``torch.cuda``."""

    name = "mlu"
    collective_backend = "cncl"
    visible_devices_variable: ClassVar[str | None] = "MLU_VISIBLE_DEVICES"
    distributed_type = DistributedType.MULTI_MLU
    vendor_package: ClassVar[str | None] = "torch_mlu"
    out_of_memory_messages: ClassVar[tuple[str, ...]] = ("MLU out of memory",)
