"""The checks of ``accel doctor`` that need several processes; the launcher runs this module in each of them.

Local rank 0 of each machine prints the results as one marked line for the doctor that started it.
"""

from __future__ import annotations

import itertools
import json
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accel_state import PartialState
from accel_state.env import read_int

from ..remedies import NETWORK
from .machine import CHECKS, versions
from .result import RESULTS_MARK, STAGE_MARK, TIMEOUT_VARIABLE, CheckResult, fail, ok, run_check, warn

MIB = 2**20
_SIZES = (1, 1000, 300_001)
_BANDWIDTH_BYTES = 8 * MIB
_REPEATS = 3
_PINGS = 5
_SKEW_WARNING_SECONDS = 1.0
_SKEW_FAILURE_SECONDS = 60.0
_ROUND_TRIPS = 20
# So many pairs of machines are listed; of more, their range and the slowest.
_LISTED_PAIRS = 10
_SLOW_PAIR = 0.5


def main() -> None:
    """Initialise the process group, run the checks, and print the results."""
    seconds = read_int(TIMEOUT_VARIABLE) or 30
    _stage("starting")
    state = PartialState(timeout=timedelta(seconds=seconds))
    _stage("process group initialised")
    results = [asdict(result) for subject, check in _checks(state) for result in run_check(subject, check)]
    by_rank = _gather(state, results)
    _stage("done")
    if state.is_local_main_process:
        print(RESULTS_MARK + json.dumps(_merge(by_rank)), flush=True)
    state.destroy_process_group()


def _gather(state: PartialState, value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values = [value] * state.num_processes
    if state.num_processes > 1:
        dist.all_gather_object(values, value)
    return values


def _checks(state: PartialState) -> Iterator[tuple[str, Any]]:
    yield "machine", lambda: _machine(state)
    yield "process group", lambda: _process_group(state)
    yield "versions", lambda: _same_versions(state)
    yield "all-reduce", lambda: _all_reduce(state)
    yield "point to point", lambda: _point_to_point(state)
    yield "machines", lambda: _pairs(state)
    yield "clocks", lambda: _clocks(state)


def _merge(by_rank: list[list[dict[str, str]]]) -> list[dict[str, str]]:
    """Rank 0's results, then warnings and failures of other ranks."""
    merged = list(by_rank[0])
    for results in by_rank[1:]:
        merged += [result for result in results if result["state"] != "ok" and result not in merged]
    return merged


def _stage(name: str) -> None:
    print(f"{STAGE_MARK}{read_int('RANK') or 0} {name}", flush=True)


def _machine(state: PartialState) -> Iterator[CheckResult]:
    """Yield the checks of this machine, on each machine other than rank 0's, whose doctor has run them."""
    _stage("checking its machine")
    if not state.is_local_main_process or state.is_main_process:
        return
    host = socket.gethostname()
    for subject, check in CHECKS:
        for result in run_check(subject, check):
            # The variables of a rank are set here, by the launcher.
            if result.state != "ok" and result.subject != "variables":
                yield replace(result, text=f"on {host}: {result.text}")


def _process_group(state: PartialState) -> Iterator[CheckResult]:
    hosts = ", ".join(dict.fromkeys(_gather(state, socket.gethostname())))
    if state.is_main_process:
        backend = state.backend or "no backend"
        yield ok("process group", f"{state.num_processes} process(es) on {hosts}, {backend}, {state.device.type}")


def _same_versions(state: PartialState) -> Iterator[CheckResult]:
    """Different versions of torch make collectives hang, or results differ."""
    _stage("comparing versions")
    by_rank = _gather(state, (socket.gethostname(), versions()))
    for name in versions() if state.is_main_process else ():
        hosts = {installed[name]: host for host, installed in by_rank}
        if len(hosts) > 1:
            text = "; ".join(f"{name} {version or 'missing'} on {host}" for version, host in hosts.items())
            yield fail("versions", text, f"Install the same version of {name} on all machines.")


def _all_reduce(state: PartialState) -> Iterator[CheckResult]:
    """Yield sums of small integers, which are exact in any order."""
    _stage("all-reduce")
    if state.num_processes == 1:
        yield ok("all-reduce", "skipped: a single process")
        return
    wrong = [size for size in _SIZES if not _reduces(state, size)]
    if wrong:
        text = f"wrong sums for {wrong} elements on rank {state.process_index}"
        yield fail("all-reduce", text, "Read the log of the collective library: NCCL_DEBUG=INFO.")
        return
    data = torch.zeros(_BANDWIDTH_BYTES // 4, device=state.device)
    seconds = _median_seconds(state, lambda: dist.all_reduce(data))
    # Bytes that each process sends in a ring all-reduce.
    sent = 2 * (state.num_processes - 1) / state.num_processes * _BANDWIDTH_BYTES
    if state.is_main_process:
        size = _BANDWIDTH_BYTES // MIB
        yield ok("all-reduce", f"correct; {sent / seconds / MIB:.0f} MiB/s per process for {size} MiB")


def _reduces(state: PartialState, size: int) -> bool:
    base = (torch.arange(size, device=state.device) % 97).to(torch.float32)
    value = base + state.process_index
    expected = base * state.num_processes + sum(range(state.num_processes))
    dist.all_reduce(value)
    return torch.equal(value, expected)


def _point_to_point(state: PartialState) -> Iterator[CheckResult]:
    """Check that each process can send to the next one in a ring."""
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
        yield fail("point to point", f"rank {rank} received wrong data from rank {(rank - 1) % world}", NETWORK)
    elif state.is_main_process:
        yield ok("point to point", f"correct; {_BANDWIDTH_BYTES / seconds / MIB:.0f} MiB/s per direction in a ring")


def _pairs(state: PartialState) -> Iterator[CheckResult]:
    """Latency and bandwidth between every two machines, by their first ranks; disjoint pairs at the same time."""
    _stage("every pair of machines")
    local = read_int("LOCAL_WORLD_SIZE") or 1
    machines = state.num_processes // local
    if machines < 2:
        return
    mine, own = [], state.process_index // local
    for pairs in rounds(machines):
        partner = next((sum(pair) - own for pair in pairs if own in pair), None)
        if state.is_local_main_process and partner is not None:
            seconds, rate = _measure_pair(state, partner * local, first=own < partner)
            if own < partner:
                mine.append((own, partner, seconds, rate))
    hosts = _gather(state, socket.gethostname())[::local]
    found = sorted(itertools.chain.from_iterable(_gather(state, mine)))
    if state.is_main_process:
        yield from describe_pairs(hosts, found)


def rounds(machines: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of machines in rounds of disjoint pairs (the circle method of tournaments)."""
    places = [*range(machines), *([-1] if machines % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        ends = zip(places[: len(places) // 2], reversed(places), strict=False)
        found.append([(min(pair), max(pair)) for pair in ends if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def _measure_pair(state: PartialState, other: int, first: bool) -> tuple[float, float]:
    """Return seconds one way, and bytes per second in the slower direction, between this rank and another."""
    ping = torch.zeros(1, device=state.device)
    data = torch.zeros(_BANDWIDTH_BYTES // 4, device=state.device)

    def there_and_back(tensor: torch.Tensor) -> float:
        begin = time.perf_counter()
        for send in (first, not first):
            (dist.send if send else dist.recv)(tensor, other)
        if state.device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - begin) / 2

    there_and_back(ping)  # connects
    seconds = statistics.median(there_and_back(ping) for _ in range(_ROUND_TRIPS))
    return seconds, _BANDWIDTH_BYTES / statistics.median(there_and_back(data) for _ in range(_REPEATS))


def describe_pairs(hosts: list[str], found: list[tuple[int, int, float, float]]) -> Iterator[CheckResult]:
    """Results for pairs of machines: their numbers, seconds one way, and bytes per second."""

    def text(pair: tuple[int, int, float, float]) -> str:
        one, other, seconds, rate = pair
        return f"{hosts[one]} - {hosts[other]}: {seconds * 1000:.2f} ms, {rate / MIB:.0f} MiB/s"

    rates = [rate for *_, rate in found]
    slowest = min(found, key=lambda pair: pair[3])
    usual = statistics.median(rates)
    if len(found) > 2 and slowest[3] < _SLOW_PAIR * usual:
        advice = f"The others have {usual / MIB:.0f} MiB/s: check the cable and the interface of these two machines."
        yield warn("machines", f"slow: {text(slowest)}", advice)
    if len(found) <= _LISTED_PAIRS:
        yield from (ok("machines", text(pair)) for pair in found)
        return
    times = [1000 * seconds for *_, seconds, _ in found]
    yield ok(
        "machines",
        f"{len(found)} pairs: {min(times):.2f} to {max(times):.2f} ms, {min(rates) / MIB:.0f} to "
        f"{max(rates) / MIB:.0f} MiB/s; slowest {text(slowest)}",
    )


def _median_seconds(state: PartialState, action: Any) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        action()
        if state.device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])  # the first run includes connecting


def _clocks(state: PartialState) -> Iterator[CheckResult]:
    """Yield the difference between the clocks of other ranks and rank 0's, from the fastest of several round trips."""
    _stage("comparing clocks")
    worst = 0.0
    for other in range(1, state.num_processes):
        skew = _skew(state, other)
        if state.is_main_process and abs(skew) > abs(worst):
            worst = skew
    if not state.is_main_process or state.num_processes == 1:
        return
    text = f"at most {abs(worst) * 1000:.1f} ms apart"
    advice = "Synchronise all machines with a time server: apt install chrony."
    if abs(worst) > _SKEW_FAILURE_SECONDS:
        yield fail("clocks", text, advice)
    elif abs(worst) > _SKEW_WARNING_SECONDS:
        yield warn("clocks", text, advice)
    else:
        yield ok("clocks", text)


def _skew(state: PartialState, other: int) -> float:
    """Return seconds by which the clock of another rank is ahead; 0 except on rank 0."""
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
