"""For tests: runs Megatron-core, which is written for CUDA devices, on CPU ranks with gloo.

:func:`cuda_on_cpu` replaces names of torch and of Megatron-core for the rest of the process. Nothing in this package
imports this module.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_installed: list[TorchFunctionMode] = []


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


class _CurrentDevice(str):
    """The CPU as an argument of torch's functions, and the first device in a name such as "cuda:0"."""

    def __format__(self, spec: str) -> str:
        return "0"


class _OnCpu(TorchFunctionMode):
    """Creates tensors that are asked for on a CUDA device on the CPU, and reports their types as CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.cpu:  # a copy, as from a device
            copied: torch.Tensor = func(*args, **kwargs).clone()
            copied._on_host = True  # type: ignore[attr-defined]
            return copied
        if func == _IS_CUDA and self._in_offloading():
            return not getattr(args[0], "_on_host", False)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs.get("dtype"):
            return _TYPES.get(args[0].dtype) or func(*args, **kwargs)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*(_CPU if _is_cuda(value) else value for value in args), **kwargs)

    @staticmethod
    def _in_offloading() -> bool:
        return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.core.optimizer.cpu_offloading")


class _Stream:
    """A stream, an event, or their context manager, without an effect."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None

    def query(self) -> bool:
        """Return a CPU operation has ended when its call returns."""
        return True

    def wait_stream(self, *_: Any) -> None:
        """Nothing to wait for."""

    wait_event = wait = synchronize = record = wait_stream

    def record_event(self, event: Any = None) -> _Stream:
        """Return an event that has happened."""
        return _Stream()


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _stream(*_: Any, **__: Any) -> _Stream:
    return _Stream()


def _not_coalesced(*_: Any, **__: Any) -> contextlib.AbstractContextManager[_Stream]:
    return contextlib.nullcontext(_Stream())


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _plain_compile(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _plain_compile


def replacements() -> list[tuple[Any, str, Any]]:
    """Return every name that is replaced: its module, its name, and the replacement."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp_buffers
    from megatron.core.inference import communication_utils
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    pipeline = fsdp_buffers.AllGatherPipeline
    start_gather = pipeline.async_bucket_gather

    def gather(gathers: Any, bucket_id: int, bwd: bool) -> None:
        # FSDP's collectives one after the other, each to its end: in one of some dozen test runs, the heap of a rank
        # was corrupted where gloo ran several as one, in the background.
        start_gather(gathers, bucket_id, bwd)
        started = gathers.param_gather_event_map.get(gathers.get_bucket_key(bucket_id, bwd))
        if started is not None:  # None: the bucket had been gathered before
            started[0].wait()

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    cuda = torch.cuda
    return [
        *((cuda, name, _nothing) for name in ("synchronize", "empty_cache", "set_device", "init", "manual_seed_all")),
        (cuda, "current_device", lambda: _CurrentDevice("cpu")),
        (cuda, "device_count", lambda: 1),
        *((cuda, name, _Stream) for name in ("Stream", "Event", "stream", "device")),
        *((cuda, name, _stream) for name in ("current_stream", "default_stream")),
        *((cuda.nvtx, name, _nothing) for name in ("range_push", "range_pop")),
        *((module, "get_rng_state", _get_rng_state) for module in (cuda, cuda.random)),
        *((module, "set_rng_state", _set_rng_state) for module in (cuda, cuda.random)),
        *((module, "manual_seed", _seed) for module in (cuda, cuda.random)),
        (random, "_get_cuda_rng_state", _get_rng_state),
        (random, "_set_cuda_rng_state", _set_rng_state),
        (token_dispatcher, "maybe_move_tensor_to_cpu", to_host),
        (communication_utils, "_is_cuda", _nothing),
        (fsdp_buffers, "_coalescing_manager", _not_coalesced),
        (pipeline, "async_bucket_gather", gather),
    ]


def import_core() -> list[tuple[Any, str, Any]]:
    """Import Megatron-core without compiling its functions, which it does when it is imported; :func:`replacements`."""
    import torch._dynamo  # must be imported before names of torch.cuda are replaced

    compile_function, torch.compile = torch.compile, _plain_compile  # type: ignore[assignment]
    try:
        return replacements()
    finally:
        torch.compile = compile_function


def cuda_on_cpu() -> None:
    """Let Megatron-core run on the CPU in this process. Call it once, before anything else imports megatron.core."""
    if _installed:
        return
    for module, name, value in import_core():
        if not hasattr(module, name):
            where = module.__name__ if isinstance(module, ModuleType) else repr(module)
            raise AttributeError(f"{where}.{name} no longer exists: adapt accel_megatron.testing")
        setattr(module, name, value)
    from . import runtime

    runtime.DEVICES.add("cpu")
    mode = _OnCpu()
    mode.__enter__()
    _installed.append(mode)
