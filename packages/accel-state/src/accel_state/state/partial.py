"""Rank, world and device of this process."""

from __future__ import annotations

import atexit
import gc
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from .. import devices, env, environments
from ..collectives.registry import COLLECTIVES
from ..collectives.single import Collectives
from ..devices.base import Device
from ..enums import DistributedType
from ..environments.base import Environment
from ..errors import ConfigurationError
from .process_control import ProcessControl
from .shared import SharedState


def is_initialized() -> bool:
    """Whether a PartialState or an Accelerator has been made in this process."""
    return bool(PartialState._shared_state)


class PartialState(ProcessControl, SharedState):
    """What this process is in the run: its rank, the world size, its device, and how to talk to the other processes.

    Every instance shares the same attributes, set when the first one is made. In a run of several processes that first
    one also starts torch's process group, unless it is running already.

    Args:
        cpu: stay on the CPU even if there is an accelerator.
        **kwargs: passed to ``torch.distributed.init_process_group`` (``backend``, ``timeout``, ``init_method``).

    Attributes:
        device: the device of this process.
        distributed_type: the kind of run.
        backend: name of the communication back end, or None in a single process.
        num_processes: the world size.
        process_index: the rank.
        local_process_index: the rank among the processes of this node.
        debug: whether collectives check their inputs first.
        fork_launched: whether a notebook or debug launcher forked this process.
        collectives: the communication between processes (a null object in a single process).
        device_backend: what the kind of device can do.
        environment: who started this process.

    Raises:
        ConfigurationError: the environment contradicts itself, or this torch cannot communicate.
    """

    _slot: ClassVar[str] = "process"

    device: torch.device
    distributed_type: DistributedType
    backend: str | None
    num_processes: int
    process_index: int
    local_process_index: int
    debug: bool
    fork_launched: bool
    collectives: Collectives
    device_backend: Device
    environment: Environment

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        super().__init__()
        if self.initialized:
            if cpu and self.device.type != "cpu":
                raise ConfigurationError(
                    f"cpu=True was asked for, but this process already works on {self.device}. Ask before anything "
                    "else makes a "
                    "PartialState or an Accelerator, or set ACCELERATE_USE_CPU=true (accel launch --cpu)."
                )
            return
        try:
            self._start(cpu, kwargs)
        except BaseException:
            self.__dict__.clear()  # half a state would be taken for a whole one
            raise

    def _start(self, cpu: bool, kwargs: dict[str, Any]) -> None:
        environment = environments.detect()
        forced = env.read_str("ACCELERATE_TORCH_DEVICE")
        backend = devices.detect(cpu=cpu or env.parse_flag_from_env("ACCELERATE_USE_CPU"))
        self.environment = environment
        self.device_backend = backend
        self.debug = env.parse_flag_from_env("ACCELERATE_DEBUG_MODE")
        self.fork_launched = env.parse_flag_from_env("FORK_LAUNCHED")
        self.local_process_index = environment.local_rank
        self.device = torch.device(forced) if forced else backend.device(environment.local_rank)
        self.set_device()
        if env.parse_flag_from_env("ACCELERATE_CPU_AFFINITY"):
            from ..numa import set_numa_affinity

            set_numa_affinity(self.local_process_index)
        self._connect(environment, kwargs)
        self.num_processes = self.collectives.world_size
        self.process_index = self.collectives.rank
        self.distributed_type = backend.distributed_type if self.num_processes > 1 else DistributedType.NO

    def _connect(self, environment: Environment, kwargs: dict[str, Any]) -> None:
        name = self.device_backend.collectives
        adopted = dist.is_available() and dist.is_initialized()
        if name == "torch" and not adopted:
            if environment.world_size == 1:
                name = "single"
            else:
                self._init_process_group(environment, dict(kwargs))
        self.backend = dist.get_backend() if name == "torch" else None if name == "single" else name
        if name == "torch":
            self.collectives = COLLECTIVES.load(name)(self._communication_device())  # type: ignore[call-arg]
            _close_at_exit()
        elif name == "single":
            self.collectives = Collectives()
        else:
            self.collectives = COLLECTIVES.load(name)(self.device)  # type: ignore[call-arg]

    def _communication_device(self) -> torch.device:
        # gloo and mpi move host memory, whatever the device that computes.
        return torch.device("cpu") if dist.get_backend() in ("gloo", "mpi") else self.device

    def _init_process_group(self, environment: Environment, kwargs: dict[str, Any]) -> None:
        if not dist.is_available():
            raise ConfigurationError(
                f"this process is rank {environment.rank} of {environment.world_size}, but this build of torch has no "
                "torch.distributed. Install one that has, or start a single process."
            )
        kwargs.setdefault("backend", self.device_backend.collective_backend)
        if isinstance(kwargs.get("timeout"), (int, float)):
            kwargs["timeout"] = timedelta(seconds=kwargs["timeout"])
        if "init_method" not in kwargs and not _meets_by_variables():
            kwargs["init_method"] = _meeting_place(environment)
        if kwargs.get("init_method"):
            kwargs.update(rank=environment.rank, world_size=environment.world_size)
        kwargs.update(self.device_backend.process_group_options(self.device))
        dist.init_process_group(**kwargs)

    @property
    def default_device(self) -> torch.device:
        """The device that a single process would use here."""
        return self.device_backend.device(0)

    def set_device(self) -> None:
        """Make this process's device the current one of its kind, so that unqualified allocations land on it."""
        self.device_backend.set_current(self.device)

    def wait_for_everyone(self) -> None:
        """Return when every process has come here; at once in a single process.

        Raises:
            CollectiveTimeoutError: some rank did not come; the message says which, and where the others wait.
        """
        self.collectives.barrier()

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the process group.

        Args:
            group: only this group; by default everything.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return
        if group is not None:
            dist.destroy_process_group(group)
        else:
            self.collectives.shutdown()

    def __repr__(self) -> str:
        return self._describe(self.distributed_type)

    def _describe(self, distributed_type: DistributedType) -> str:
        """The facts in words, with a kind of run that is more than what the devices say."""
        return (
            f"Distributed environment: {distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )


def _meets_by_variables() -> bool:
    """Whether torch finds everything it needs in the environment (torchrun, or a user who set it)."""
    return all(env.read_str(key) is not None for key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))


def _meeting_place(environment: Environment) -> str:
    """The address where the ranks of a launcher that does not speak torch's variables meet.

    Raises:
        ConfigurationError: the launcher did not say where rank 0 is, and it cannot be derived.
    """
    if environment.main_address is None or environment.main_port is None:
        raise ConfigurationError(
            f"{environment.name} started {environment.world_size} processes, but did not say where rank 0 is. Set "
            "MASTER_ADDR to its "
            "host name and MASTER_PORT to a free port on it, on every process."
        )
    return f"tcp://{environment.main_address}:{environment.main_port}"


def _close_at_exit() -> None:
    atexit.unregister(_leave_group)
    atexit.register(_leave_group)


def _leave_group() -> None:
    """Destroy the process group before the interpreter goes.

    gloo's worker threads otherwise race with the end of the interpreter, and about one run in five aborts after all its
    work is done. Models that DDP wrapped hold the group too, so they are collected first.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
