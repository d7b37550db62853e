"""What every device offers, and the implementation that torch's own naming makes possible.

torch keeps one module per device type with the same function names: ``torch.cuda``, ``torch.xpu``, and, once a vendor's
plug-in is imported, ``torch.npu``, ``torch.mlu`` and so on. The base class works through that module, so that a
vendor's file only states facts and where its interface differs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from types import ModuleType
from typing import Any, ClassVar

import torch

from ..enums import DistributedType
from ..errors import ConfigurationError, MissingDependencyError


class Device:
    """A kind of device. Instances hold no state; ``accel_state.devices.get(name)`` returns the one of a name."""

    name: ClassVar[str]
    """The torch device type: ``torch.device(name, index)``."""
    collective_backend: ClassVar[str]
    """The torch.distributed backend that moves this device's tensors."""
    collectives: ClassVar[str] = "torch"
    """The entry of ``accel_state.collectives`` that several processes with this device talk through."""
    visible_devices_variable: ClassVar[str | None] = None
    """The environment variable that limits which devices a process sees."""
    distributed_type: ClassVar[DistributedType]
    """What a run on several of these devices is called."""
    vendor_package: ClassVar[str | None] = None
    """The package whose import adds ``torch.<name>``; None where torch brings it."""
    autocast_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    """The types that ``torch.autocast(name, dtype)`` may compute in."""
    out_of_memory_messages: ClassVar[tuple[str, ...]] = ()
    """What a RuntimeError of this device says when an allocation failed."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    # -- the torch module --------------------------------------------------------------------------------------------

    @property
    def module(self) -> Any:
        """The torch module of this device (``torch.cuda``).

        Raises:
            MissingDependencyError: this torch, or the vendor's plug-in, does not have it.
        """
        module = self._find_module()
        if module is None:
            source = (
                f"the package {self.vendor_package}"
                if self.vendor_package
                else f"a torch build with {self.name} support"
            )
            raise MissingDependencyError(
                f"the device {self.name!r} needs {source}, which is not installed or cannot be loaded here"
            )
        return module

    def _find_module(self) -> ModuleType | None:
        if self.vendor_package is not None and not _load_vendor_package(self.vendor_package):
            return None
        return getattr(torch, self.name, None)

    # -- which devices there are -------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """Whether this machine has such a device and torch can use it. Does not initialise it."""
        module = self._find_module()
        return module is not None and bool(module.is_available())

    def device_count(self) -> int:
        """How many of these devices this process sees. Does not initialise them."""
        return int(self.module.device_count()) if self.is_available() else 0

    def device(self, local_rank: int) -> torch.device:
        """The device of the process with this local rank.

        Where the launcher has hidden all devices but one from each process (SLURM's ``--gpus-per-task=1``, say), it is
        that one.

        Raises:
            ConfigurationError: there are fewer devices than local ranks.
        """
        count = self.device_count()
        if local_rank < count:
            return torch.device(self.name, local_rank)
        visible = os.environ.get(self.visible_devices_variable) if self.visible_devices_variable else None
        if count == 1 and visible is not None:
            return torch.device(self.name, 0)
        raise ConfigurationError(
            f"local rank {local_rank} has no {self.name} device of its own: this process sees {count}"
            + (f" ({self.visible_devices_variable}={visible!r})" if self.visible_devices_variable else "")
            + f". Start at most {max(count, 1)} processes on this node, or run on the CPU (cpu=True, --cpu)."
        )

    def set_current(self, device: torch.device) -> None:
        """Make ``device`` the one that tensors of this type are created on when no index is given."""
        self.module.set_device(device)

    def current(self) -> torch.device:
        """The current device of this process."""
        return torch.device(self.name, int(self.module.current_device()))

    def process_group_options(self, device: torch.device) -> dict[str, Any]:
        """Further arguments for ``torch.distributed.init_process_group`` on this device."""
        return {}

    def synchronize(self) -> None:
        """Wait until everything queued on the current device is done."""
        self.module.synchronize()

    # -- memory ------------------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Hand memory that torch's allocator keeps in reserve back to the device."""
        self.module.empty_cache()

    def memory_free(self, index: int = 0) -> int:
        """Bytes of a device that nobody uses."""
        return self._memory_info(index)[0]

    def memory_total(self, index: int = 0) -> int:
        """Bytes of a device."""
        return self._memory_info(index)[1]

    def memory_allocated(self, index: int = 0) -> int:
        """Bytes of a device that this process's tensors occupy."""
        return int(self.module.memory_allocated(index))

    def _memory_info(self, index: int) -> tuple[int, int]:
        """(free, total) in bytes."""
        module = self.module
        if hasattr(module, "mem_get_info"):
            free, total = module.mem_get_info(index)
            return int(free), int(total)
        # Older vendor modules only know what this process holds.
        total = int(module.get_device_properties(index).total_memory)
        return total - int(module.memory_reserved(index)), total

    def is_out_of_memory(self, exception: BaseException) -> bool:
        """Whether an exception says that an allocation on this kind of device failed."""
        if not isinstance(exception, RuntimeError):
            return False
        text = str(exception)
        return any(message in text for message in self.out_of_memory_messages)

    # -- arithmetic --------------------------------------------------------------------------------------------------

    def supports_autocast(self, dtype: torch.dtype) -> bool:
        """Whether ``torch.autocast`` computes in ``dtype`` on this device."""
        return dtype in self.autocast_dtypes and self.is_available() and torch.amp.is_autocast_available(self.name)

    def set_deterministic(self) -> None:
        """Let only deterministic kernels run; torch raises where there is none for an operation."""
        torch.use_deterministic_algorithms(True)

    # -- random numbers ----------------------------------------------------------------------------------------------

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices of this kind."""
        self.module.manual_seed_all(seed)

    def get_rng_state(self) -> torch.Tensor:
        """The state of the current device's generator, a uint8 tensor of one dimension in CPU memory."""
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put a state of :meth:`get_rng_state` back."""
        self.module.set_rng_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """The states of the generators of all devices that this process sees, by index."""
        return list(self.module.get_rng_state_all())

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        """Put the states of :meth:`get_rng_state_all` back."""
        self.module.set_rng_state_all(states)

    # -- the machine -------------------------------------------------------------------------------------------------

    def pci_address(self, index: int) -> str | None:
        """Where a device sits on the PCI bus ("0000:3b:00.0"), or None where it has no such place. May initialise the
        device.
        """
        properties = self.module.get_device_properties(index) if self.is_available() else None
        bus = getattr(properties, "pci_bus_id", None)
        if not isinstance(bus, int):
            return None
        return (
            f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{getattr(properties, 'pci_device_id', 0):02x}.0"
        )


@functools.cache
def _load_vendor_package(package: str) -> bool:
    """Import a vendor's plug-in if it is installed; its import is what adds ``torch.<name>``."""
    if importlib.util.find_spec(package) is None:
        return False
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        # Installed, but without its driver or for another torch: the machine is used without it, and the user is told.
        warnings.warn(
            f"{package} is installed but cannot be loaded, so its devices are not used: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
