"""How accel uses the simulated GPU; its entry point in the group ``accel.devices`` is in torch_simgpu-1.0.dist-info."""

from __future__ import annotations

from accel_state import DistributedType
from accel_state.devices.base import Device


class SimGpuDevice(Device):
    """Simulated GPUs: torch_simgpu adds ``torch.simgpu`` with the functions of ``torch.cuda``."""

    name = "simgpu"
    collective_backend = "simccl"
    visible_devices_variable = "SIMGPU_VISIBLE_DEVICES"
    distributed_type = DistributedType.MULTI_GPU
    vendor_package = "torch_simgpu"
