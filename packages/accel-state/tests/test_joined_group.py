"""Process groups that somebody else created: rank and size come from the group, local ranks from the host names."""

from __future__ import annotations

import multiprocessing
import os
import socket
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state import PartialState, environments
from accel_state.collectives.single import Collectives
from accel_state.devices.base import Device
from accel_state.devices.cpu import CpuDevice
from accel_state.environments.base import Variables
from accel_state.errors import CollectiveTimeoutError, ConfigurationError
from accel_state.logging import warn_once
from accel_state.state import current_rank, joined_group, partial, rank_owner
from accel_state.testing import run_world

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def join(method: str, backend: str | None = "gloo") -> int:
    """Create the group as a user does: ranks as arguments, and no variables of a launcher."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    for name in LAUNCHERS:
        os.environ.pop(name, None)
    dist.init_process_group(backend, init_method=method or address, rank=rank, world_size=world_size)
    return rank


def numbers(state: PartialState) -> list[Any]:
    environment = state.environment
    return [
        *(state.process_index, state.num_processes, state.local_process_index, state.is_local_main_process),
        *(environment.local_world_size, environment.node_rank, environment.num_nodes),
    ]


def on_hosts(hosts: list[str], local_ranks: list[str | None], method: str = "") -> list[Any]:
    rank = join(method)
    if local_ranks[rank] is not None:
        os.environ["LOCAL_RANK"] = str(local_ranks[rank])
    socket.gethostname = lambda: hosts[rank]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = PartialState(cpu=True)
    total = state.collectives.all_reduce(torch.tensor([rank + 1]))
    return [*numbers(state), int(total), [str(warning.message) for warning in caught]]


@pytest.mark.parametrize("method", ["", "file"])
def test_local_ranks_are_those_of_the_same_host(method: str, tmp_path: Path) -> None:
    method = f"file://{tmp_path}/store" if method else ""
    # Not in the order of blocks, as Ray may place its actors.
    found = run_world(on_hosts, 4, ["a", "b", "a", "a"], [None] * 4, method, state=False)
    assert found == [
        [0, 4, 0, True, 3, 0, 2, 10, []],
        [1, 4, 0, True, 1, 1, 2, 10, []],
        [2, 4, 1, False, 3, 0, 2, 10, []],
        [3, 4, 2, False, 3, 0, 2, 10, []],
    ]


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "expected"),
    [
        (["a", "a"], [None, "1"], [0, 1]),  # Lightning sets it in the ranks that it starts, and not in the first one
        (["a", "a"], ["1", "0"], [1, 0]),  # those that cover a host are kept in any order
        (["a", "b"], ["0", "1"], [0, 0]),
    ],
)
def test_given_local_ranks_are_kept_unless_the_hosts_contradict_them(
    hosts: list[str], local_ranks: list[str | None], expected: list[int]
) -> None:
    found = run_world(on_hosts, 2, hosts, local_ranks, state=False)
    assert [row[2] for row in found] == expected and found[0][-1] == []
    assert len(found[1][-1]) == (hosts == ["a", "b"])
    assert all("local rank 1" in warning and "number 0" in warning for warning in found[1][-1])


def with_wrong_variables(variables: dict[str, str]) -> list[Any]:
    rank = join("")
    os.environ.update(variables)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = PartialState(cpu=True)
    rows = state.collectives.all_gather(torch.tensor(rank))
    return [*numbers(state)[:3], rows.tolist(), [str(warning.message) for warning in caught]]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}, ["rank 5 of 8", "of 2"]),
        ({"RANK": "here", "WORLD_SIZE": "2"}, ["RANK", "here"]),
        ({"RANK": "1"}, ["RANK", "WORLD_SIZE"]),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", **dict.fromkeys(
            ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"), "3")}, ["openmpi"]),
    ],
)  # fmt: skip
def test_the_group_is_the_truth_and_contradictions_are_reported(variables: dict[str, str], words: list[str]) -> None:
    for rank, row in enumerate(run_world(with_wrong_variables, 2, variables, state=False)):
        assert row[:4] == [rank, 2, rank, [0, 1]]
        (warning,) = row[-1]
        assert all(word in warning for word in words), warning


def test_an_outer_launcher_of_one_process_is_no_contradiction() -> None:
    outer = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
    assert [row[-1] for row in run_world(with_wrong_variables, 2, outer, state=False)] == [[], []]


def launched_without_local_ranks() -> list[Any]:
    del os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    return numbers(PartialState(cpu=True))


def test_rank_and_world_size_alone_leave_local_ranks_to_the_exchange() -> None:
    assert run_world(launched_without_local_ranks, 2, state=False) == [
        [0, 2, 0, True, 2, 0, 1],
        [1, 2, 1, False, 2, 0, 1],
    ]


def launched_with_all() -> str:
    dist.init_process_group("gloo")
    return PartialState(cpu=True).environment.name


def test_complete_variables_that_agree_are_used() -> None:
    assert run_world(launched_with_all, 2, state=False) == ["torchrun"] * 2


def without_backend() -> tuple[str | None, list[int]]:
    join("", backend=None)
    state = PartialState(cpu=True)
    return state.backend, state.collectives.all_gather(torch.tensor(state.process_index)).tolist()


def test_a_group_without_a_backend_has_that_of_the_device() -> None:
    assert run_world(without_backend, 2, state=False) == [("gloo", [0, 1])] * 2


def alone(seconds: float) -> str:
    rank = join("")
    joined_group._TIMEOUT = timedelta(seconds=seconds)
    joined_group._NOTICE_AFTER = timedelta(seconds=seconds / 2)
    error = ""
    if rank == 0:
        try:
            PartialState(cpu=True)
        except CollectiveTimeoutError as raised:
            error = str(raised)
        assert not PartialState._shared_state
    dist.barrier()
    return error


def test_a_rank_that_never_says_where_it_is_is_named() -> None:
    error, _ = run_world(alone, 2, 2.0, state=False)
    assert "rank 1 " in error and "rank 0" not in error


def group_after_state() -> str:
    rank = os.environ["RANK"]
    held = {name: os.environ.pop(name) for name in LAUNCHERS if name in os.environ}
    state = PartialState(cpu=True)
    assert type(state.collectives) is Collectives
    os.environ.update(held)
    dist.init_process_group("gloo")
    with pytest.raises(ConfigurationError, match=f"rank {rank} of 2"):
        PartialState()
    return "refused"


def test_a_group_that_a_state_of_one_process_does_not_know_is_refused() -> None:
    """Every rank would count as the main process, and get all samples."""
    assert run_world(group_after_state, 2, state=False) == ["refused"] * 2


def others_than_states() -> tuple[int, int, list[str]]:
    rank = join("")
    os.environ["LOCAL_RANK"] = "1"  # without RANK: no environment can be read
    with pytest.raises(ConfigurationError):
        environments.detect()
    assert current_rank() == (rank, 2)
    heard: list[str] = []
    from accel_state import logging as accel_logging

    accel_logging.logging.getLogger("here").warning = lambda text, **_: heard.append(text)  # type: ignore[method-assign]
    warn_once("here", "once")
    PartialState(cpu=True)
    return rank, current_rank()[0], heard


def test_what_reads_the_rank_before_or_besides_a_state_reads_the_group() -> None:
    assert run_world(others_than_states, 2, state=False) == [(0, 0, ["once"]), (1, 1, [])]


def in_worker(kind: str) -> tuple[list[Any], str]:
    state = PartialState(cpu=True)
    try:
        state.wait_for_everyone()
    except ConfigurationError as error:
        return [*numbers(state), str(state.device)], str(error)
    return numbers(state), f"{kind}: communicated"


def with_workers() -> tuple[list[Any], list[Any], int]:
    state = PartialState(cpu=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(in_worker, "spawn").result(timeout=90)
    assert state.collectives.all_gather(torch.tensor(state.process_index)).tolist() == [0, 1], "the rank's own group"
    state.destroy_process_group()
    assert "ACCEL_RANK_OWNER" not in os.environ
    return [*numbers(state), str(state.device)], *found, os.getpid()


@pytest.mark.slow  # two workers that import torch
def test_a_worker_that_a_rank_starts_has_its_rank_and_cannot_communicate() -> None:
    """It used to join the group a second time, with the same rank, and to hang."""
    for rank, (own, found, error, pid) in enumerate(run_world(with_workers, 2)):
        assert own == found and own[:2] == [rank, 2]
        assert f"rank {rank} of 2 (pid {pid})" in error


def with_own_launcher() -> list[int | None]:
    state = PartialState(cpu=True)
    environment = state.environment
    os.environ["ACCEL_RANK_OWNER"] = os.environ["ACCEL_RANK_OWNER"].replace(str(os.getpid()), "1")
    found = [rank_owner.owner_of_rank(environment)]
    found.append(rank_owner.owner_of_rank(replace(environment, main_port=1)))
    return [*found, rank_owner.owner_of_rank(replace(environment, world_size=3))]


def test_a_run_of_its_own_is_no_worker() -> None:
    assert run_world(with_own_launcher, 2) == [[1, None, None]] * 2


class FakeModule:
    """Of a device type with four devices."""

    def __init__(self, initialized: bool, current: int) -> None:
        self.is_initialized = lambda: initialized
        self.current_device = lambda: current
        self.device_count = lambda: 4
        self.is_available = lambda: True


class FourDevices(Device):
    name = "cuda"

    def __init__(self, initialized: bool, current: int) -> None:
        self._module = FakeModule(initialized, current)

    @property
    def module(self) -> Any:
        return self._module

    def _find_module(self) -> Any:
        return self._module


@pytest.mark.parametrize(
    ("initialized", "current", "local_rank", "index"),
    [(True, 3, 1, 3), (True, 3, 0, 3), (True, 0, 1, 1), (False, 0, 2, 2), (False, 3, 2, 2)],
)
def test_the_current_device_of_a_process_that_chose_one_is_kept(
    initialized: bool, current: int, local_rank: int, index: int
) -> None:
    device = partial._device(FourDevices(initialized, current), local_rank)
    assert device == torch.device("cuda", index)


def test_the_device_of_the_group_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "is_joined", lambda: True)
    monkeypatch.setattr(partial, "_bound_device", lambda: torch.device("cuda", 2))
    assert partial._device(FourDevices(True, 3), 1) == torch.device("cuda", 2)
    assert partial._device(CpuDevice(), 1) == torch.device("cpu")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:1")
    assert partial._device(FourDevices(True, 3), 0) == torch.device("cuda", 1)


def test_local_rank_alone_does_not_say_how_many_there_are() -> None:
    variables = Variables({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"})
    assert not joined_group.local_rank_is_known(environments.detect(variables._environ), variables)
