"""Moore Threads GPUs, through torch_musa: https://github.com/MooreThreads/torch_musa"""

from __future__ import annotations

from ..enums import DistributedType
from .base import Device


class MusaDevice(Device):
    """Moore Threads GPUs: torch_musa adds ``torch.musa`` with the functions of ``torch.cuda``."""

    name = "musa"
    collective_backend = "mccl"
    visible_devices_variable = "MUSA_VISIBLE_DEVICES"
    distributed_type = DistributedType.MULTI_MUSA
    vendor_package = "torch_musa"
    out_of_memory_messages = ("MUSA out of memory",)
