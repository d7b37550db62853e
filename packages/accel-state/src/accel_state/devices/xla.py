"""TPUs and other devices behind PyTorch/XLA: https://docs.pytorch.org/xla/"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch

from ..enums import DistributedType
from .base import Device


class XlaDevice(Device):
    """XLA devices. Operations are recorded and compiled; a step is cut by ``torch_xla.sync()``."""

    name = "xla"
    collective_backend = "xla"
    collectives = "xla"
    visible_devices_variable = "TPU_VISIBLE_CHIPS"
    distributed_type = DistributedType.XLA
    vendor_package = "torch_xla"
    autocast_dtypes = (torch.bfloat16,)
    out_of_memory_messages = ("RESOURCE_EXHAUSTED",)

    @property
    def module(self) -> Any:
        """``torch_xla.core.xla_model``, which has the part that ``torch.<name>`` has for other devices."""
        return importlib.import_module("torch_xla.core.xla_model")

    def _runtime(self) -> Any:
        return importlib.import_module("torch_xla.runtime")

    def is_available(self) -> bool:
        """Whether torch_xla is installed and a run time is chosen: by PJRT_DEVICE, or by the TPU library being there.

        Asking torch_xla itself would start the run time.
        """
        if importlib.util.find_spec("torch_xla") is None:
            return False
        return bool(os.environ.get("PJRT_DEVICE")) or importlib.util.find_spec("libtpu") is not None

    def device_count(self) -> int:
        """How many XLA devices this process can address. Starts the run time, which has no other way to tell."""
        return int(self._runtime().addressable_device_count()) if self.is_available() else 0

    def device(self, local_rank: int) -> torch.device:
        """The XLA device of this process: the run time assigns it."""
        return self.current()

    def set_current(self, device: torch.device) -> None:
        """Nothing to choose: the run time assigns a device to each process."""

    def current(self) -> torch.device:
        """The XLA device of this process."""
        device: torch.device = importlib.import_module("torch_xla").device()
        return device

    def synchronize(self) -> None:
        """Compile and run what is recorded, and wait for it."""
        importlib.import_module("torch_xla").sync()
        self.module.wait_device_ops()

    def empty_cache(self) -> None:
        """Nothing to hand back: XLA plans memory when it compiles."""

    def memory_allocated(self, index: int = 0) -> int:
        """Bytes in use on the device, of all processes that share it."""
        free, total = self._memory_info(index)
        return total - free

    def _memory_info(self, index: int) -> tuple[int, int]:
        info = self.module.get_memory_info(self.current())
        return int(info["bytes_limit"]) - int(info["bytes_used"]), int(info["bytes_limit"])

    def manual_seed_all(self, seed: int) -> None:
        """Set the seed of the device's generator."""
        self.module.set_rng_state(seed)

    def get_rng_state(self) -> torch.Tensor:
        """The state, which in XLA is one integer, as an int64 tensor of one element."""
        return torch.tensor([int(self.module.get_rng_state())], dtype=torch.int64)

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put a state back."""
        self.module.set_rng_state(int(state.item()))

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """A list of the one state of this process."""
        return [self.get_rng_state()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        """Put the one state of this process back."""
        (state,) = states
        self.set_rng_state(state)

    def pci_address(self, index: int) -> str | None:
        """None: torch_xla does not tell."""
        return None
