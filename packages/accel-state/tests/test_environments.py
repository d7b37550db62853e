"""Ranks from the variables of each launcher; tests/test_launch_mpi.py starts them with MPI itself."""

from __future__ import annotations

import itertools
import socket
from typing import ClassVar

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state import environments
from accel_state.environments.base import Environment, Variables
from accel_state.environments.slurm import Allocation, SlurmEnvironment, expand_hosts, find_address
from accel_state.environments.torchrun import TorchrunEnvironment
from accel_state.errors import ConfigurationError


def variables_of(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = variables_of("""
    RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=host0
    MASTER_PORT=29501
""")
OPENMPI = variables_of("""
    OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4
    PMIX_NAMESPACE=1284505601
""")
MVAPICH = variables_of("""
    MV2_COMM_WORLD_RANK=5 MV2_COMM_WORLD_SIZE=8 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=4
""")
HYDRA = variables_of("PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4")
CRAY = variables_of("PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4")
SLURM = variables_of("""
    SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=8
    SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_STEP_NODELIST=gpu[07-08]
""")
RAY_TRAIN = {
    **{name: value for name, value in TORCHRUN.items() if not name.startswith("GROUP")},
    **{"NODE_RANK": "1", "RAY_JOB_ID": "01000000"},
}
LAUNCHERS = {
    **{"ray_train": RAY_TRAIN, "torchrun": TORCHRUN, "openmpi": OPENMPI, "mvapich": MVAPICH, "hydra": HYDRA},
    "slurm": SLURM,
}


def numbers(environment: Environment) -> tuple[int, ...]:
    e = environment
    return (e.rank, e.world_size, e.local_rank, e.local_world_size, e.node_rank, e.num_nodes)


@pytest.mark.parametrize(("name", "variables"), [*LAUNCHERS.items(), ("hydra", CRAY)])
def test_each_launcher(name, variables):
    found = environments.detect(variables)
    assert found.name == name
    assert numbers(found) == (5, 8, 1, 4, 1, 2)


def test_conformance_of_every_registered_environment():
    for name in environments.ENVIRONMENTS:
        kind = environments.ENVIRONMENTS.load(name)
        assert issubclass(kind, Environment)
        assert kind.name == name
    assert set(environments.ENVIRONMENTS) == {*LAUNCHERS, "single"}


def test_no_launcher():
    found = environments.detect({})
    assert found.name == "single"
    assert numbers(found) == (0, 1, 0, 1, 0, 1)
    assert (found.main_address, found.main_port) == (None, None)


def test_an_environment_cannot_be_changed():
    with pytest.raises(AttributeError):
        environments.detect({}).rank = 3  # type: ignore[misc]


def test_meeting_place():
    assert (environments.detect(TORCHRUN).main_address, environments.detect(TORCHRUN).main_port) == ("host0", 29501)
    # MPI tells no address; on one node none is needed, and the port depends on the job.
    one_node = {
        **OPENMPI,
        "OMPI_COMM_WORLD_SIZE": "6",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "6",
        "OMPI_COMM_WORLD_LOCAL_RANK": "5",
    }
    first, second = (
        environments.detect({**one_node, "PMIX_NAMESPACE": job}) for job in ("prterun-host-11@1", "prterun-host-12@1")
    )
    assert first.main_address == "127.0.0.1"
    assert first.main_port != second.main_port
    assert environments.detect(OPENMPI).main_address is None
    user = environments.detect({**OPENMPI, "MASTER_ADDR": "host3", "MASTER_PORT": "1234"})
    assert (user.main_address, user.main_port) == ("host3", 1234)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(SLURM, TORCHRUN), (OPENMPI, TORCHRUN), (HYDRA, TORCHRUN), (SLURM, OPENMPI), (SLURM, HYDRA), (SLURM, MVAPICH)],
)
def test_the_innermost_launcher_counts(outer, inner):
    # The outer one started a single process on this node, which started the inner one.
    found = environments.detect({**outer, **inner})
    assert found.name == environments.detect(inner).name
    # SLURM sets two variables of PMI itself.
    assert environments.detect({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}).name == "slurm"


@pytest.mark.parametrize(
    "variables",
    [
        # A batch script.
        {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8"},
        # The shell of salloc, in the interactive step of newer versions.
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"},
    ],
)
def test_what_starts_the_ranks_is_not_a_rank(variables):
    assert environments.detect(variables).name == "single"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[07-09,12],big1", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("rack[2-3]-node[01-16].cluster", "rack2-node01.cluster"),
        ("big1,gpu[07-09]", "big1"),
    ],
)
def test_first_host_of_a_step(hosts, first):
    assert environments.detect({**SLURM, "SLURM_STEP_NODELIST": hosts}).main_address == first


def test_a_step_on_one_node_meets_there():
    one = {
        **SLURM,
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "8",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "5",
    }
    assert environments.detect(one).main_address == "127.0.0.1"
    ports = {environments.detect({**one, "SLURM_STEP_ID": str(step)}).main_port for step in range(10)}
    assert len(ports) == 10


@pytest.mark.parametrize("name", LAUNCHERS)
@given(text=st.text(alphabet="abc.-+e xX_", min_size=1).filter(lambda text: text.strip()))
def test_a_value_that_is_no_integer_is_named(name, text):
    variables = LAUNCHERS[name]
    for key in variables:
        texts = ("MASTER_ADDR", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "RAY_JOB_ID")
        if key in texts:
            continue
        with pytest.raises(ConfigurationError, match=key):
            environments.detect({**variables, key: text})


@pytest.mark.parametrize("wrong", [{"rank": -1}, {"local_rank": -1}, {"node_rank": -1}, {"rank": 2}, {"local_rank": 2}])
def test_numbers_of_an_environment(wrong):
    numbers = {"rank": 0, "world_size": 2, "local_rank": 0, "local_world_size": 2, "node_rank": 0, "num_nodes": 1}
    assert TorchrunEnvironment(**numbers).rank == 0
    with pytest.raises(ConfigurationError, match=str(next(iter(wrong.values())))):
        TorchrunEnvironment(**{**numbers, **wrong})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**TORCHRUN, "RANK": "8"}, "rank 8 is not between 0 and the world size 8"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 must be at least 0"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be at least 1"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 is not between 0 and the local world size 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9", "LOCAL_RANK": "1"}, "local world size 9 exceeds the world size 8"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, "node rank 2 is not between 0 and the number of nodes 2"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "main port 70000"),
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set but RANK is not"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "1"}, "MV2_COMM_WORLD_LOCAL_RANK is not"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "0"}, "OMPI_COMM_WORLD_LOCAL_SIZE=0 must be at least 1"),
        ({**HYDRA, "PMI_RANK": "9"}, "rank 9 is not between"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4"}, "lists 1 nodes"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "four"}, "'four'"),
        ({key: value for key, value in SLURM.items() if key != "SLURM_LOCALID"}, "SLURM_LOCALID is not"),
    ],
)
def test_contradictions_and_gaps_are_errors(variables, message):
    with pytest.raises(ConfigurationError, match=message):
        environments.detect(variables)


@pytest.mark.parametrize(
    "variables", [{"WORLD_SIZE": "4"}, {"LOCAL_RANK": "-1"}, {"LOCAL_RANK": "0"}, {"RANK": "", "WORLD_SIZE": ""}]
)
def test_leftovers_that_start_nothing(variables):
    assert environments.detect(variables).name == "single"


def test_rank_and_world_size_alone_mean_one_process_a_node():
    found = environments.detect({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "host0", "MASTER_PORT": "1"})
    assert numbers(found) == (2, 3, 0, 1, 2, 3)


@given(per_node=st.lists(st.integers(1, 5), min_size=1, max_size=6), data=st.data())
def test_slurm_counts_any_layout(per_node, data):
    node = data.draw(st.integers(0, len(per_node) - 1))
    local = data.draw(st.integers(0, per_node[node] - 1))
    compressed, index = [], 0
    while index < len(per_node):
        run = 1
        while index + run < len(per_node) and per_node[index + run] == per_node[index]:
            run += 1
        compressed.append(f"{per_node[index]}(x{run})" if run > 1 else str(per_node[index]))
        index += run
    variables = {
        **SLURM,
        **{"SLURM_PROCID": str(sum(per_node[:node]) + local), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)},
        **{"SLURM_STEP_NUM_TASKS": str(sum(per_node)), "SLURM_STEP_NUM_NODES": str(len(per_node))},
        "SLURM_STEP_TASKS_PER_NODE": ",".join(compressed),
    }
    found = environments.detect(variables)
    assert isinstance(found, SlurmEnvironment)
    assert numbers(found) == (sum(per_node[:node]) + local, sum(per_node), local, per_node[node], node, len(per_node))


@given(nodes=st.integers(1, 5), local_world_size=st.integers(1, 5), data=st.data())
def test_openmpi_counts_equal_nodes(nodes, local_world_size, data):
    rank = data.draw(st.integers(0, nodes * local_world_size - 1))
    found = environments.detect(
        {
            **{"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(nodes * local_world_size)},
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_world_size),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_world_size),
        }
    )
    expected = (
        rank,
        nodes * local_world_size,
        rank % local_world_size,
        local_world_size,
        rank // local_world_size,
        nodes,
    )
    assert numbers(found) == expected


def test_a_clock_that_is_set_while_ranks_start_does_not_part_them(monkeypatch):
    """Each rank looks for itself at the process that started them."""
    parent = psutil.Process().parent()
    times = itertools.count()
    monkeypatch.setattr(psutil.Process, "parents", lambda _: [parent])
    monkeypatch.setattr(psutil.Process, "name", lambda _: "hydra_pmi_proxy")
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: next(times))
    one_node = {**HYDRA, "PMI_SIZE": "8", "MPI_LOCALNRANKS": "8", "MPI_LOCALRANKID": "5"}
    assert len({environments.detect(one_node).main_port for _ in range(3)}) == 1


@pytest.mark.parametrize(
    "text", ["", ",", "a,,b", "n[1", "n]1", "n[a-b]", "n[1-]", "n[[1]]", "a[5-1]", "a[1-3]\nb", "a b"]
)
def test_what_is_no_host_list(text):
    with pytest.raises(ConfigurationError, match="is not a SLURM host list"):
        expand_hosts(text)


@pytest.mark.parametrize(
    "text", ["a[0-999999999]", "a[0-99999]", "a[0-999]b[0-999]", "a[1-9,0-99999]", ",".join(["a[0-9999]"] * 7)]
)
def test_lists_of_more_hosts_than_slurm_has(text):
    with pytest.raises(ConfigurationError, match="65536 nodes"):
        expand_hosts(text)
    with pytest.raises(ConfigurationError, match="SLURM host list"):
        expand_hosts(f"a[{'9' * 5000}]")
    assert len(expand_hosts("a[0-65535]")) == 65536


def test_a_list_of_tasks_without_end():
    variables = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    variables |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x999999)"}
    with pytest.raises(ConfigurationError, match="SLURM_STEP_TASKS_PER_NODE"):
        SlurmEnvironment.read(Variables(variables))


@given(st.integers(0, 120), st.integers(0, 30), st.integers(1, 4))
def test_ranges_of_hosts(first, count, digits):
    names = [f"n{number:0{digits}d}" for number in range(first, first + count + 1)]
    assert list(expand_hosts(f"n[{first:0{digits}d}-{first + count}]")) == names


def test_a_node_whose_name_is_no_address(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho NodeName=$4 Arch=x86_64 NodeAddr=10.9.8.7 NodeHostName=x\n")
    scontrol.chmod(0o755)
    resolve = socket.getaddrinfo

    def know_no_nodes(host, *args, **options):
        # What a name service says of them, and how soon, is not for this test.
        if host.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", know_no_nodes)
    assert find_address("localhost") == "localhost"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find_address("first-node.invalid") == "10.9.8.7"
    # What is found holds for the life of the process: another node is asked for.
    monkeypatch.setenv("PATH", "")
    assert find_address("second-node.invalid") == "second-node.invalid"


def test_an_allocation():
    allocation = Allocation.read(
        Variables({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "3(x2)"})
    )
    assert allocation == Allocation("7", ("n1", "n2"), None, on_node=False, in_step=False), (
        "nobody asked for a number of tasks"
    )
    asked = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_TASKS_PER_NODE": "3(x2)",
        "SLURM_NTASKS": "6",
        "SLURMD_NODENAME": "n1",
    }
    assert Allocation.read(Variables(asked)) == Allocation("7", ("n1", "n2"), 3, on_node=True, in_step=False)
    assert Allocation.read(Variables({**asked, "SLURM_TASKS_PER_NODE": "2,1"})).tasks_per_node is None
    assert Allocation.read(Variables({})) is None


class TestRayTrain:
    VARIABLES: ClassVar = {
        **RAY_TRAIN,
        **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    }

    def test_nodes_may_have_different_numbers_of_workers(self) -> None:
        """Three workers on the first node, and one on the second: torchrun's rule would make it the fourth node."""
        found = environments.detect(self.VARIABLES)
        assert (found.name, found.node_rank, found.local_rank, found.rank) == ("ray_train", 1, 0, 3)
        assert (found.main_address, found.main_port) == ("host0", 29501)
        first = {**self.VARIABLES, "RANK": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "NODE_RANK": "0"}
        found = environments.detect(first)
        assert (found.node_rank, found.num_nodes, found.local_world_size) == (0, 2, 3)

    def test_what_a_worker_starts_with_torchrun_has_its_ranks(self) -> None:
        started = {**self.VARIABLES, "GROUP_RANK": "0", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
        assert environments.detect(started).name == "torchrun"

    @pytest.mark.parametrize("missing", ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
    def test_a_missing_variable_is_named(self, missing: str) -> None:
        variables = {name: value for name, value in self.VARIABLES.items() if name != missing}
        with pytest.raises(ConfigurationError, match=f"NODE_RANK is set but {missing} is not"):
            environments.detect(variables)

    def test_a_node_rank_outside_of_ray_is_not_ours(self) -> None:
        variables = {name: value for name, value in self.VARIABLES.items() if name != "RAY_JOB_ID"}
        assert environments.detect(variables).name == "torchrun"
