"""TPUs through torch_tpu, the successor of torch_xla: https://github.com/google-pytorch/torch_tpu

``import torch`` loads torch_tpu where it is installed, and with a TPU torch_tpu adds the device type "tpu". Operations
run as on a GPU, and processes communicate through torch.distributed, so that data parallelism, FSDP 2 and meshes are
those of every other device.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ..enums import DistributedType
from ..errors import ConfigurationError
from .base import Device


class TpuDevice(Device):
    """TPUs. torch_tpu reserves most functions of ``torch.tpu`` for torch; ``torch.accelerator`` has them for others."""

    name = "tpu"
    collective_backend = "tpu_dist"
    visible_devices_variable: ClassVar[str | None] = "TPU_VISIBLE_CHIPS"
    distributed_type = DistributedType.MULTI_TPU
    caches_memory = False
    vendor_package: ClassVar[str | None] = "torch_tpu"
    autocast_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    out_of_memory_messages: ClassVar[tuple[str, ...]] = ("RESOURCE_EXHAUSTED",)

    def is_available(self) -> bool:
        """Return True if torch_tpu is installed and has found a TPU."""
        if self._find_module() is None:
            return False
        accelerator = torch.accelerator.current_accelerator()
        return accelerator is not None and accelerator.type == self.name and torch.accelerator.is_available()

    def device_count(self) -> int:
        return torch.accelerator.device_count() if self.is_available() else 0

    def device(self, local_rank: int) -> torch.device:
        """Return the device that torch_tpu bound this process to when it was started; a process cannot change it."""
        if not self.is_available():
            return super().device(local_rank)  # which names what is missing
        return self.current()

    def set_current(self, device: torch.device) -> None:
        """Do nothing: torch_tpu binds a process to its device."""

    def current(self) -> torch.device:
        return torch.device(self.name, torch.accelerator.current_device_index())

    def synchronize(self) -> None:
        """Wait for all work queued on the current device."""
        _ = self.module  # torch_tpu is named where it is missing
        torch.accelerator.synchronize()

    def empty_cache(self) -> None:
        """Do nothing: torch_tpu offers no way to return memory."""

    def memory_total(self, index: int = 0) -> int:
        return int(self.module.get_device_properties(index).total_memory)

    def memory_allocated(self, index: int = 0) -> int:
        """Return bytes in use on the device.

        Raises:
            ConfigurationError: this version of torch_tpu does not tell.
        """
        free, total = self._memory_info(index)
        return total - free

    def _memory_info(self, index: int) -> tuple[int, int]:
        try:
            free, total = torch.accelerator.get_memory_info(index)
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            limit = self.memory_total(index)
            raise ConfigurationError(
                f"this version of torch_tpu does not report the memory in use on a TPU ({error}). Pass the limit "
                f"yourself: max_memory={{{index}: {limit}}} is all of it."
            ) from error
        return int(free), int(total)

    def get_rng_state(self) -> torch.Tensor:
        return self._generator().get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._generator().set_state(state)

    def _generator(self) -> torch.Generator:
        # torch_tpu 0.2 refuses its get_rng_state to others in favour of a function that torch 2.13 does not have.
        generator: torch.Generator = self.module.default_generators[torch.accelerator.current_device_index()]
        return generator
