"""``simccl``: collectives of simulated GPUs, through gloo, on a stream of their own as NCCL has.

Operations wait for the stream they were called on, and their results arrive late: a program that uses one before
``wait()`` reads what was there before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

NAME = "simccl"


class SimWork(dist.Work):
    """A collective whose results arrive on the group's stream."""

    def __init__(self, tensors: Any, event: torch.Event | None) -> None:
        super().__init__()
        self._tensors, self._event = tensors, event
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        if self._event is not None:
            current = torch.simgpu.current_stream()
            current.wait_event(self._event)
            for tensor in flat(self._tensors):
                if tensor.device.type == "simgpu":
                    tensor.record_stream(current)
        return True

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        self.wait()  # a future's callbacks run at once, so what they read must be ordered
        return self._future

    def result(self) -> Any:
        return self._tensors


class SimGroup(dist.ProcessGroup):
    """A process group of simulated GPUs. Tensors on the CPU go to gloo as they are."""

    def __init__(self, rank: int, size: int, gloo: Any, name: str) -> None:
        super().__init__(rank, size)
        self._gloo, self._name = gloo, name
        self._streams: dict[int, torch.Stream] = {}
        self._set_group_name(name)

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("simgpu"), torch.device("cpu")]  # torch moves state dicts to the first one

    def _run(
        self, name: str, outputs: Any, inputs: Any, call: Callable[[Any, Any], Any], writes: bool = True
    ) -> SimWork:
        """``call`` with host copies of the tensors; ``inputs`` may be ``outputs``, which ``writes`` says is written."""
        tensors = [tensor for tensor in flat([outputs, inputs]) if tensor.device.type == "simgpu"]
        if not tensors:
            call(outputs, inputs).wait()
            return SimWork(outputs, None)
        index = torch.simgpu.current_device()
        for tensor in tensors:
            if tensor.device.index != index:  # NCCL fails or hangs
                raise RuntimeError(f"{NAME}: {name} got a tensor on {tensor.device}, but the current device is {index}")
        stream = self._side_stream(index)
        with torch.simgpu.stream(stream), torch.no_grad():
            on_host = to_host(outputs)
            call(on_host, on_host if inputs is outputs else to_host(inputs)).wait()
            for tensor, value in zip(flat(outputs), flat(on_host), strict=True) if writes else ():
                if tensor.device.type == "simgpu":
                    tensor.copy_(value.pin_memory(), non_blocking=True)
                    tensor.record_stream(stream)
                elif tensor is not value:
                    tensor.copy_(value)
            event = read_late(tensors, stream)
        return SimWork(outputs, event)

    def _side_stream(self, index: int) -> torch.Stream:
        """The group's stream of a device, behind the work of the current one."""
        if index not in self._streams:
            self._streams[index] = torch.Stream(torch.device("simgpu", index))
        self._streams[index].wait_stream(torch.simgpu.current_stream(index))
        return self._streams[index]

    def allreduce(self, tensors: Any, opts: Any = None) -> SimWork:
        return self._run("all_reduce", tensors, tensors, lambda out, _: self._gloo.allreduce(out, *some(opts)))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> SimWork:
        return self._run(
            "all_reduce", tensors, tensors, lambda out, _: self._gloo.allreduce_coalesced(out, *some(opts))
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> SimWork:
        receives = opts is None or opts.rootRank != self.rank()  # the root's tensor is only read
        return self._run("broadcast", tensors, tensors, lambda out, _: self._gloo.broadcast(out, *some(opts)), receives)

    def reduce(self, tensors: Any, opts: Any = None) -> SimWork:
        receives = opts is None or opts.rootRank == self.rank()
        return self._run("reduce", tensors, tensors, lambda out, _: self._gloo.reduce(out, *some(opts)), receives)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        return self._run(
            "all_gather", outputs, inputs, lambda out, given: self._gloo.allgather(out, given, *some(opts))
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        return self._run("gather", outputs, inputs, lambda out, given: self._gloo.gather(out, given, *some(opts)))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        return self._run("scatter", outputs, inputs, lambda out, given: self._gloo.scatter(out, given, *some(opts)))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        return self._run(
            "reduce_scatter", outputs, inputs, lambda out, given: self._gloo.reduce_scatter(out, given, *some(opts))
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        return self._run("all_to_all", outputs, inputs, lambda out, given: self._gloo.alltoall(out, given, *some(opts)))

    def alltoall_base(self, output: Any, given: Any, out_sizes: Any, in_sizes: Any, opts: Any = None) -> SimWork:
        def call(out: Any, source: Any) -> Any:
            return self._gloo.alltoall_base(out[0], source[0], out_sizes, in_sizes, *some(opts))

        return self._run("all_to_all", [output], [given], call)

    # torch 2.13 calls these by their second names.
    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> SimWork:
        single = getattr(self._gloo, "_allgather_base", None) or self._gloo.all_gather_single
        return self._run("all_gather", [output], [given], lambda out, source: single(out[0], source[0], *some(opts)))

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any = None) -> SimWork:
        single = getattr(self._gloo, "_reduce_scatter_base", None) or self._gloo.reduce_scatter_single
        return self._run(
            "reduce_scatter", [output], [given], lambda out, source: single(out[0], source[0], *some(opts))
        )

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> SimWork:
        return self._allgather_base(output, given, opts)

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> SimWork:
        return self._reduce_scatter_base(output, given, opts)

    # What torch's functional collectives call. The last of several on one stream is done after the others.
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        return [self._allgather_base(output, given) for output, given in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        works = [self._reduce_scatter_base(output, given, opts) for output, given in zip(outputs, inputs, strict=True)]
        return works[-1]

    def all_to_all_single(self, output: Any, given: Any, out_sizes: Any, in_sizes: Any, opts: Any = None) -> SimWork:
        return self.alltoall_base(output, given, out_sizes, in_sizes, opts)

    def barrier(self, opts: Any = None) -> Any:
        torch.simgpu.synchronize()
        return self._gloo.barrier(*some(opts))

    # Both return at once, so that ranks can send to one another.
    def send(self, tensors: Any, destination: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        if tensor.device.type != "simgpu":
            return self._gloo.send(tensors, destination, tag)
        stream = self._side_stream(tensor.device.index)
        with torch.simgpu.stream(stream), torch.no_grad():
            inner = self._gloo.send(to_host(tensors), destination, tag)
            event = read_late(tensors, stream)
        return Exchange(inner, [], [], event)

    def recv(self, tensors: Any, source: int, tag: int) -> dist.Work:
        on_host = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        return Exchange(self._gloo.recv(on_host, source, tag), tensors, on_host)


class Exchange(dist.Work):
    """A message between two ranks. What is received is on its device, and what is sent may change, after ``wait``."""

    def __init__(
        self,
        inner: dist.Work,
        tensors: list[torch.Tensor],
        on_host: list[torch.Tensor],
        sent: torch.Event | None = None,
    ) -> None:
        super().__init__()
        self._inner, self._tensors, self._on_host, self._sent = inner, tensors, on_host, sent

    def wait(self, timeout: Any = None) -> bool:
        self._inner.wait()
        if self._sent is not None:
            torch.simgpu.current_stream().wait_event(self._sent)
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._on_host, strict=True):
                tensor.copy_(value)
        return True

    def is_completed(self) -> bool:
        return self._inner.is_completed()


def read_late(tensors: list[torch.Tensor], stream: torch.Stream) -> torch.Event:
    """Let the current stream, that of a group, read tensors once more: their values are not known to be read before.

    Otherwise a program that changes one before ``wait()`` would do no harm: the copy for gloo has waited for it.
    """
    for tensor in tensors:
        tensor.detach().as_strided((0,), (1,)).view(torch.uint8).sum()  # of any dtype
        tensor.record_stream(stream)
    return stream.record_event()


def flat(values: Any) -> list[torch.Tensor]:
    """The tensors in nested lists."""
    if not isinstance(values, (list, tuple)):
        return [values]
    return [tensor for value in values for tensor in flat(value)]


def to_host(values: Any) -> Any:
    """Nested lists of tensors, on the CPU."""
    return [to_host(value) for value in values] if isinstance(values, (list, tuple)) else values.cpu()


def register() -> None:
    """Make the backend known to torch.distributed."""

    def create(options: Any, _: Any) -> SimGroup:
        gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        return SimGroup(options.group_rank, options.group_size, gloo, options.group_id)

    if dist.is_available() and not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["simgpu", "cpu"])


def some(options: Any) -> tuple[Any, ...]:
    """Options as further arguments: none, if there are none."""
    return () if options is None else (options,)
