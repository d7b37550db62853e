"""Moore Threads GPUs, through torch_musa: https://github.com/MooreThreads/torch_musa"""

from __future__ import annotations

from typing import ClassVar

from ..enums import DistributedType
from .base import Device


class MusaDevice(Device):
    """Moore Threads GPUs: torch_musa adds ``torch.musa`` with the functions of ``torch.cuda``."""

    name = "musa"
    collective_backend = "mccl"
    visible_devices_variable: ClassVar[str | None] = "MUSA_VISIBLE_DEVICES"
    distributed_type = DistributedType.MULTI_MUSA
    vendor_package: ClassVar[str | None] = "torch_musa"
    out_of_memory_messages: ClassVar[tuple[str, ...]] = ("MUSA out of memory",)
