"""TPUs and other devices behind PyTorch/XLA: https://docs.pytorch.org/xla/"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from .._torch_compat import xla_has_started, xla_mode_is_fixed, xla_tensor_id
from ..enums import DistributedType
from ..errors import ConfigurationError, require
from .base import Device

_STATES = 2**64
# https://docs.pytorch.org/xla/release/r2.9/learn/pytorch-on-xla-devices.html
_KINDS = ("TPU", "CPU", "CUDA", "NEURON")


class XlaDevice(Device):
    """XLA devices. Operations are recorded, and compiled and run by ``torch_xla.sync()``."""

    name = "xla"
    collective_backend = "xla"
    collectives = "xla"
    visible_devices_variable: ClassVar[str | None] = "TPU_VISIBLE_CHIPS"
    distributed_type = single_type = DistributedType.XLA
    strategy: ClassVar[str | None] = "xla"
    sharded_strategy: ClassVar[str | None] = "xla_spmd"
    fixed_shapes = True
    has_storage = False
    caches_memory = False
    vendor_package: ClassVar[str | None] = "torch_xla"
    autocast_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    out_of_memory_messages: ClassVar[tuple[str, ...]] = ("RESOURCE_EXHAUSTED",)
    _early_seed: int | None = None

    @property
    def module(self) -> Any:
        """``torch_xla.core.xla_model``, the counterpart of ``torch.<name>`` of other devices."""
        return _import("torch_xla.core.xla_model")

    def is_available(self) -> bool:
        """Return True if torch_xla is installed and PJRT_DEVICE or an installed TPU library selects a runtime.

        Asking torch_xla would start the runtime.
        """
        if importlib.util.find_spec("torch_xla") is None:
            return False
        return bool(os.environ.get("PJRT_DEVICE")) or importlib.util.find_spec("libtpu") is not None

    def problem(self) -> str | None:
        """As in the base class.

        ``XRT_TPU_CONFIG`` is the variable of a runtime that torch_xla has dropped, so it asks for a device too.
        """
        kind, old = os.environ.get("PJRT_DEVICE"), os.environ.get("XRT_TPU_CONFIG")
        asked = f"PJRT_DEVICE={kind}" if kind else f"XRT_TPU_CONFIG={old}"
        if (kind or old) and importlib.util.find_spec("torch_xla") is None:
            return (
                f"{asked} asks for an XLA device, and torch_xla is not installed in this environment. Install it: pip "
                "install 'accel-state[xla]'; or unset the variable, to train on another device. TPUs through torch_tpu "
                "need no variable."
            )
        if old and not kind:
            return (
                f"{asked} is the variable of a runtime that torch_xla has not had since 2.1. Unset it, and set "
                "PJRT_DEVICE=TPU."
            )
        if kind and kind.split("_")[0] not in _KINDS:
            return f"PJRT_DEVICE={kind} is not a device of torch_xla. Set it to one of {', '.join(_KINDS)}."
        if kind == "TPU" and importlib.util.find_spec("libtpu") is None and not _has_tpu_library():
            return (
                "PJRT_DEVICE=TPU needs libtpu, which is not installed in this environment. Install it: pip install "
                "'torch_xla[tpu]'; or set PJRT_DEVICE=CPU, to try a script without a TPU."
            )
        if "torch_xla" in sys.modules and xla_has_started():
            threads = self.device_count()
            if threads > 1 and not self._is_alone():
                return (
                    f"torch_xla has started {threads} replicas as threads of this process, but the state of an "
                    "Accelerator belongs to a process. Limit each process to one device (CPU_NUM_DEVICES=1, "
                    "TPU_VISIBLE_CHIPS), or start one process and pass the Accelerator "
                    f"parallelism_config=ParallelismConfig(dp_shard_size={threads})."
                )
        return None

    def device_count(self) -> int:
        """Return the number of XLA devices that this process can address. Starts the runtime."""
        return int(_import("torch_xla.runtime").addressable_runtime_device_count()) if self.is_available() else 0

    def device(self, local_rank: int) -> torch.device:
        """Return the XLA device that the runtime assigned to this process."""
        return self.current()

    def set_current(self, device: torch.device) -> None:
        """Do nothing: the runtime assigns a device to each process."""

    def current(self) -> torch.device:
        if self._is_alone():
            return torch.device("xla", 0)  # asking torch_xla would rule out that its devices are combined later
        device: torch.device = _import("torch_xla").device()
        return device

    def local_rank(self, launched: int) -> int:
        """Return the number that the runtime gave this process: torch_xla sets no launcher's variables."""
        return 0 if self._is_alone() else int(_import("torch_xla.runtime").local_ordinal())

    def _is_alone(self) -> bool:
        return int(_import("torch_xla.runtime").world_size()) == 1

    def combine(self) -> int:
        """Make the devices of this process one, over which tensors can be sharded (SPMD); returns their number.

        Raises:
            ConfigurationError: a device is in use already.
        """
        runtime = _import("torch_xla.runtime")
        if not runtime.is_spmd():
            if xla_mode_is_fixed():
                raise ConfigurationError(
                    "an XLA device of this process is in use already, so its devices cannot be combined to shard a "
                    "model. Create the Accelerator before anything on an XLA device."
                )
            runtime.use_spmd()
        return int(runtime.global_runtime_device_count())

    def start(self) -> None:
        """Apply a seed that was set before it was known how the devices are used."""
        if self._early_seed is not None:
            seed, self._early_seed = self._early_seed, None
            self.module.set_rng_state(seed)

    def batch_cutter(self) -> Callable[[], None]:
        """Run what was recorded since the last batch, unless that was done within the batch, as optimizers do."""
        cuts = partial(_import("torch_xla.debug.metrics").counter_value, "MarkStep")
        last = cuts()

        def cut() -> None:
            nonlocal last
            if cuts() == last:
                self.run()
            last = cuts()

        return cut

    def run(self) -> None:
        """Start the recorded operations, without waiting for them."""
        _import("torch_xla").sync()

    def compilations(self) -> int:
        """Return how many graphs this process has compiled."""
        return int(_import("torch_xla.debug.metrics").counter_value("UncachedCompile") or 0)

    def tensor_id(self, tensor: torch.Tensor) -> int:
        return xla_tensor_id(tensor)

    def synchronize(self) -> None:
        """Compile and run the recorded operations, and wait for them."""
        self.run()
        self.module.wait_device_ops()

    def empty_cache(self) -> None:
        """Do nothing: XLA plans memory when it compiles."""

    def memory_allocated(self, index: int = 0) -> int:
        """Return bytes in use on the device, by all processes that share it."""
        free, total = self._memory_info(index)
        return total - free

    def _memory_info(self, index: int) -> tuple[int, int]:
        info = self.module.get_memory_info(self.current())
        return int(info["bytes_limit"]) - int(info["bytes_used"]), int(info["bytes_limit"])

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generator; of several devices when an Accelerator has decided how they are used."""
        if self.device_count() > 1 and not xla_mode_is_fixed():
            self._early_seed = seed
            return
        self._early_seed = None
        self.module.set_rng_state(seed)

    def get_rng_state(self) -> torch.Tensor:
        """Return the state, an unsigned integer of 64 bits in XLA, as an int64 tensor with one element."""
        self.start()
        # What was recorded draws its numbers from the present state; that of the next graph follows from it.
        self.run()
        state = int(self.module.get_rng_state())
        return torch.tensor([state - _STATES if state >= _STATES // 2 else state], dtype=torch.int64)

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._early_seed = None
        self.run()
        self.module.set_rng_state(int(state.item()) % _STATES)


def _has_tpu_library() -> bool:
    """Return True if libtpu is there without its package: images for TPUs have it among the system's libraries."""
    named = (os.environ.get(name) for name in ("TPU_LIBRARY_PATH", "PTXLA_TPU_LIBRARY_PATH"))
    return any(path and os.path.exists(path) for path in (*named, "/lib/libtpu.so", "/usr/lib/libtpu.so"))


def _import(module: str) -> Any:
    return require(module, purpose="training on XLA devices", install="accel-state[xla]")
