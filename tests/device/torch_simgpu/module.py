"""``torch.simgpu``: the functions of ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Event as Event
from torch import Stream as Stream

_ops = torch.ops.simgpu
_COUNTERS = (
    "queued",
    "late",
    "snapshots",
    "waits",
    "early_frees",
    "pinned_kept",
    "blocks_kept",
    "blocking",
    "host_to_device",
    "device_to_host",
    "device_to_device",
)


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return bool(_ops.is_used())


def _is_in_bad_fork() -> bool:
    return bool(_ops.is_in_bad_fork())


def _lazy_init() -> None:
    """Nothing to start: memory is reserved by the first tensor."""


def device_count() -> int:
    return int(_ops.device_count())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


class device:
    """Makes a device the current one for a block."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.before)


class Properties:
    def __init__(self, index: int) -> None:
        self.name, self.total_memory = f"Simulated GPU {index}", _ops.stats(index)[2]


def get_device_properties(device: Any = None) -> Properties:
    return Properties(_index(device))


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


class StreamContext:
    """Makes a stream the current one for a block; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.device = current_device()
            self.before = current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self.before)
            set_device(self.device)


stream = StreamContext


def memory_allocated(device: Any = None) -> int:
    return int(_ops.stats(_index(device))[0])


def max_memory_allocated(device: Any = None) -> int:
    return int(_ops.stats(_index(device))[1])


def memory_stats(device: Any = None) -> dict[str, int]:
    """As torch.cuda: active bytes include blocks that were freed and are still in use by a stream."""
    allocated, peak, *_, active, active_peak = _ops.stats(_index(device))
    return {
        "allocated_bytes.all.current": allocated,
        "allocated_bytes.all.peak": peak,
        "active_bytes.all.current": active,
        "active_bytes.all.peak": active_peak,
    }


def memory_reserved(device: Any = None) -> int:
    return int(_ops.stats(_index(device))[3])


def reset_peak_memory_stats(device: Any = None) -> None:
    _ops.reset_peak(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    used, _, limit, *_ = _ops.stats(_index(device))
    return limit - used, limit


def empty_cache() -> None:
    _ops.empty_cache()


def set_memory_limit(limit: int, device: Any = None) -> None:
    """Give a device this many bytes."""
    _ops.set_limit(_index(device), limit)


def failed_allocations(device: Any = None) -> int:
    return int(_ops.stats(_index(device))[4])


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _ops.get_rng(_index(device))


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    _ops.set_rng(_index(device), new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Sequence[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number, which is what an operator takes."""
    return (seed + 2**63) % 2**64 - 2**63


def manual_seed(seed: int) -> None:
    _ops.seed(current_device(), _signed(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _ops.seed(index, _signed(seed))


def counters() -> dict[str, int]:
    """What happened so far: late copies, waits, blocking copies and more."""
    return dict(zip(_COUNTERS, _ops.counts(), strict=True))


def queued_copies() -> int:
    """Copies that have not been carried out."""
    return int(_ops.queued())


def races() -> list[str]:
    """The accesses that nothing orders, and the blocks freed too early, since the start or :func:`clear_races`."""
    return list(_ops.races())


def clear_races() -> None:
    _ops.clear_races()


def set_late(on: bool) -> None:
    """Whether copies that may be late are."""
    _ops.set_late(on)
