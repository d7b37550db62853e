"""Eight programs that are wrong on a GPU and eight that are right. Each returns whether its numbers came out right."""

from __future__ import annotations

import torch

DEVICE = torch.device("simgpu", 0)
N = 1 << 12


def _pinned(value: float) -> torch.Tensor:
    return torch.full((N,), value).pin_memory()


def _on_device(value: float) -> torch.Tensor:
    return torch.full((N,), value, device=DEVICE)


def _is(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor.cpu() == value).all())


def _main() -> torch.Stream:
    return torch.simgpu.current_stream(DEVICE)


def wrong_reads_copy_to_host_too_early() -> bool:
    host = torch.empty(N, pin_memory=True).copy_(_on_device(3), non_blocking=True)
    return _is(host, 3)


def wrong_overwrites_pinned_source() -> bool:
    host = _pinned(1)
    x = host.to(DEVICE, non_blocking=True)
    host.fill_(2)
    return _is(x, 1)


def wrong_uses_side_stream_without_waiting() -> bool:
    side, host = torch.Stream(DEVICE), _pinned(5)
    with torch.simgpu.stream(side):
        x = host.to(DEVICE, non_blocking=True)
    return _is(x * 1, 5)


def wrong_frees_without_record_stream() -> bool:
    side, x, host = torch.Stream(DEVICE), _on_device(4), torch.empty(N, pin_memory=True)
    side.wait_stream(_main())
    with torch.simgpu.stream(side):
        host.copy_(x, non_blocking=True)
    del x
    torch.zeros(N, device=DEVICE)
    side.synchronize()
    return _is(host, 4)


def wrong_records_event_before_copy() -> bool:
    side, host, event = torch.Stream(DEVICE), _pinned(6), torch.Event(DEVICE)
    with torch.simgpu.stream(side):
        event.record(side)
        x = host.to(DEVICE, non_blocking=True)
    _main().wait_event(event)
    return _is(x + 0, 6)


def wrong_frees_block_that_another_streams_kernel_reads() -> bool:
    side = torch.Stream(DEVICE)
    with torch.simgpu.stream(side):
        x = _on_device(1)
    _main().wait_stream(side)
    y = x * 2
    del x
    with torch.simgpu.stream(side):
        _on_device(9)
    return _is(y, 2)


def wrong_refills_double_buffer() -> bool:
    side, buffer, arrived = torch.Stream(DEVICE), torch.empty(N, pin_memory=True), []
    with torch.simgpu.stream(side):
        for value in range(3):
            buffer.fill_(value)
            arrived.append(buffer.to(DEVICE, non_blocking=True))
    _main().wait_stream(side)
    return all(_is(x, value) for value, x in enumerate(arrived))


def wrong_copies_to_another_device_before_the_write() -> bool:
    x, side = _on_device(7), torch.Stream(DEVICE)
    with torch.simgpu.stream(side):
        y = x.to(torch.device("simgpu", 1))
    return _is(y, 7)


def right_synchronizes_before_reading() -> bool:
    host = _on_device(3).to("cpu", non_blocking=True)
    torch.simgpu.synchronize()
    return _is(host, 3)


def right_waits_for_event_before_overwriting() -> bool:
    host, event = _pinned(1), torch.Event(DEVICE)
    x = host.to(DEVICE, non_blocking=True)
    event.record()
    event.synchronize()
    host.fill_(2)
    return _is(x, 1)


def right_waits_for_side_stream() -> bool:
    side, host = torch.Stream(DEVICE), _pinned(5)
    with torch.simgpu.stream(side):
        x = host.to(DEVICE, non_blocking=True)
    _main().wait_stream(side)
    x.record_stream(_main())
    return _is(x * 1, 5)


def right_records_stream_before_freeing() -> bool:
    side, x, host = torch.Stream(DEVICE), _on_device(4), torch.empty(N, pin_memory=True)
    side.wait_stream(_main())
    with torch.simgpu.stream(side):
        host.copy_(x, non_blocking=True)
    x.record_stream(side)
    del x
    torch.zeros(N, device=DEVICE)
    side.synchronize()
    return _is(host, 4)


def right_reuses_pageable_source_and_frees_pinned_one() -> bool:
    host = torch.full((N,), 1.0)
    x = host.to(DEVICE, non_blocking=True)
    host.fill_(2)
    y = _pinned(8).to(DEVICE, non_blocking=True)
    z = _pinned(9).to(DEVICE, non_blocking=True)
    return _is(x, 1) and _is(y, 8) and _is(z, 9)


def right_polls_until_the_event_is_done() -> bool:
    host, event, polls = _on_device(3).to("cpu", non_blocking=True), torch.Event(DEVICE), 0
    event.record()
    while not event.query():
        polls += 1
    return _is(host, 3) and polls == 3


def right_frees_source_of_copy_between_devices() -> bool:
    x = _on_device(7)
    y = x.to(torch.device("simgpu", 1), non_blocking=True)
    del x
    torch.zeros(N, device=DEVICE)
    return _is((y + 1).to(DEVICE), 8)


def right_frees_and_reuses_on_one_stream() -> bool:
    x = _on_device(4)
    host = torch.empty(N, pin_memory=True).copy_(x, non_blocking=True)
    del x
    torch.zeros(N, device=DEVICE)
    torch.simgpu.synchronize()
    return _is(host, 4)
