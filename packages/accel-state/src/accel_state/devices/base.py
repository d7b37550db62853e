"""The interface of every device, implemented through the module that torch has for each device type.

``torch.cuda``, ``torch.xpu`` and, once a vendor's plug-in is imported, ``torch.npu``, ``torch.mlu`` and so on have the
same functions. A subclass contains constants, and the methods in which its module differs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch

from ..enums import DistributedType
from ..errors import ConfigurationError, MissingDependencyError


class Device:
    """A type of device. Instances are stateless; ``accel_state.devices.get(name)`` returns the one of a name."""

    name: ClassVar[str]
    """The torch device type: ``torch.device(name, index)``."""
    collective_backend: ClassVar[str]
    """The torch.distributed backend that moves this device's tensors."""
    collectives: ClassVar[str] = "torch"
    """The entry of ``accel_state.collectives`` through which processes with this device communicate."""
    visible_devices_variable: ClassVar[str | None] = None
    """The environment variable that limits which devices a process sees."""
    distributed_type: ClassVar[DistributedType]
    """The type of a run on several of these devices."""
    single_type: ClassVar[DistributedType] = DistributedType.NO
    """The type of a run in one process."""
    strategy: ClassVar[str | None] = None
    """The training strategy that these devices need in the place of data parallelism; None without such a need."""
    sharded_strategy: ClassVar[str | None] = None
    """The same in the place of FSDP and of meshes of processes."""
    fixed_shapes: ClassVar[bool] = False
    """Whether every new shape of a batch costs a compilation, so that loaders complete their last batch."""
    has_storage: ClassVar[bool] = True
    """Whether tensors have a storage, by which they can be copied byte by byte and saved."""
    caches_memory: ClassVar[bool] = True
    """Whether :meth:`empty_cache` does something."""
    vendor_package: ClassVar[str | None] = None
    """The package whose import adds ``torch.<name>``; None if torch includes it."""
    autocast_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    """The dtypes that ``torch.autocast(name, dtype)`` supports."""
    out_of_memory_messages: ClassVar[tuple[str, ...]] = ()
    """Parts of the message of a RuntimeError that reports a failed allocation."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    @property
    def module(self) -> Any:
        """The torch module of this device (``torch.cuda``).

        Raises:
            MissingDependencyError: torch, or the vendor's plug-in, does not provide it.
        """
        module = self._find_module()
        if module is None:
            source = f"a torch build with {self.name} support"
            if self.vendor_package:
                source = f"the package {self.vendor_package}"
            raise MissingDependencyError(
                f"the device {self.name!r} needs {source}, which is not installed or cannot be loaded here"
            )
        return module

    def streams(self) -> Any:
        """:attr:`module`, if it has streams and events, and enters streams as ``torch.cuda`` does; else None."""
        module = self._find_module()
        needed = ("Event", "Stream", "stream", "current_stream")
        return module if all(hasattr(module, name) for name in needed) else None

    def _find_module(self) -> ModuleType | None:
        if self.vendor_package is not None and not _load_vendor_package(self.vendor_package):
            return None
        return getattr(torch, self.name, None)

    def _is_torchs_accelerator(self) -> bool:
        """Return True if ``torch.accelerator``, which has the same functions for all devices, is about this one."""
        current = torch.accelerator.current_accelerator()
        return current is not None and current.type == self.name

    def is_plug_in(self) -> bool:
        """Return True if a package has added this device to torch as the one outside of it (PrivateUse1)."""
        # torch has one type for all of them, and gives it the name that the package has chosen.
        return self.is_available() and self.name == torch.device("privateuseone").type

    def is_available(self) -> bool:
        """Return True if this machine has such a device that torch can use. Does not initialize it."""
        module = self._find_module()
        return module is not None and bool(module.is_available())

    def problem(self) -> str | None:
        """Why the device that the environment asks for cannot be used, and what to do; else None."""
        return None

    def device_count(self) -> int:
        """Return the number of these devices that this process sees. Does not initialize them."""
        return int(self.module.device_count()) if self.is_available() else 0

    def device(self, local_rank: int) -> torch.device:
        """Return the device of the process with this local rank.

        If each process sees a single device (as with SLURM's ``--gpus-per-task=1``), that one.

        Raises:
            ConfigurationError: there are fewer devices than local ranks.
        """
        count = self.device_count()
        if local_rank < count:
            return torch.device(self.name, local_rank)
        visible = os.environ.get(self.visible_devices_variable) if self.visible_devices_variable else None
        if count == 1 and visible is not None:
            return torch.device(self.name, 0)
        limit = f" ({self.visible_devices_variable}={visible!r})" if self.visible_devices_variable else ""
        raise ConfigurationError(
            f"no {self.name} device for local rank {local_rank}: this process sees {count}{limit}. Start at most "
            f"{max(count, 1)} processes on this node, or run on the CPU (cpu=True, --cpu)."
        )

    def set_current(self, device: torch.device) -> None:
        """Make ``device`` the default for tensors of this type without an index."""
        self.module.set_device(device)

    def current(self) -> torch.device:
        """Return the current device of this process."""
        return torch.device(self.name, int(self.module.current_device()))

    def chosen(self) -> torch.device | None:
        """Return the device that the script has made current; None if that is the first one, which is so by default."""
        initialized = getattr(self.module, "is_initialized", None)
        if initialized is None or not initialized():
            return None
        current = self.current()
        return current if current.index else None

    def process_group_options(self, device: torch.device) -> dict[str, Any]:
        """Additional arguments of ``torch.distributed.init_process_group`` for this device."""
        return {}

    def is_capturing(self) -> bool:
        """Return True if operations are being recorded into a graph, so that their results cannot be read."""
        return False

    def local_rank(self, launched: int) -> int:
        """Return the rank of this process among those of its node, given that of the launcher."""
        return launched

    def batch_cutter(self) -> Callable[[], None] | None:
        """Return what a loop over batches calls after each; None where operations run without being told."""
        return None

    def tensor_id(self, tensor: torch.Tensor) -> int:
        """Return a number that tensors have in common if they share memory."""
        return tensor.untyped_storage().data_ptr()

    def synchronize(self) -> None:
        """Wait for all work queued on the current device."""
        self.module.synchronize()

    def empty_cache(self) -> None:
        """Return the memory that torch's allocator has cached to the device."""
        self.module.empty_cache()

    def memory_free(self, index: int = 0) -> int:
        """Free memory of a device in bytes."""
        return self._memory_info(index)[0]

    def memory_total(self, index: int = 0) -> int:
        """Total memory of a device in bytes."""
        return self._memory_info(index)[1]

    def memory_allocated(self, index: int = 0) -> int:
        """Memory of a device that the tensors of this process use, in bytes."""
        return int(self.module.memory_allocated(index))

    def _memory_info(self, index: int) -> tuple[int, int]:
        """(free, total) in bytes."""
        module = self.module
        if hasattr(module, "mem_get_info"):
            free, total = module.mem_get_info(index)
            return int(free), int(total)
        if self._is_torchs_accelerator() and hasattr(torch.accelerator, "get_memory_info"):
            # It raises for a plug-in that has not given torch its allocator.
            with contextlib.suppress(RuntimeError):
                free, total = torch.accelerator.get_memory_info(index)
                return int(free), int(total)
        # Older vendor modules only know the memory of this process.
        total = int(module.get_device_properties(index).total_memory)
        return total - int(module.memory_reserved(index)), total

    def is_out_of_memory(self, exception: BaseException) -> bool:
        """Return True if an exception reports that an allocation on this type of device failed."""
        if isinstance(exception, torch.OutOfMemoryError):
            return True  # what the allocators of torch raise, whatever the device
        if not isinstance(exception, RuntimeError):
            return False
        text = str(exception)
        return any(message in text for message in self.out_of_memory_messages)

    def supports_autocast(self, dtype: torch.dtype) -> bool:
        """Return True if ``torch.autocast`` supports ``dtype`` on this device."""
        return dtype in self.autocast_dtypes and self.is_available() and torch.amp.is_autocast_available(self.name)

    def set_deterministic(self) -> None:
        """Use only deterministic kernels; torch raises for an operation without one."""
        torch.use_deterministic_algorithms(True)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices of this type."""
        self.module.manual_seed_all(seed)

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the current device's generator, a 1-dimensional uint8 tensor on the CPU."""
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state of :meth:`get_rng_state`."""
        self.module.set_rng_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """Return the generator states of all devices that this process sees, by index."""
        module = self.module
        return list(module.get_rng_state_all()) if hasattr(module, "get_rng_state_all") else [self.get_rng_state()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        """Restore the states of :meth:`get_rng_state_all`."""
        if hasattr(self.module, "set_rng_state_all"):
            self.module.set_rng_state_all(states)
        else:
            (state,) = states
            self.set_rng_state(state)

    def pci_address(self, index: int) -> str | None:
        """Return the PCI address of a device ("0000:3b:00.0"), or None. May initialize the device."""
        get_properties = getattr(self.module, "get_device_properties", None) if self.is_available() else None
        properties = get_properties(index) if get_properties is not None else None
        bus = getattr(properties, "pci_bus_id", None)
        if not isinstance(bus, int):
            return None
        domain, slot = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
        return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


@functools.cache
def _load_vendor_package(package: str) -> bool:
    """Import a vendor's plug-in if it is installed; its import is what adds ``torch.<name>``."""
    if importlib.util.find_spec(package) is None:
        return False
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        # Installed without its driver, or for another torch: continue without its devices.
        warnings.warn(
            f"{package} is installed but cannot be loaded, so its devices are not used: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
