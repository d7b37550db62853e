"""Rank, world size and device of this process."""

from __future__ import annotations

import atexit
import gc
import sys
import weakref
from datetime import timedelta
from types import FunctionType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import env
from .._torch_compat import default_store, process_groups
from ..collectives.header import known_groups
from ..collectives.refused import RefusedCollectives
from ..collectives.registry import COLLECTIVES
from ..collectives.single import Collectives
from ..context import SharedState, is_initialized
from ..devices.base import Device
from ..devices.registry import detect as detect_device
from ..enums import DistributedType
from ..environments.base import Environment
from ..environments.registry import detect as detect_environment
from ..errors import ConfigurationError
from ..hang_reports import HangWatch
from ..options.core import CoreOptions
from ..options.launch import HardwareOptions
from ..ports import is_loopback
from ..tcp_store import serve_store
from .joined_group import environment_of_group, local_rank_is_known
from .process_control import ProcessControl
from .rank_owner import own_rank, owner_of_rank, release_rank

# How long a call into the store of a process group may take: torch's own value.
_STORE_TIMEOUT = timedelta(minutes=30)


def is_joined() -> bool:
    """Return True if a process group exists in this process."""
    return dist.is_available() and dist.is_initialized()


def current_rank() -> tuple[int, int]:
    """Rank and world size, without creating anything: of the state, the process group, or the launcher's variables.

    Raises:
        ConfigurationError: there is neither a state nor a group, and the variables contradict each other.
    """
    if is_initialized():
        state = PartialState()
        return state.process_index, state.num_processes
    if is_joined():
        return dist.get_rank(), dist.get_world_size()
    environment = detect_environment()
    return environment.rank, environment.world_size


class PartialState(ProcessControl, SharedState):
    """Rank, world size, device and collectives of this process.

    All instances share their attributes, which the first instance sets. In a distributed run the first instance also
    initializes torch's process group. If there is one already, rank, world size and backend are those of the group,
    whatever started the processes; without a launcher's LOCAL_RANK, the ranks then exchange their host names.

    A device that the script has made current before is kept, as is one that its process group is bound to.

    Args:
        cpu: use the CPU even if an accelerator is available.
        **kwargs: passed to ``torch.distributed.init_process_group`` (``backend``, ``timeout``, ``init_method``).

    Attributes:
        device: the device of this process.
        distributed_type: the type of run.
        backend: name of the communication backend, or None in a single process.
        num_processes: the world size.
        process_index: the rank.
        local_process_index: the rank among the processes of this node.
        debug: whether collectives check their inputs first.
        fork_launched: whether a notebook or debug launcher forked this process.
        collectives: the collectives (a null object in a single process).
        device_backend: the operations of this type of device.
        environment: the launcher that started this process.
        stands_by: whether another replica of a fault-tolerant run logs and saves, so that this is not the main process.

    Raises:
        ConfigurationError: the environment contradicts itself, torch is built without torch.distributed, or a process
            group was created after the first instance, which has no part in it.
        CollectiveTimeoutError: the ranks had to exchange their host names, and one of them created no PartialState.

    Warns:
        RuntimeWarning: the launcher's variables contradict the process group.
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
    stands_by: bool = False
    # The store of the process group, which outlives the group: the next one meets there.
    _store: Any = None
    _times_destroyed: int = 0

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        super().__init__()
        if self.__dict__:
            if cpu and self.device.type != "cpu":
                raise ConfigurationError(
                    f"cpu=True, but this process already uses {self.device}. Pass it to the first PartialState or "
                    "Accelerator, or set ACCELERATE_USE_CPU=true (accel launch --cpu)."
                )
            if type(self.collectives) is Collectives and is_joined():
                _refuse_a_later_group()
            return
        try:
            self._start(cpu, kwargs)
        except BaseException:
            self.__dict__.clear()  # an incomplete state would count as initialized
            raise

    def _start(self, cpu: bool, kwargs: dict[str, Any]) -> None:
        # Not the other options: a wrong value of those ends only what reads them.
        options = CoreOptions.from_environment(only=("cpu", "debug"))
        backend = detect_device(cpu=cpu or options.cpu)
        environment = self._locate(backend, kwargs)
        self.environment = environment
        self.device_backend = backend
        self.debug = options.debug
        self.fork_launched = env.parse_flag_from_env("FORK_LAUNCHED")
        self.local_process_index = environment.local_rank
        self.device = _device(backend, environment.local_rank)
        backend.set_current(self.device)
        if HardwareOptions.from_environment(only=("enable_cpu_affinity",)).enable_cpu_affinity:
            from ..numa import set_numa_affinity

            set_numa_affinity(self.local_process_index, local_world_size=environment.local_world_size)
        self._connect(environment, kwargs)
        self.num_processes = self.collectives.world_size
        self.process_index = self.collectives.rank
        self.distributed_type = backend.distributed_type if self.num_processes > 1 else backend.single_type

    def _locate(self, backend: Device, kwargs: dict[str, Any]) -> Environment:
        """Return the ranks of this process; before its device is chosen, which depends on the local rank."""
        if backend.collectives != "torch":
            return detect_environment()
        if not is_joined():
            environment = detect_environment()
            if (
                environment.world_size == 1
                or local_rank_is_known(environment)
                or owner_of_rank(environment) is not None
            ):
                return environment
            _init_process_group(environment, kwargs, backend, device=None)
        return environment_of_group()

    def _connect(self, environment: Environment, kwargs: dict[str, Any]) -> None:
        name = self.device_backend.collectives
        if name != "torch":
            self.backend = name
            self.collectives = COLLECTIVES.load(name)(self.device)  # type: ignore[call-arg]
            self.local_process_index = self.device_backend.local_rank(environment.local_rank)
            if self.collectives.world_size == 1:
                if environment.world_size > 1:
                    raise ConfigurationError(
                        f"{environment.name} started {environment.world_size} processes, but {name} connects none of "
                        "them. Start the script with `accel launch`."
                    )
                self.collectives = Collectives()
            return
        if not is_joined():
            if environment.world_size == 1:
                self.backend, self.collectives = None, Collectives()
                return
            if (owner := owner_of_rank(environment)) is not None:
                rank, world_size = environment.rank, environment.world_size
                self.backend, self.collectives = None, RefusedCollectives(rank, world_size, owner)
                return
            _init_process_group(environment, kwargs, self.device_backend, self.device)
        self._use_group()

    def _use_group(self) -> None:
        self.backend, through = _backend_of_group(self.device)
        self.collectives = COLLECTIVES.load("torch")(through)  # type: ignore[call-arg]
        self._store = self._store or default_store()
        own_rank(self.environment)
        atexit.unregister(_destroy_at_exit)
        atexit.register(_destroy_at_exit)
        HangWatch.start(self.collectives.rank, self.collectives.world_size)

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, DistributedType]:
        """Return the communication backend and the type of a distributed run here.

        Libraries read them before they start one.

        Raises:
            ConfigurationError: SageMaker's own data parallelism was asked for, which needs its library.
        """
        if sagemaker_dp:
            raise ConfigurationError("sagemaker_dp=True is not available. Leave it out: torch's own backends are used.")
        device = detect_device(cpu=cpu)
        if detect_environment().world_size == 1:
            return backend, DistributedType.NO
        return backend or device.collective_backend, device.distributed_type

    @property
    def has_reconnected(self) -> bool:
        """True if the process group is not the first one: what a library keeps of the first one cannot be used."""
        return self._times_destroyed > 0

    @property
    def default_device(self) -> torch.device:
        """The device that a single process would use on this machine."""
        return self.device_backend.device(0)

    def set_device(self) -> None:
        """Make this process's device the current one, so that allocations without an index use it."""
        self.device_backend.set_current(self.device)

    def wait_for_everyone(self) -> None:
        """Wait until every process has reached this call; returns at once in a single process.

        Raises:
            CollectiveTimeoutError: a rank did not arrive; the message says which, and where the others wait.
        """
        self.collectives.barrier()

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy a process group.

        Args:
            group: the group; by default all groups.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return
        if group is not None:
            dist.destroy_process_group(group)
        else:
            HangWatch.stop()
            self.collectives.shutdown()
            release_rank()

    def reconnect(self, **kwargs: Any) -> None:
        """Create the process group again if it was destroyed, as by the end of training. Every rank must call it.

        Args:
            **kwargs: for ``torch.distributed.init_process_group``.
        """
        if self._store is None or is_joined():
            return
        self._times_destroyed += 1
        # The keys of the groups before are still in the store, with addresses where nothing listens.
        store = dist.PrefixStore(f"accel_{self._times_destroyed}", self._store)
        options = {name: value for name, value in kwargs.items() if name != "init_method"}
        _init_process_group(self.environment, {**options, "store": store}, self.device_backend, self.device)
        self._use_group()

    def __repr__(self) -> str:
        return self._describe(self.distributed_type)

    def _describe(self, distributed_type: DistributedType) -> str:
        return (
            f"Distributed environment: {distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )


def _refuse_a_later_group() -> None:
    """Refuse a process group of several ranks that was created after the state of a single process."""
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    raise ConfigurationError(
        f"this process is rank {dist.get_rank()} of {dist.get_world_size()} of a process group that was created "
        "after its PartialState, which is that of a single process. Create the group first (with Lightning: use "
        "PartialState after fabric.launch(), or in the hooks of a module)."
    )


def _device(backend: Device, local_rank: int) -> torch.device:
    """ACCELERATE_TORCH_DEVICE, the device of the process group, the one that the script chose, or by local rank."""
    forced = env.read_str("ACCELERATE_TORCH_DEVICE")
    if forced:
        return torch.device(forced)
    bound = _bound_device() if is_joined() else None
    if bound is not None and bound.type == backend.name and bound.index is not None:
        return bound
    return backend.chosen() or backend.device(local_rank)


def _bound_device() -> torch.device | None:
    group = dist.group.WORLD
    device: torch.device | None = None if group is None else group.bound_device_id
    return device


def _backend_of_group(device: torch.device) -> tuple[str, torch.device]:
    """Return the name of the group's backend, and the device whose tensors it moves."""
    name: str = dist.get_backend()
    if name == "undefined":
        # A group made without a backend has one for each type of device.
        pairs = (entry.split(":") for entry in dist.get_backend_config().split(","))
        by_device = dict(pairs)
        name = by_device.get(device.type) or by_device["cpu"]
    # gloo and mpi communicate through host memory, whatever the compute device.
    return name, torch.device("cpu") if name in ("gloo", "mpi") else device


def _init_process_group(
    environment: Environment, kwargs: dict[str, Any], backend: Device, device: torch.device | None
) -> None:
    """Create torch's group. ``device`` is what to bind it to; None if that is not known yet."""
    kwargs = dict(kwargs)
    if not dist.is_available():
        raise ConfigurationError(
            f"this process is rank {environment.rank} of {environment.world_size}, but this build of torch has no "
            "torch.distributed. Install one that has, or start a single process."
        )
    kwargs.setdefault("backend", backend.collective_backend)
    if isinstance(kwargs.get("timeout"), (int, float)):
        kwargs["timeout"] = timedelta(seconds=kwargs["timeout"])
    # torch's env:// needs the variables of torchrun.
    has_variables = environment.name == "torchrun" and environment.main_address and environment.main_port
    if not kwargs.keys() & {"init_method", "store"} and not has_variables:
        kwargs["init_method"] = _init_method(environment)
    if has_variables and not kwargs.keys() & {"init_method", "store"} and _serves_loopback(environment):
        kwargs["store"] = _loopback_store(environment, kwargs.get("timeout"))
    if kwargs.get("init_method") or "store" in kwargs:
        kwargs.update(rank=environment.rank, world_size=environment.world_size)
    if device is not None:
        kwargs.update(backend.process_group_options(device))
    dist.init_process_group(**kwargs)


def _init_method(environment: Environment) -> str:
    """Return the rendezvous address, for launchers that do not set torch's variables."""
    if environment.main_address is None or environment.main_port is None:
        raise ConfigurationError(
            f"{environment.name} started {environment.world_size} processes, but the address of rank 0 is unknown. Set "
            "MASTER_ADDR to its host name and MASTER_PORT to a free port on it, on every process."
        )
    return f"tcp://{environment.main_address}:{environment.main_port}"


def _serves_loopback(environment: Environment) -> bool:
    """Return True if rank 0 serves the store of processes that are all on this machine.

    Launchers such as torchrun serve it themselves.
    """
    served = env.parse_flag_from_env("TORCHELASTIC_USE_AGENT_STORE")
    return not served and is_loopback(str(environment.main_address))


def _loopback_store(environment: Environment, timeout: timedelta | None) -> dist.Store:
    """Return the store of these processes. torch's own would listen at all addresses of this machine."""
    host, port = str(environment.main_address), int(environment.main_port or 0)
    timeout = timeout or _STORE_TIMEOUT
    if environment.rank == 0:
        store = serve_store(host, port, timeout)
    else:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore("accel/process_group", store)


def _destroy_at_exit() -> None:
    """Destroy the process group before the interpreter exits, so that gloo's threads have ended by then.

    They need the GIL to release tensors, and an interpreter that exits ends a thread that waits for it, which aborts
    the process. The threads end with the last reference to the group. After an error they are left alone: what this
    rank still sends or receives may never complete, and they end after that.
    """
    HangWatch.stop()
    if not dist.is_available():
        return
    gc.collect()
    if hasattr(sys, "last_value"):
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    for item in gc.get_objects():
        if issubclass(type(item), DistributedDataParallel):
            # Before the groups: the last of Python's references ends the threads without the GIL.
            item.__dict__.update(logger=None, reducer=None, process_group=None, process_group_backend=None)
    groups = list(map(weakref.ref, {*process_groups(), *known_groups()}))  # also those that were destroyed
    if dist.is_initialized():
        dist.destroy_process_group()
    if any(group() is not None for group in groups):
        _release_groups()


def _release_groups() -> None:
    """Drop what objects and functions still hold of process groups."""
    for item in gc.get_objects():
        if type(item) is FunctionType and item.__defaults__ and any(map(_is_group, item.__defaults__)):
            # torch itself has `def broadcast(tensor, src, group=group.WORLD)`, in modules that it imports late.
            item.__defaults__ = tuple(None if _is_group(one) else one for one in item.__defaults__)
        for held in (item, *gc.get_referents(item)):
            # The collector does not list dictionaries of process groups only, nor those of most objects.
            if type(held) is dict and (held is item or not gc.is_tracked(held)):
                _release(held)
        if any(map(_is_group, gc.get_referents(item))) and hasattr(item, "__dict__"):
            _release(item.__dict__)


def _release(held: Any) -> None:
    if type(held) is dict:
        held.update((name, None) for name, value in list(held.items()) if _is_group(value))


def _is_group(item: object) -> bool:
    return issubclass(type(item), dist.ProcessGroup)  # isinstance runs code of proxies


def wait_for_everyone() -> None:
    """Wait until every process has reached this call; returns at once in a single process."""
    PartialState().wait_for_everyone()
