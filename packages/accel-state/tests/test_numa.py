"""Sharing out cores: the rule over made-up machines, and the binding itself on this one."""

from __future__ import annotations

import os

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state import numa
from accel_state.errors import ConfigurationError
from accel_state.numa import (
    CPUInformation,
    choose_cores,
    cores_near_pci,
    get_cpu_distributed_information,
    parse_core_list,
)
from accel_state.testing import run_world

TWO_NODES = [list(range(0, 8)), list(range(8, 16))]


@st.composite
def machines(draw):
    """(local world size, allowed cores, cores near each device, nodes)"""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    cores = list(range(sum(sizes)))
    nodes = [cores[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    allowed = draw(st.lists(st.sampled_from(cores), min_size=1, unique=True))
    world = draw(st.integers(1, 10))
    places = draw(st.lists(st.sampled_from([[], *nodes]), max_size=world))
    return world, allowed, places, draw(st.sampled_from([nodes, []]))


@given(machines())
def test_every_rank_gets_cores_that_it_may_use(machine):
    world, allowed, places, nodes = machine
    for rank in range(world):
        cores = choose_cores(rank, world, allowed, places, nodes)
        assert cores
        assert cores == sorted(set(cores))
        assert set(cores) <= set(allowed)
        if rank < len(places) and set(places[rank]) & set(allowed):
            assert set(cores) <= set(places[rank])


@given(machines())
def test_without_devices_the_shares_are_a_partition(machine):
    world, allowed, _, nodes = machine
    shares = [choose_cores(rank, world, allowed, [], nodes) for rank in range(world)]
    usable = [set(node) & set(allowed) for node in nodes] or [set(allowed)]
    usable = [node for node in usable if node]
    per_node = [sum(rank * len(usable) // world == index for rank in range(world)) for index in range(len(usable))]
    if world >= len(usable) and any(len(node) < ranks for node, ranks in zip(usable, per_node, strict=True)):
        return  # more ranks than cores on a node: cores are shared
    assert sorted(core for share in shares for core in share) == sorted(allowed)


@pytest.mark.parametrize(
    ("world", "places", "expected"),
    [
        (1, [], [list(range(16))]),
        (2, [], TWO_NODES),
        (4, [], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        # Both GPUs hang at the second node: they share it, and leave the first alone.
        (2, [TWO_NODES[1], TWO_NODES[1]], [[8, 9, 10, 11], [12, 13, 14, 15]]),
        (2, [TWO_NODES[1], TWO_NODES[0]], [TWO_NODES[1], TWO_NODES[0]]),
        # A virtual machine, whose devices are attached to no node.
        (2, [[], []], TWO_NODES),
    ],
)
def test_two_nodes(world, places, expected):
    assert [choose_cores(rank, world, range(16), places, TWO_NODES) for rank in range(world)] == expected


def test_more_ranks_than_cores_share_them():
    assert [choose_cores(rank, 4, [3, 5], [], []) for rank in range(4)] == [[3], [5], [3], [5]]


def test_fewer_ranks_than_nodes_take_several():
    nodes = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [choose_cores(rank, 2, range(8), [], nodes) for rank in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@given(st.sets(st.integers(0, 300)))
def test_core_lists_round_trip(cores):
    parts, ordered = [], sorted(cores)
    while ordered:
        end = next((i for i in range(len(ordered) - 1) if ordered[i + 1] != ordered[i] + 1), len(ordered) - 1)
        parts.append(f"{ordered[0]}-{ordered[end]}" if end else str(ordered[0]))
        ordered = ordered[end + 1 :]
    assert parse_core_list(",".join(parts)) == sorted(cores)


def test_the_node_of_a_pci_device(tmp_path):
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (device / "local_cpulist").write_text("8-11,24\n")
    assert cores_near_pci("0000:3B:00.0", tmp_path) == [8, 9, 10, 11, 24]
    (device / "local_cpulist").unlink()
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("8-15\n")
    assert cores_near_pci("0000:3b:00.0", tmp_path) == list(range(8, 16))
    (device / "numa_node").write_text("-1\n")
    assert cores_near_pci("0000:3b:00.0", tmp_path) == []
    assert cores_near_pci("0000:ff:00.0", tmp_path) == []


def test_nodes_of_a_machine(tmp_path):
    for node, cores in (("node0", "0-1"), ("node10", "4-5"), ("node2", "2-3"), ("node3", "")):
        (tmp_path / "devices/system/node" / node).mkdir(parents=True)
        (tmp_path / "devices/system/node" / node / "cpulist").write_text(cores + "\n")
    assert numa._numa_nodes(tmp_path) == [[0, 1], [2, 3], [4, 5]]
    assert numa._numa_nodes(tmp_path / "nothing") == []


def bind_twice() -> tuple[list[int], list[int], list[int]]:
    rank = int(os.environ["LOCAL_RANK"])
    before = psutil.Process().cpu_affinity()
    numa.set_numa_affinity(rank)
    first = psutil.Process().cpu_affinity()
    numa.override_numa_affinity(rank, verbose=True)
    return before, first, psutil.Process().cpu_affinity()


@pytest.mark.skipif(
    not hasattr(psutil.Process, "cpu_affinity"), reason="this operating system cannot bind a process to cores"
)
def test_ranks_of_this_machine_are_bound_and_binding_again_changes_nothing():
    results = run_world(bind_twice, 2, state=False)
    allowed = psutil.Process().cpu_affinity()
    nodes = numa._numa_nodes(numa._SYS)
    for rank, (before, first, second) in enumerate(results):
        assert before == allowed
        assert first == second == choose_cores(rank, 2, allowed, [], nodes)


def test_the_cores_are_logged_when_asked(caplog):
    process = psutil.Process()
    before = process.cpu_affinity()
    try:
        with caplog.at_level("INFO", logger="accel_state.numa"):
            numa.override_numa_affinity(0, verbose=False)
            assert caplog.text == ""
            numa.override_numa_affinity(0, verbose=True)
        assert f"local rank 0 of 1 is bound to {len(before)} of {len(before)} cores" in caplog.text
    finally:
        process.cpu_affinity(before)
        numa._cores_at_start.cache_clear()


def test_a_local_rank_that_does_not_exist():
    with pytest.raises(ConfigurationError, match="local_process_index=3.*between 0 and.*processes 1"):
        numa.override_numa_affinity(3)


def test_place_of_this_process(monkeypatch):
    assert get_cpu_distributed_information() == CPUInformation(rank=0, world_size=1, local_rank=0, local_world_size=1)
    for key, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    assert get_cpu_distributed_information() == CPUInformation(rank=3, world_size=4, local_rank=1, local_world_size=2)
