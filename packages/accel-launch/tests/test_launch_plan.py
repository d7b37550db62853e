"""The launch plan: devices, cores, numbers of processes, ports."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_launch import launch_plan as plan_module
from accel_launch import replica_plan
from accel_launch.accelerators.amd import Amd
from accel_launch.accelerators.base import count_entries
from accel_launch.accelerators.nvidia import Nvidia
from accel_launch.accelerators.registry import ACCELERATORS, VisibleDevices
from accel_launch.config.read import load_settings
from accel_launch.cpus import default_cpu_processes, usable_cores
from accel_launch.elastic.report import RankFailure, describe, first_failure, shell_exit_code, with_hint
from accel_launch.launch_plan import make_plan
from accel_launch.launchers import ft, replicas
from accel_state.errors import ConfigurationError
from accel_state.options import ConfigFile, load_groups, resolve
from accel_state.options.conflicts import check
from accel_state.ports import is_free, loopback_variables


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The device nodes of four NVIDIA GPUs, in a directory."""
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (dev / name).touch()
    nvidia = Nvidia(dev)
    count = nvidia.count_visible
    monkeypatch.setattr(
        plan_module,
        "find_visible",
        lambda env: VisibleDevices(count(env), "CUDA_VISIBLE_DEVICES") if count(env) else VisibleDevices(0, None),
    )
    return nvidia


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_module, "find_visible", lambda env: VisibleDevices(0, None))


def plan(tmp_path: Path, environ: dict[str, str] | None = None, config: str | None = None, **options: str):
    script = tmp_path / "s.py"
    script.touch()
    file = tmp_path / "c.yaml"
    if config is not None:
        file.write_text(config)
    settings = resolve(load_groups(), options, environ or {}, ConfigFile.read(file) if config is not None else None)
    return make_plan(settings, str(script), ["a"], environ or {})


ALONE = loopback_variables()


class TestAccelerators:
    @pytest.mark.parametrize(
        ("limit", "count"),
        [
            ("0", 1),
            ("0,1,2", 3),
            ("3,1", 2),
            ("0,9,1", 1),
            ("-1", 0),
            ("0,-1,1", 1),
            ("NoDevFiles", 1),
            ("GPU-8c1d,GPU-77aa", 2),
            ("0,,1", 1),
        ],
    )
    def test_entries_end_at_the_first_missing_one(self, limit, count) -> None:
        assert count_entries(limit, 4) == count

    def test_nvidia(self, four_gpus) -> None:
        assert four_gpus.count_installed() == 4
        assert four_gpus.count_visible({}) == 4
        assert four_gpus.count_visible({"CUDA_VISIBLE_DEVICES": "2,3"}) == 2
        assert four_gpus.count_visible({"CUDA_VISIBLE_DEVICES": ""}) == 0
        assert four_gpus.count_visible({"CUDA_VISIBLE_DEVICES": "-1"}) == 0

    @pytest.mark.parametrize(
        ("program", "count"),
        [
            ("echo 'GPU 0: H100 (UUID: 1)'; echo 'GPU 1: H100 (UUID: 2)'; echo '  MIG 1g.10gb Device 0'", 2),
            ("echo no driver; exit 9", 0),
        ],
    )
    def test_nvidia_smi_is_asked_where_there_is_no_device_node(self, tmp_path, monkeypatch, program, count) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n{program}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert Nvidia(tmp_path / "no_dev").count_installed() == count

    def test_amd(self, tmp_path) -> None:
        for node, simd in enumerate((0, 304, 304)):
            folder = tmp_path / str(node)
            folder.mkdir()
            (folder / "properties").write_text(
                f"cpu_cores_count {8 if not simd else 0}\nsimd_count {simd}\nmem_banks_count 1\n"
            )
        amd = Amd(tmp_path)
        assert amd.count_visible({}) == 2
        assert amd.count_visible({"HIP_VISIBLE_DEVICES": "1"}) == 1
        assert amd.count_visible({"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0"}) == 1
        assert Amd(tmp_path / "none").count_visible({}) == 0

    def test_every_registered_accelerator_can_be_counted(self) -> None:
        for name in ACCELERATORS:
            kind = ACCELERATORS.load(name)()
            assert kind.count_visible(os.environ) >= 0 and kind.count_visible({kind.visible_variables[0]: ""}) == 0


class TestCores:
    def test_hardware_threads_of_one_core_count_once(self, tmp_path) -> None:
        for cpu in os.sched_getaffinity(0):
            folder = tmp_path / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text("0-1\n")
        assert usable_cores(tmp_path, tmp_path / "none") == 1
        assert usable_cores(tmp_path / "none", tmp_path / "none") == len(os.sched_getaffinity(0))

    @pytest.mark.parametrize(("quota", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None)])
    def test_the_quota_of_a_container_counts(self, tmp_path, quota, cores) -> None:
        (tmp_path / "cpu.max").write_text(quota)
        expected = len(os.sched_getaffinity(0)) if cores is None else cores
        assert usable_cores(tmp_path / "none", tmp_path / "cpu.max") == expected


def test_ports(free_port) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port) and not is_free(port, "127.0.0.1")
    assert is_free(port)
    with pytest.raises(OSError, match="assign"):
        is_free(port, "203.0.113.7")


class TestCounts:
    def test_one_process_without_a_gpu(self, tmp_path, no_gpu) -> None:
        made = plan(tmp_path)
        assert (made.num_processes, made.local_processes, dict(made.environment)) == (1, 1, ALONE)
        assert "starting 1 process (one per machine, no GPU is visible)" in made.notes[0]
        assert not plan(tmp_path, num_processes="1").notes

    def test_one_process_for_each_visible_gpu(self, tmp_path, four_gpus) -> None:
        assert plan(tmp_path).num_processes == 4
        assert plan(tmp_path, {"CUDA_VISIBLE_DEVICES": "1,2"}, multi_gpu="true").num_processes == 2
        assert "starting 4 processes (one per visible GPU)" in plan(tmp_path).notes[0]
        machines = {"num_machines": "2", "machine_rank": "1", "main_process_ip": "host"}
        made = plan(tmp_path, **machines)
        assert (made.num_processes, made.local_processes) == (8, 4)

    def test_cpu_overrides_gpus(self, tmp_path, four_gpus) -> None:
        made = plan(tmp_path, cpu="true", gpu_ids="0,1")
        assert made.num_processes == 1 and dict(made.environment) == {"ACCELERATE_USE_CPU": "true", **ALONE}

    def test_gpu_ids(self, tmp_path, four_gpus) -> None:
        made = plan(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"}, gpu_ids="1, 3")
        assert made.num_processes == 2 and made.environment["CUDA_VISIBLE_DEVICES"] == "1,3"
        assert made.full_environment({"CUDA_VISIBLE_DEVICES": "0", "X": "1"})["CUDA_VISIBLE_DEVICES"] == "1,3"
        assert "CUDA_VISIBLE_DEVICES" not in plan(tmp_path, gpu_ids="all").environment
        with pytest.raises(ConfigurationError, match=r"--gpu_ids 1,4: this.*has 4 GPU\(s\).*ids 0 to 3"):
            plan(tmp_path, gpu_ids="1,4")

    def test_more_processes_than_gpus(self, tmp_path, four_gpus) -> None:
        with pytest.raises(
            ConfigurationError, match="--multi_gpu: 5 processes .* need 5 GPUs, but 4 .* --num_processes 4"
        ):
            plan(tmp_path, multi_gpu="true", num_processes="5")
        assert plan(tmp_path, num_processes="5").num_processes == 5, (
            "a script may run on the CPU of a machine with GPUs"
        )

    def test_threads(self, tmp_path, no_gpu) -> None:
        assert plan(tmp_path, num_processes="64").environment == {"OMP_NUM_THREADS": "1", **ALONE}
        assert "OMP_NUM_THREADS" not in plan(tmp_path, num_processes="1").environment
        given = {"OMP_NUM_THREADS": "5"}
        assert plan(tmp_path, given, num_processes="2").environment == {"OMP_NUM_THREADS": "5", **ALONE}
        made = plan(tmp_path, given, num_processes="2", num_cpu_threads_per_process="3")
        assert made.environment == {"OMP_NUM_THREADS": "3", **ALONE}

    def test_interfaces(self, tmp_path, no_gpu) -> None:
        """Processes on one machine connect over the loopback interface, unless the user chose another one."""
        made = plan(tmp_path, {"GLOO_SOCKET_IFNAME": "eth7"})
        assert made.environment == {"NCCL_SOCKET_IFNAME": ALONE["NCCL_SOCKET_IFNAME"]}
        several = plan(tmp_path, num_machines="2", num_processes="2", machine_rank="0", main_process_ip="10.0.0.1")
        assert not several.environment.keys() & ALONE.keys()


class TestContradictions:
    """The setting with the higher precedence is used; two of the same precedence are an error."""

    def test_cpu_on_the_command_line_against_multi_gpu_elsewhere(self, tmp_path, four_gpus) -> None:
        assert plan(tmp_path, config="multi_gpu: true", cpu="true").num_processes == 1
        assert plan(tmp_path, {"ACCELERATE_MULTI_GPU": "1"}, cpu="true").num_processes == 1

    def test_multi_gpu_on_the_command_line_against_cpu_elsewhere(self, tmp_path, four_gpus) -> None:
        made = plan(tmp_path, {"ACCELERATE_USE_CPU": "true"}, multi_gpu="true")
        assert made.num_processes == 4 and made.environment["ACCELERATE_USE_CPU"] == "false"

    def test_both_in_one_file(self, tmp_path, four_gpus) -> None:
        with pytest.raises(
            ConfigurationError, match="use_cpu: true.*, line 1 and multi_gpu: true.*, line 2 contradict"
        ):
            plan(tmp_path, config="use_cpu: true\nmulti_gpu: true\n")

    def test_a_type_for_gpus(self, tmp_path) -> None:
        file, both = tmp_path / "c.yaml", "distributed_type: MULTI_GPU\nuse_cpu: true\n"

        def checked(config: str, **options: str) -> Any:
            file.write_text(config)
            return check(resolve(load_groups(), options, {}, ConfigFile.read(file)))["distributed_type"]

        with pytest.raises(ConfigurationError, match="use_cpu: true.*, line 2 and distributed_type: MULTI_GPU.*line 1"):
            checked(both)
        assert checked(both.replace("true", "false"), cpu="true") == "MULTI_GPU"
        assert checked(both.replace("_GPU", "_CPU")) == "MULTI_CPU"
        file.write_text(both.replace("MULTI_GPU", "TP") + "tp_config:\n  tp_size: 2\n")
        assert load_settings({"config_file": str(file)})["distributed_type"] == "MULTI_CPU"


def test_several_processes_on_the_cpu_by_default(tmp_path: Path, no_gpu: None) -> None:
    made = plan(tmp_path, config="distributed_type: MULTI_CPU\n")
    assert made.num_processes >= 2 and f"starting {made.num_processes} processes (one per NUMA node" in made.notes[0]
    words = {"num_machines": "3", "machine_rank": "0", "main_process_ip": "a"}
    assert plan(tmp_path, config="distributed_type: MULTI_CPU\n", **words).num_processes == 3
    for node, cpu in enumerate(sorted(os.sched_getaffinity(0))[:1] * 3):
        (tmp_path / f"node{node}" / f"cpu{cpu}").mkdir(parents=True)
    (tmp_path / "node9" / "cpu99999").mkdir(parents=True)
    assert default_cpu_processes(tmp_path) == 3


def test_far_more_processes_than_cores_are_refused(tmp_path: Path, no_gpu: None, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert plan(tmp_path, num_processes="128").local_processes == 128
    assert plan(tmp_path, num_processes="64000", num_machines="500", machine_rank="0", main_process_ip="a")
    with pytest.raises(ConfigurationError, match="129: 129 processes.*has 16 CPU"):
        plan(tmp_path, num_processes="129")
    for options in ({"oversubscribe": "true"}, {"environ": {"ACCELERATE_OVERSUBSCRIBE": "1"}}):
        assert plan(tmp_path, num_processes="100000", **options).local_processes == 100000
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert plan(tmp_path, num_processes="64").local_processes == 64
    with pytest.raises(ConfigurationError, match="more than 64"):
        plan(tmp_path, num_processes="65")


def test_the_first_failure_is_the_cause() -> None:
    late, early = RankFailure(0, 0, 1, 1, time_ns=20), RankFailure(2, 2, 3, 1, time_ns=10)
    ended = RankFailure(1, 1, 2, 143, "SIGTERM")
    crashed = RankFailure(3, 3, 4, 139, "SIGSEGV")
    assert first_failure([late, ended, early]) is early
    assert first_failure([late, ended, early, crashed]) is crashed
    assert first_failure([ended]) is ended
    lost = RankFailure(
        0,
        0,
        1,
        1,
        time_ns=5,
        traceback="Traceback ...\nRuntimeError: [pair.cc] Connection closed by peer [127.0.0.1]:1\n",
    )
    own = RankFailure(4, 4, 5, 1, time_ns=15, traceback="Traceback ...\nValueError: boom\n")
    assert first_failure([lost, crashed]) is crashed and first_failure([lost, own]) is own
    assert first_failure([own, crashed]) is own, "an error on one rank may crash another in its collective"
    explained = RankFailure(
        1,
        1,
        2,
        1,
        time_ns=3,
        traceback='Traceback ...\n  File "s.py", line 3, in <module>\n    gather()\n'
        "accel_state.errors.CollectiveTimeoutError: all_gather did not complete\n  rank 1 waits\nFind out why.\n",
    )
    assert first_failure([explained, crashed]) is crashed and first_failure([explained, own]) is own
    socket_code = replace(own, traceback='Traceback ...\n  File "s.py", line 3, in f\n    socket()\nValueError: boom\n')
    assert first_failure([socket_code, crashed]) is socket_code, "a line of the program is not the error"
    assert [shell_exit_code(code) for code in (0, 7, -9)] == [0, 7, 137]


def test_what_the_launcher_knows_of_a_failure() -> None:
    lost = RankFailure(1, 1, 2, 1, time_ns=5, traceback="Traceback ...\nRuntimeError: Connection closed by peer\n")
    aborted = RankFailure(1, 1, 2, 134, "SIGABRT")
    early = "rank 0 had already ended, without an error, when rank 1 failed in a collective that needs it"
    assert early in describe(with_hint(lost, [0], 2), 2).splitlines()[-1]
    assert early in describe(with_hint(aborted, [0], 2), 2)
    assert "ranks 0, 2, 3, 4, 5, 6, 7, 8, ... had" in describe(with_hint(lost, [0, *range(2, 16)], 16), 16)
    late = describe(with_hint(aborted, [0, 1], 2), 2)
    assert "script of rank 1 had already ended" in late and "loop" not in late and "collective" not in late
    mismatch = describe(with_hint(aborted, [], 2), 2)
    assert "--debug" in mismatch and "pad_across_processes" in mismatch and "PYTHONFAULTHANDLER" in mismatch
    assert "pad_across_processes" not in describe(with_hint(aborted, [], 1), 1)
    assert with_hint(lost, [], 2) is lost
    own = replace(lost, traceback="Traceback ...\nValueError: boom\n")
    assert with_hint(own, [0], 2) is own


class TestReplicas:
    def test_each_replica_has_devices_of_its_own(self, tmp_path, four_gpus, monkeypatch) -> None:
        monkeypatch.setattr(replica_plan, "find_visible", plan_module.find_visible)
        for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
            monkeypatch.delenv(name, raising=False)
        made = plan(tmp_path, ft="true", num_replicas="3", num_spares="1")
        (start,) = ft.FaultTolerantLauncher().commands(made)
        names = ("ACCELERATE_FT_REPLICA", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "WORLD_SIZE")
        assert [tuple(rank[name] for name in names) for rank in start.ranks] == [
            (str(number), str(number), "0", "1") for number in range(4)
        ]
        (started,) = replica_plan.variables(made, 2, restarts=1)
        assert started["CUDA_VISIBLE_DEVICES"] == "2" and started["ACCELERATE_FT_RESTARTS"] == "1"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-b,0,1")
        shards = {"use_fsdp": "true", "fsdp_version": "2", "processes_per_replica": "2"}
        made = plan(tmp_path, ft="true", num_replicas="2", **shards)
        (start,) = ft.FaultTolerantLauncher().commands(made)
        assert [tuple(rank[name] for name in names) for rank in start.ranks] == [
            *(("0", "3,GPU-b", "0", "2"), ("0", "3,GPU-b", "1", "2")),
            *(("1", "0,1", "0", "2"), ("1", "0,1", "1", "2")),
        ]
        made = plan(tmp_path, ft="true", num_replicas="3", **shards)
        with pytest.raises(ConfigurationError, match="3 replicas .* of 2 processes.*need 6 GPUs.*and 4 are"):
            ft.FaultTolerantLauncher().commands(made)
        machines = {"num_machines": "2", "machine_rank": "1", "main_process_ip": "127.0.0.1"}
        made = plan(tmp_path, ft="true", num_replicas="5", **machines)
        ranks = ft.FaultTolerantLauncher().commands(made)[0].ranks
        assert [(rank["ACCELERATE_FT_REPLICA"], rank["CUDA_VISIBLE_DEVICES"]) for rank in ranks] == [
            *(("2", "3"), ("3", "GPU-b"), ("4", "0"))
        ]
        (started,) = replica_plan.variables(made, 3, restarts=0)
        assert started["ACCELERATE_FT_HOST"] == "127.0.0.1"
        with pytest.raises(ConfigurationError, match="1 replicas .* leave machines without one"):
            replica_plan.numbers_here(plan(tmp_path, ft="true", num_replicas="1", **machines))
        machines["main_process_ip"] = "::1"
        made = plan(tmp_path, ft="true", num_replicas="2", **machines)
        (started,) = replica_plan.variables(made, 1, restarts=0)
        assert started["ACCELERATE_FT_HOST"] == "::1"
        machines["main_process_ip"] = "no-such-host.invalid"
        made = plan(tmp_path, ft="true", num_replicas="2", **machines)
        with pytest.raises(ConfigurationError, match="no-such-host.invalid: .*rank 0"):
            replica_plan.variables(made, 1, restarts=0)
        made = plan(tmp_path, ft="true", num_replicas="9", cpu="true")
        assert all("CUDA_VISIBLE_DEVICES" not in rank for rank in ft.FaultTolerantLauncher().commands(made)[0].ranks)

    def test_kills_from_outside_are_not_errors_of_the_script(self, tmp_path) -> None:
        killed = replicas.Replica(0, progress=tmp_path)
        # Twenty in half an hour, the first before the first step.
        assert not any(killed.count_end(-signal.SIGKILL, 90.0 * number) for number in range(20))
        # Exceptions and exit codes count, and so do crashes in native code, and hanging.
        assert [killed.count_end(code, 2000.0) for code in (1, -signal.SIGKILL, -signal.SIGSEGV)] == [None] * 3
        killed.hung = True
        assert killed.count_end(-signal.SIGKILL, 2000.0) == "it failed 3 times in a row"
        # A step in between: the script works.
        killed.hung, killed.state = False, "computes"
        assert killed.count_end(-signal.SIGKILL, 2000.0) is None and killed.failures == 0
        # Killed at every start, for example for the memory that it takes.
        killed.state = ""
        ends = [killed.count_end(-signal.SIGKILL, 3000.0 + 5 * number) for number in range(10)]
        assert ends[:9] == [None] * 9 and "killed 10 times within 300 s" in str(ends[9])

    def test_a_look_comes_right_after_a_time_limit(self, tmp_path) -> None:
        made = plan(tmp_path, ft="true", replica_timeout="2", cpu="true")
        run = replicas.Supervision(made, made.settings.group(ft.FaultToleranceOptions), "token", tmp_path)
        running = {"processes": [None], "state": "computes"}
        run.replicas = [
            replicas.Replica(number, progress=tmp_path, **running, silent=silent)
            for number, silent in ((0, 1.5), (1, 7.0))
        ]
        assert run.until_next_look() == 0.1  # nobody waits for the second one, which computes for long
        run.replicas[0].stopped = 1.96
        assert run.until_next_look() == pytest.approx(0.045)
        run.replicas[0].processes = []
        assert run.until_next_look() == 0.1

    def test_a_replica_waits_longer_before_its_first_step(self, tmp_path) -> None:
        """Others may evaluate while it joins; a step may be too short for a look to see it, so the report says it."""
        replica = replicas.Replica(0, progress=tmp_path / "replica_0")
        for report, computed, seconds in (("joins 7", False, 80.0), ("waits 8", True, 4.0)):
            replica.progress.write_text(report)
            replica.read()
            assert replica.has_computed is computed
            replica.silent = seconds
            assert not replica.waited(8.0)
            replica.silent = seconds + 0.1
            assert replica.waited(8.0)
        replica.progress.write_text("computes 8")
        replica.read()
        assert replica.has_computed and not replica.waited(8.0)
