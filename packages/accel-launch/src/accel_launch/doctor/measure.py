"""What the devices of a run can do, measured by all ranks at once, as a profile for ``accel plan --hardware FILE``.

Ranks that share cores or a bus share them here as they do in training. Each number is that of the slowest rank, because
a step waits for it.
"""

from __future__ import annotations

import datetime
import itertools
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from accel_state import PartialState, devices
from accel_state.env import read_int
from accel_state.hardware import Curve, HardwareProfile, read_profile, write_profile

from .curves import DTYPES, alone_speedup, computation_curves, message_curves
from .result import CheckResult, fail, ok, warn
from .stopwatch import barrier, crowding, median_computed, median_of, median_seconds, slowest, synchronize

GIB = 2**30
# Sides of matrices; larger ones are tried until a product takes so long. Some CPUs need that for small ones of 16 bits.
_SIDES = (256, 512, 1024, 2048, 4096, 8192)
_LONG_ENOUGH_SECONDS = 0.02
_COPIED = {"cpu": 64 * 2**20}  # larger than the caches
_OTHER_COPIED = 512 * 2**20
_SENT = {"cpu": 16 * 2**20}
_OTHER_SENT = 256 * 2**20
_STEPS, _LAYERS = 10, 16
_OPERATIONS = 6
"""Of a layer: an activation and a product, and their derivatives by inputs, weight and bias."""
_UNIT_CALLS, _UNIT_OPERATIONS = 3, 4
"""Of a unit of FSDP 2: two gathers and a reduction, and their operations: copies in and out, and an average."""
_ROUND_TRIPS = 50
_SWEPT, _SWEEPS = 2 << 20, 16
"""Bytes that are read and written between operations, more than a core's own caches have, and pairs of tensors."""


def measure(state: PartialState, paths: Sequence[str | None]) -> Iterator[CheckResult]:
    """Measure on all ranks, and write the profile on the machines that want one.

    Args:
        state: of this rank; the process group is initialised.
        paths: by rank, where it writes the profile; None for nowhere.
    """
    sizes: list[Any] = [None] * state.num_processes
    if state.num_processes > 1:
        dist.all_gather_object(sizes, read_int("LOCAL_WORLD_SIZE") or 1)
    if len(set(sizes)) > 1:
        text = f"not measured: the machines have {' and '.join(map(str, sorted(set(sizes))))} ranks"
        yield fail("profile", text, "A profile is of one kind of machine: run the doctor on those that are alike.")
        return
    flops, missing = _products(state)
    crowded = crowding(state, sizes[0] or 1)
    memory, operation = _memory_bandwidth(state), _operation_seconds(state, crowded)
    links = _Links(state, crowded)
    curves = computation_curves(state, list(flops), crowded) | links.curves
    source = f"measured by accel doctor on {datetime.date.today()}, torch {torch.__version__}, {links.ranks}"
    numbers: dict[str, Any] = {
        "names": (_name(state.device),),
        "memory_bytes": _memory_bytes(state, links.local),
        "memory_bandwidth": memory,
        "flops": flops,
        "link_bandwidth": links.bandwidth,
        "link_latency": links.latency,
        "network_bandwidth": links.network_bandwidth,
        "network_latency": links.network_latency,
        "message_seconds": links.message_seconds,
        "operation_seconds": operation,
        "unit_seconds": _unit_seconds(state, operation, crowded),
        "devices_per_node": links.local,
        "alone_speedup": alone_speedup(state),
        "curves": curves,
    }
    sources = {name: source for name in numbers if name != "names"}
    sources |= {name: f"not measured: {why}" for name, why in links.missing.items()}
    is_host = state.device.type == "cpu"
    # What a host computes, sends and prepares takes turns on its cores.
    found = HardwareProfile("", **numbers, sources=sources, measured=True, overlaps=not is_host)
    if path := paths[state.process_index]:
        write_profile(found, path)
        read_profile(path)  # as the plan will
    if not state.is_main_process:
        return
    yield ok("products", ", ".join(f"{name} {value / 1e12:.3g} TFLOP/s" for name, value in found.flops.items()))
    yield ok(
        "memory", f"{found.memory_bandwidth / GIB:.3g} GiB/s; an operation takes {1e6 * operation:.1f} us to start"
    )
    yield ok("links", links.text())
    if links.bandwidth is None:
        missing = {**missing, "link_bandwidth is": links.missing["link_bandwidth"]}
    for name, why in missing.items():
        yield warn("profile", f"{name} not in it: {why}", "Plans that need it say so.")
    for written in sorted(set(filter(None, paths))):
        machines = [str(rank // links.local) for rank, path in enumerate(paths) if path == written]
        where = f" on machine {', '.join(machines)}" if state.num_processes > links.local else ""
        yield ok("profile", f"{written}{where}, for accel plan --hardware")


# -- one device --------------------------------------------------------------------------------------------------------


def _products(state: PartialState) -> tuple[dict[str, float], dict[str, str]]:
    """FLOPs a second by type of number, and the reasons why others are missing."""
    found: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, make in _operands(state.device).items():
        reason = ""
        try:
            make(_SIDES[0])()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            reason = str(error).splitlines()[0]
        # The ranks stay together: if one cannot compute it, the others do not wait for it.
        if slowest(state, float(bool(reason))):
            missing[f"{name} products are"] = reason or "another rank cannot compute them"
            continue
        for side in _SIDES:
            seconds = slowest(state, median_seconds(state, make(side)))
            found[name] = max(found.get(name, 0.0), 2 * side**3 / seconds)
            if seconds > _LONG_ENOUGH_SECONDS:
                break
    return found, missing


def _operands(device: torch.device) -> dict[str, Callable[[int], Callable[[], Any]]]:
    """For each type of number, what makes a product of two matrices."""

    def plain(dtype: torch.dtype) -> Callable[[int], Callable[[], Any]]:
        def make(side: int) -> Callable[[], Any]:
            one, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            return lambda: one @ other

        return make

    kinds = {name: plain(dtype) for name, dtype in DTYPES.items()}
    if device.type != "cuda":
        return kinds

    def tf32(side: int) -> Callable[[], Any]:
        product = plain(torch.float32)(side)

        def run() -> None:
            with _tf32():
                product()

        return run

    def fp8(side: int) -> Callable[[], Any]:
        one, other = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        scale = torch.ones((), device=device)
        return lambda: torch._scaled_mm(one, other.t(), scale, scale, out_dtype=torch.bfloat16)

    return {**kinds, "tf32": tf32, "fp8": fp8}


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _memory_bandwidth(state: PartialState) -> float:
    """Bytes a second that an addition reads and writes."""
    count = _COPIED.get(state.device.type, _OTHER_COPIED) // 4
    one, other, result = (torch.ones(count, device=state.device) for _ in range(3))
    seconds = median_seconds(state, lambda: torch.add(one, other, out=result))
    return 3 * 4 * count / slowest(state, seconds)


def _operation_seconds(state: PartialState, crowded: float) -> float:
    """Seconds in which the host prepares an operation of a training step: Python, modules, and automatic derivatives.

    On a CPU, that is with what a tiny operation takes, and between operations that need its caches for themselves, as
    those of a step do.
    """
    if state.device.type == "cpu":
        return max(_swept_step(state, _swept_layers(state), crowded) / (_LAYERS * _OPERATIONS), 1e-9)
    layers: list[nn.Module] = [nn.Sequential(nn.SiLU(), nn.Linear(8, 8)) for _ in range(_LAYERS)]
    step = _step_of(nn.Sequential(*layers).to(state.device))
    for _ in range(3):
        step()
    synchronize(state.device)
    begin = time.perf_counter()
    for _ in range(_STEPS):
        step()  # an accelerator has not computed it yet
    seconds = (time.perf_counter() - begin) / (_STEPS * _LAYERS * _OPERATIONS)
    synchronize(state.device)
    return slowest(state, seconds)


def _unit_seconds(state: PartialState, operation: float, crowded: float) -> float:
    """Seconds in which a CPU gathers or reduces the parameters of a unit of FSDP 2, besides operations and messages."""
    if state.device.type != "cpu" or state.num_processes == 1:
        return 0.0  # where it overlaps, and without FSDP
    alone = [dist.new_group([rank]) for rank in range(state.num_processes)][state.process_index]
    mesh = DeviceMesh.from_group(alone, state.device.type)
    plain = _swept_step(state, _swept_layers(state), crowded)
    sharded = _swept_layers(state)
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    calls = _LAYERS * _UNIT_CALLS
    return max((_swept_step(state, sharded, crowded) - plain) / calls - _UNIT_OPERATIONS / _UNIT_CALLS * operation, 0.0)


def _swept_layers(state: PartialState) -> nn.Sequential:
    sweep = _Sweep(state.device)
    return nn.Sequential(*(nn.Sequential(nn.SiLU(), nn.Linear(8, 8), sweep) for _ in range(_LAYERS)))


def _swept_step(state: PartialState, model: nn.Sequential, crowded: float) -> float:
    """Seconds of the slowest rank's step besides those of the sweeps."""
    step = _step_of(model)
    for _ in range(3):
        step()
    sweep = _Sweep(state.device)

    def sweeps() -> None:
        for _ in range(2 * _LAYERS):
            sweep.run()

    barrier(state)
    swept, alone = (median_computed(state, action, _STEPS, crowded) for action in (step, sweeps))
    return slowest(state, swept - alone)


def _step_of(model: nn.Module) -> Callable[[], None]:
    inputs = torch.ones(8, 8, device=next(model.parameters()).device)

    def step() -> None:
        model(inputs).sum().backward()
        model.zero_grad()

    return step


class _Sweep(nn.Module):
    """Copies so much in the forward and in the backward pass that nothing else stays in a core's own caches."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        buffers = [[torch.ones(_SWEPT // 8, device=device) for _ in range(2)] for _ in range(_SWEEPS)]
        self.turns = itertools.cycle(buffers)

    def run(self) -> None:
        """Copy."""
        source, target = next(self.turns)
        target.copy_(source)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The value itself."""
        self.run()
        result = value.view_as(value)
        result.register_hook(lambda gradient: self.run())
        return result


def _memory_bytes(state: PartialState, local: int) -> int:
    """Memory of a device; of a host the share of a rank."""
    device = devices.get(state.device.type)
    total = device.memory_total(state.device.index or 0)
    return total // local if state.device.type == "cpu" else total


def _name(device: torch.device) -> str:
    module = devices.get(device.type).module
    if device.type != "cpu" and hasattr(module, "get_device_name"):
        return str(module.get_device_name(device))
    return f"{device.type} {platform.machine()}"


# -- links -------------------------------------------------------------------------------------------------------------


class _Links:
    """Links between the devices of a node, and the network between nodes.

    Attributes:
        local: ranks of a node.
        bandwidth: see :class:`HardwareProfile`; None with a rank a node.
        latency: as there.
        network_bandwidth: as there; None on one node.
        network_latency: as there.
        message_seconds: as there.
        curves: of messages in a node, as there.
        missing: reasons by name of what could not be measured.
    """

    def __init__(self, state: PartialState, crowded: float) -> None:
        world, self.local = state.num_processes, read_int("LOCAL_WORLD_SIZE") or 1
        nodes = world // self.local
        self.ranks = f"{world} rank{'s' if world > 1 else ''} on {nodes} machine{'s' if nodes > 1 else ''}"
        self.bandwidth: float | None = None
        self.network_bandwidth: float | None = None
        # Of what is missing: plans ask for the bandwidth before they use these.
        self.latency = self.network_latency = self.message_seconds = 1e-9
        self.curves: dict[str, Curve] = {}
        self.missing: dict[str, str] = {}
        if self.local > 1:
            group = _own_group(state, self.local)
            first = state.process_index // self.local * self.local
            self.latency = _one_way(state, first, first + 1)
            self.message_seconds = _message(state, group, self.local, self.latency)
            self.bandwidth = _ring_bandwidth(state, group, self.local)
            self.curves = message_curves(state, group, self.local, crowded)
            for size in (size for size in range(2, self.local) if self.local % size == 0):
                curves = message_curves(state, _own_group(state, size), size, crowded)
                self.curves |= {f"{kind} of {size}": curve for kind, curve in curves.items()}
        else:
            self.missing |= dict.fromkeys(("link_bandwidth", "link_latency"), "there is a single rank on each machine")
        if nodes > 1:
            self.network_latency = _one_way(state, 0, self.local)
            if self.local == 1:
                self.message_seconds = _message(state, None, world, self.network_latency)
            self.network_bandwidth = _ring_bandwidth(state, None, world) / self.local
        else:
            self.missing |= dict.fromkeys(("network_bandwidth", "network_latency"), "there is a single machine")
        if world == 1:
            self.missing["message_seconds"] = "there is a single rank"

    def text(self) -> str:
        """The numbers in a sentence."""
        parts = [
            f"{name} {rate / GIB:.3g} GiB/s, {1e6 * latency:.0f} us"
            for name, rate, latency in (
                ("in a node", self.bandwidth, self.latency),
                ("between nodes", self.network_bandwidth, self.network_latency),
            )
            if rate is not None
        ]
        return "; ".join([*parts, f"a message {1e6 * self.message_seconds:.0f} us"]) if parts else "none"


def _own_group(state: PartialState, size: int) -> Any:
    """This rank's group, of those of so many consecutive ranks."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, state.num_processes, size)]
    return groups[state.process_index // size]


def _one_way(state: PartialState, one: int, other: int) -> float:
    """Seconds of an empty message from one rank to another; of all pairs that are asked for at once, the slowest."""
    ping, seconds = torch.zeros(1, device=state.device), 0.0

    def there_and_back() -> None:
        for send in (state.process_index == one, state.process_index == other):
            partner = other if state.process_index == one else one
            (dist.send if send else dist.recv)(ping, partner)

    if state.process_index in (one, other):
        there_and_back()  # connects
        seconds = median_of(state, there_and_back, _ROUND_TRIPS) / 2
    return slowest(state, seconds)


def _message(state: PartialState, group: Any, ranks: int, latency: float) -> float:
    """Seconds of a collective besides its steps: what an all-reduce of one number takes beyond them."""
    value = torch.zeros(1, device=state.device)
    dist.all_reduce(value, group=group)
    seconds = median_of(state, lambda: dist.all_reduce(value, group=group), _ROUND_TRIPS)
    return max(slowest(state, seconds) - 2 * (ranks - 1) * latency, 1e-9)


def _ring_bandwidth(state: PartialState, group: Any, ranks: int) -> float:
    """Bytes a second that each rank sends in an all-reduce of a large tensor."""
    size = _SENT.get(state.device.type, _OTHER_SENT)
    data = torch.zeros(size // 4, device=state.device)
    seconds = median_seconds(state, lambda: dist.all_reduce(data, group=group))
    return 2 * (ranks - 1) / ranks * size / slowest(state, seconds)
