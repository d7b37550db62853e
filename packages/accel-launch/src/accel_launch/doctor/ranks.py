"""What every process of ``accel doctor`` runs: the checks that need several of them. Started by the launcher, as a
module.

Rank 0 of each machine prints what was found, as one marked line for the doctor that started it.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accel_state import PartialState
from accel_state.env import read_int

from .machine import CHECKS, versions
from .protocol import FINDINGS_MARK, STAGE_MARK, TIMEOUT_VARIABLE
from .result import Finding, fail, ok, run_check, warn

MIB = 2**20
_SIZES = (1, 1000, 300_001)
_BANDWIDTH_BYTES = 8 * MIB
_REPEATS = 3
_PINGS = 5
_SKEW_WARNING_SECONDS = 1.0
_SKEW_FAILURE_SECONDS = 60.0
_NETWORK_ADVICE = (
    "Let the machines reach one another on all ports of the interface that they share, and name it: GLOO_SOCKET_IFNAME "
    "(NCCL_SOCKET_IFNAME for GPUs)."
)


def main() -> None:
    """Meet, check, and tell what was found."""
    seconds = read_int(TIMEOUT_VARIABLE) or 30
    _stage("starting")
    state = PartialState(timeout=timedelta(seconds=seconds))
    _stage("met the others")
    findings = [finding for subject, check in _checks(state) for finding in run_check(subject, check)]
    everywhere: list[Any] = [None] * state.num_processes
    if state.num_processes > 1:
        dist.all_gather_object(everywhere, [asdict(finding) for finding in findings])
    else:
        everywhere = [[asdict(finding) for finding in findings]]
    _stage("done")
    if state.is_local_main_process:
        print(FINDINGS_MARK + json.dumps(_merge(everywhere)), flush=True)
    state.destroy_process_group()


def _checks(state: PartialState) -> Iterator[tuple[str, Any]]:
    yield "machine", lambda: _machine(state)
    yield "meeting", lambda: _meeting(state)
    yield "versions", lambda: _same_versions(state)
    yield "all-reduce", lambda: _all_reduce(state)
    yield "point to point", lambda: _point_to_point(state)
    yield "clocks", lambda: _clocks(state)


def _merge(everywhere: list[list[dict[str, str]]]) -> list[dict[str, str]]:
    """Rank 0's findings, then what only others found to be wrong."""
    merged = list(everywhere[0])
    for findings in everywhere[1:]:
        merged += [finding for finding in findings if finding["state"] != "ok" and finding not in merged]
    return merged


def _stage(name: str) -> None:
    print(f"{STAGE_MARK}{read_int('RANK') or 0} {name}", flush=True)


def _machine(state: PartialState) -> Iterator[Finding]:
    """The checks of this machine, where it is not the one that prints them all anyway."""
    _stage("checks of its machine")
    if not state.is_local_main_process or state.is_main_process:
        return
    host = socket.gethostname()
    for subject, check in CHECKS:
        for finding in run_check(subject, check):
            # A launcher did set the variables of a rank here.
            if finding.state != "ok" and finding.subject != "variables":
                yield Finding(f"{finding.subject}", finding.state, f"on {host}: {finding.text}", finding.advice)


def _meeting(state: PartialState) -> Iterator[Finding]:
    hosts: list[Any] = [socket.gethostname()]
    if state.num_processes > 1:
        hosts = [None] * state.num_processes
        dist.all_gather_object(hosts, socket.gethostname())
    if state.is_main_process:
        names = list(dict.fromkeys(hosts))
        yield ok(
            "meeting",
            f"{state.num_processes} process(es) on {', '.join(names)} over {state.backend or 'no backend'}, "
            f"{state.device.type}",
        )


def _same_versions(state: PartialState) -> Iterator[Finding]:
    """One torch that differs from the others' makes collectives hang or tensors differ."""
    _stage("comparing versions")
    if state.num_processes == 1:
        return
    everywhere: list[Any] = [None] * state.num_processes
    dist.all_gather_object(everywhere, (socket.gethostname(), versions()))
    for name in everywhere[0][1] if state.is_main_process else ():
        found = {found[name]: host for host, found in everywhere}
        if len(found) > 1:
            text = "; ".join(f"{name} {version or 'missing'} on {host}" for version, host in found.items())
            yield fail("versions", text, f"Install the same {name} on all machines.")


def _all_reduce(state: PartialState) -> Iterator[Finding]:
    """Sums of integers, which are exact in any order."""
    _stage("all-reduce")
    if state.num_processes == 1:
        yield ok("all-reduce", "one process: nothing to reduce")
        return
    wrong = [size for size in _SIZES if not _reduces(state, size)]
    if wrong:
        yield fail(
            "all-reduce",
            f"wrong sums for {wrong} elements on rank {state.process_index}",
            "See the log of the collective library: NCCL_DEBUG=INFO.",
        )
        return
    data = torch.zeros(_BANDWIDTH_BYTES // 4, device=state.device)
    seconds = _median_seconds(state, lambda: dist.all_reduce(data))
    # What each process sends in a ring: twice its share of all but one.
    moved = 2 * (state.num_processes - 1) / state.num_processes * _BANDWIDTH_BYTES
    if state.is_main_process:
        yield ok("all-reduce", f"right; {moved / seconds / MIB:.0f} MiB/s a process for {_BANDWIDTH_BYTES // MIB} MiB")


def _reduces(state: PartialState, size: int) -> bool:
    value = (torch.arange(size, device=state.device) % 97 + state.process_index).to(torch.float32)
    expected = (torch.arange(size, device=state.device) % 97).to(torch.float32) * state.num_processes + sum(
        range(state.num_processes)
    )
    dist.all_reduce(value)
    return torch.equal(value, expected)


def _point_to_point(state: PartialState) -> Iterator[Finding]:
    """Each process sends to the next one in a ring."""
    _stage("point to point")
    if state.num_processes == 1:
        return
    rank, world = state.process_index, state.num_processes
    sent = torch.full((_BANDWIDTH_BYTES // 4,), float(rank), device=state.device)
    received = torch.empty_like(sent)

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % world),
            dist.P2POp(dist.irecv, received, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    seconds = _median_seconds(state, exchange)
    if not bool((received == (rank - 1) % world).all()):
        yield fail(
            "point to point", f"what rank {(rank - 1) % world} sent arrived changed at rank {rank}", _NETWORK_ADVICE
        )
    elif state.is_main_process:
        yield ok("point to point", f"right; {_BANDWIDTH_BYTES / seconds / MIB:.0f} MiB/s each way round a ring")


def _median_seconds(state: PartialState, action: Any) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        action()
        if state.device.type != "cpu":
            torch.accelerator.synchronize() if hasattr(torch, "accelerator") else None
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])  # the first one makes connections


def _clocks(state: PartialState) -> Iterator[Finding]:
    """How far the clock of each other machine is from rank 0's, by messages there and back, the fastest of which says
    it best.
    """
    _stage("comparing clocks")
    worst = 0.0
    for other in range(1, state.num_processes):
        skew = _skew(state, other)
        if state.is_main_process and abs(skew) > abs(worst):
            worst = skew
    if not state.is_main_process or state.num_processes == 1:
        return
    text, advice = (
        f"{abs(worst) * 1000:.1f} ms apart at most",
        "Have all machines follow one time server: apt install chrony.",
    )
    if abs(worst) > _SKEW_FAILURE_SECONDS:
        yield fail("clocks", text, advice)
    elif abs(worst) > _SKEW_WARNING_SECONDS:
        yield warn("clocks", text, advice)
    else:
        yield ok("clocks", text)


def _skew(state: PartialState, other: int) -> float:
    """Seconds that the clock of another rank is ahead, on rank 0; 0 elsewhere."""
    stamp = torch.zeros(1, dtype=torch.float64, device=state.device)
    best, skew = float("inf"), 0.0
    for _ in range(_PINGS if state.process_index in (0, other) else 0):
        if state.process_index == other:
            dist.recv(stamp, 0)
            stamp.fill_(time.time())
            dist.send(stamp, 0)
            continue
        begin = time.time()
        dist.send(stamp, other)
        dist.recv(stamp, other)
        there, end = stamp.item(), time.time()
        if end - begin < best:
            best, skew = end - begin, there - (begin + end) / 2
    return skew


if __name__ == "__main__":
    main()
