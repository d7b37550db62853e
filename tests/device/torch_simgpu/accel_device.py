"""How accel uses simulated GPUs, which the package torch_simgpu adds to torch."""

from __future__ import annotations

from accel_state import DistributedType
from accel_state.devices.base import Device


class SimGpuDevice(Device):
    """Simulated GPUs: importing torch_simgpu adds ``torch.simgpu``, with the functions of ``torch.cuda``."""

    name = "simgpu"
    vendor_package = "torch_simgpu"
    # The backend of torch.distributed that torch_simgpu registers, and the variable that hides devices from a process.
    collective_backend = "simccl"
    visible_devices_variable = "SIMGPU_VISIBLE_DEVICES"
    distributed_type = DistributedType.MULTI_GPU
    # torch.OutOfMemoryError is recognised by itself. Others are known by a part of their message.
    out_of_memory_messages = ("SIMGPU out of memory",)
