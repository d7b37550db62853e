"""``accel launch --ray``, as far as it needs no cluster; tests/test_launch_ray.py starts one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from accel_launch.config.read import load_settings
from accel_launch.dry_run import render
from accel_launch.entrypoint import Entrypoint
from accel_launch.launch_plan import LaunchPlan, make_plan
from accel_launch.launchers.ray import RayLauncher, _brought, _each, _machines, _resources
from accel_launch.launchers.ray_cluster import Request, connected
from accel_launch.launchers.ray_places import check_versions, rank_order, rank_variables
from accel_launch.launchers.ray_rank import Answer, Place, RankActor, end_rank
from accel_launch.launchers.ray_replica_rank import ReplicaActor, ReplicaAnswer
from accel_launch.launchers.registry import choose_launcher
from accel_launch.parser import parse
from accel_state import run_token
from accel_state.errors import ConfigurationError, MissingDependencyError


def _plan(*words: str, environ: dict[str, str] | None = None) -> LaunchPlan:
    command_line = parse(words)
    settings = load_settings(command_line.options)
    return make_plan(settings, command_line.script, command_line.script_args, environ or {})


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s.py"
    path.write_text("print(1)\n")
    return path


class TestCommandLine:
    @pytest.mark.parametrize(
        ("words", "address"),
        [
            (("--ray", "s.py"), "auto"),
            (("--ray", "auto", "s.py"), "auto"),
            (("--ray", "10.0.0.1:6379", "s.py"), "10.0.0.1:6379"),
            (("--ray", "[fd00::1]:6379", "s.py"), "[fd00::1]:6379"),
            (("--ray=host:1", "s.py"), "host:1"),
            (("--ray", "--cpu", "s.py"), "auto"),
        ],
    )
    def test_the_address_may_be_left_out(self, words: Sequence[str], address: str) -> None:
        command_line = parse([*words, "--lr", "1"])
        assert (command_line.options["ray"], command_line.script) == (address, "s.py")
        assert command_line.script_args == ["--lr", "1"]

    def test_a_client_address_is_refused_with_the_next_step(self) -> None:
        with pytest.raises(ConfigurationError, match="ray job submit"):
            _plan("--ray", "ray://head:10001", "--num_processes", "2", "s.py")

    def test_it_chooses_the_launcher(self) -> None:
        plan = _plan("--ray", "--num_processes", "4", "s.py")
        assert isinstance(choose_launcher(plan), RayLauncher) and plan.num_processes == 4


class TestRefused:
    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (("--tpu",), "--tpu"),
            (("--cpu", "--mpirun_hostfile", "hosts"), "mpirun_hostfile"),
            (("--num_machines", "2:4", "--rdzv_backend", "c10d", "--max_restarts", "1"), "num_machines 2:4"),
        ],
    )
    def test_what_cannot_be_combined(self, words: Sequence[str], named: str) -> None:
        with pytest.raises(ConfigurationError, match=f"--ray auto and .*{named}.* cannot be combined"):
            _plan("--ray", "--num_processes", "4", *words, "s.py")

    def test_replicas_that_cannot_be_spread_evenly(self) -> None:
        words = ("--ray", "--ft", "--num_replicas", "3", "--num_spares", "2", "--num_machines", "2")
        with pytest.raises(ConfigurationError, match="num_replicas 3 .*num_spares 2 .*cannot be divided evenly"):
            _machines(_plan(*words, "s.py"))

    @pytest.mark.parametrize("words", [("--main_process_ip", "host"), ("--machine_rank", "1"), ("--gpu_ids", "0")])
    def test_what_ray_decides(self, words: Sequence[str]) -> None:
        with pytest.raises(ConfigurationError, match="Ray chooses nodes, addresses and devices"):
            _machines(_plan("--ray", "--num_processes", "4", "--num_machines", "2", *words, "s.py"))

    def test_replicas_have_ports_of_their_own_and_need_torchft(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigurationError, match="main_process_port 29500 and .*Ray chooses"):
            _machines(_plan("--ray", "--ft", "--main_process_port", "29500", "s.py"))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(MissingDependencyError, match="--ft needs the module torchft"):
            RayLauncher().run(_plan("--ray", "--ft", "s.py"))

    def test_no_number_of_processes(self) -> None:
        with pytest.raises(ConfigurationError, match="give --num_processes"):
            _machines(_plan("--ray", "s.py"))

    def test_processes_that_cannot_be_spread_evenly(self) -> None:
        with pytest.raises(ConfigurationError, match="cannot be divided evenly"):
            _machines(_plan("--ray", "--num_processes", "3", "--num_machines", "2", "s.py"))

    @pytest.mark.parametrize("text", ['{"CPU": -1}', '{"CPU": "2"}', '{"GPU": 0.5}', '{"GPU": 2}', '{"CPU": true}'])
    def test_resources(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match="ray_resources"):
            _resources(_plan("--ray", "--num_processes", "2", "--ray_resources", text, "s.py"))

    def test_options_of_ray_without_ray(self) -> None:
        with pytest.raises(ConfigurationError, match="no effect without --ray"):
            _plan("--ray_resources", '{"CPU": 2}', "s.py")

    def test_one_of_several_launchers(self) -> None:
        started = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        with pytest.raises(ConfigurationError, match="openmpi started 2 launchers"):
            _plan("--ray", "--num_processes", "2", "s.py", environ={**started, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})

    def test_output_options_have_no_effect_and_say_so(self) -> None:
        plan = _plan("--ray", "--num_processes", "2", "--tee", "3", "s.py")
        assert "--tee 3 has no effect with --ray" in plan.notes


class TestResources:
    def test_a_gpu_each_if_the_cluster_has_any(self) -> None:
        plan = _plan("--ray", "--num_processes", "2", "s.py")
        assert _each(plan, {}, {"CPU": 8, "GPU": 4}) == {"CPU": 1, "GPU": 1}
        assert _each(plan, {}, {"CPU": 8}) == {"CPU": 1}
        assert _each(plan, {"CPU": 4, "GPU": 0, "NPU": 1}, {"GPU": 4}) == {"CPU": 4, "NPU": 1}
        assert _each(_plan("--ray", "--cpu", "--num_processes", "2", "s.py"), {}, {"GPU": 4}) == {"CPU": 1}

    def test_packed_or_on_so_many_machines(self) -> None:
        packed = Request.of(4, None, {"CPU": 2})
        assert (packed.strategy, packed.bundles, packed.ranks_per_bundle) == ("PACK", [{"CPU": 2}] * 4, 1)
        spread = Request.of(4, 2, {"CPU": 2, "GPU": 1})
        assert (spread.strategy, spread.ranks_per_bundle) == ("STRICT_SPREAD", 2)
        assert spread.bundles == [{"CPU": 4, "GPU": 2}] * 2
        assert spread.describe() == "4 processes, 2 on each of 2 nodes, with 2 CPU, 1 GPU each"

    def test_the_processes_of_a_replica_are_on_one_node(self) -> None:
        packed = Request.of(6, None, {"CPU": 2}, together=3)
        assert (packed.strategy, packed.bundles, packed.ranks_per_bundle) == ("PACK", [{"CPU": 6}] * 2, 3)
        spread = Request.of(8, 2, {"CPU": 1}, together=2)
        assert (spread.strategy, spread.bundles, spread.ranks_per_bundle) == ("STRICT_SPREAD", [{"CPU": 4}] * 2, 4)

    def test_the_number_of_machines_of_a_file_of_one_machine_does_not_count(self) -> None:
        Path("one.yaml").write_text("num_machines: 1\nnum_processes: 4\n")
        assert _machines(_plan("--config_file", "one.yaml", "--ray", "s.py")) is None
        assert _machines(_plan("--config_file", "one.yaml", "--ray", "--num_machines", "1", "s.py")) == 1
        assert _machines(_plan("--config_file", "one.yaml", "--ray", "--num_machines", "2", "s.py")) == 2

    def test_a_file_asks_for_ray(self) -> None:
        Path("ray.yaml").write_text("num_processes: 4\nray_config:\n  ray_address: host:6379\n  ray_timeout: 5\n")
        plan = _plan("--config_file", "ray.yaml", "s.py")
        assert (plan.settings["ray"], plan.settings["ray_timeout"]) == ("host:6379", 5)


def _place(node: str, devices: str | None = None, **further: Any) -> Place:
    own = {} if devices is None else {"ANY_VISIBLE_DEVICES": devices}
    fields = {"host": f"host-{node}", "address": f"10.0.0.{node}", "pid": 1, "versions": {}}
    return Place(**{"node": node, "devices": own, **fields, **further})


class TestRanks:
    def test_those_of_a_node_follow_each_other(self) -> None:
        places = [_place("1"), _place("2"), _place("2"), _place("1"), _place("2")]
        order = rank_order(places)
        assert [places[index].node for index in order] == ["2", "2", "2", "1", "1"]
        variables = list(rank_variables([places[index] for index in order]))
        keys = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE")
        assert [tuple(int(each[key]) for key in keys) for each in variables] == [
            *((0, 0, 0, 3, 2, 5), (1, 1, 0, 3, 2, 5), (2, 2, 0, 3, 2, 5)),
            *((3, 0, 1, 2, 2, 5), (4, 1, 1, 2, 2, 5)),
        ]

    def test_the_device_of_a_rank_is_the_one_of_its_local_rank(self) -> None:
        """Ray shows each actor its own device; scripts use the one with the number of their local rank."""
        places = [_place("1", "10"), _place("1", "9"), _place("2", "0"), _place("2", "3")]
        order = rank_order(places)
        ordered = [places[index] for index in order]
        for place, variables in zip(ordered, rank_variables(ordered), strict=True):
            visible = variables["ANY_VISIBLE_DEVICES"].split(",")
            assert visible[int(variables["LOCAL_RANK"])] == place.devices["ANY_VISIBLE_DEVICES"]
        assert [variables["ANY_VISIBLE_DEVICES"] for variables in rank_variables(ordered)] == ["9,10"] * 2 + ["0,3"] * 2

    @pytest.mark.parametrize("devices", ["", "0,1"])
    def test_devices_that_ray_did_not_give_stay_as_they_are(self, devices: str) -> None:
        """None, or those with which the node was started: each actor has them in its environment already."""
        places = [_place("1", devices), _place("1", devices)]
        assert not any("ANY_VISIBLE_DEVICES" in each for each in rank_variables(places))

    def test_nodes_with_other_packages_are_refused(self) -> None:
        same, other = {"torch": "2.13.0"}, {"torch": "2.12.0"}
        check_versions([_place("1", versions=same), _place("2", versions=same)])
        with pytest.raises(ConfigurationError, match=r"torch 2\.12\.0 on host-2, torch 2\.13\.0 on host-1"):
            check_versions([_place("1", versions=same), _place("2", versions=other)])


class TestDirectory:
    def test_the_script_as_it_is_called_in_the_directory_that_travels(self, tmp_path: Path) -> None:
        (tmp_path / "src").mkdir()
        entrypoint = Entrypoint("script", "src/train.py", ("--lr",))
        assert _brought(entrypoint, {"working_dir": "."}).name == "src/train.py"
        assert _brought(entrypoint, {"working_dir": "src"}) == Entrypoint("script", "train.py", ("--lr",))
        assert _brought(Entrypoint("script", str(tmp_path / "s.py"), ()), {"working_dir": "."}).name == "s.py"
        with pytest.raises(ConfigurationError, match="is not in the directory that Ray brings"):
            _brought(Entrypoint("script", "s.py", ()), {"working_dir": "src"})
        assert _brought(Entrypoint("executable", "/bin/true", ()), {"working_dir": "."}).name == "/bin/true"
        assert _brought(Entrypoint("module", "a.b", ()), {"working_dir": "src"}).name == "a.b"


class TestDryRun:
    def test_it_describes_without_a_cluster(self) -> None:
        words = ("--ray", "host:1", "--num_processes", "4", "--num_machines", "2", "--max_restarts", "1")
        runtime = ("--ray_runtime_env", '{"working_dir": ".", "env_vars": {"HF_TOKEN": "hf_secret"}}')
        plan = _plan(*words, *runtime, "s.py", "--lr", "1")
        text = render(choose_launcher(plan).commands(plan), as_json=True)
        assert "hf_secret" not in text
        nodes = json.loads(text)
        assert [node["machine"] for node in nodes] == [f"node {n} of 2 of the Ray cluster host:1" for n in (1, 2)]
        assert nodes[1]["command"] == ["python", "s.py", "--lr", "1"]
        assert nodes[1]["ranks"][0] == {
            **{"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            **{"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
        }
        notes = "\n".join(nodes[0]["notes"])
        assert "STRICT_SPREAD" in notes and "env_vars ['HF_TOKEN']" in notes and "up to 1 times" in notes

    def test_replicas(self) -> None:
        words = ("--ray", "--ft", "--num_replicas", "2", "--processes_per_replica", "2", "--num_machines", "2")
        plan = _plan(*words, "--use_fsdp", "--fsdp_version", "2", "s.py")
        first, second = choose_launcher(plan).commands(plan)
        names = ("ACCELERATE_FT_REPLICA", "RANK", "WORLD_SIZE")
        assert [tuple(rank[name] for name in names) for rank in (*first.ranks, *second.ranks)] == [
            *(("0", "0", "2"), ("0", "1", "2")),
            *(("1", "0", "2"), ("1", "1", "2")),
        ]
        notes = "\n".join(first.notes)
        assert "placement group of 2 bundles, STRICT_SPREAD" in notes and "a replica that ends" in notes
        assert "TORCHFT_LIGHTHOUSE" in notes and "all are restarted" not in notes

    def test_threads_of_this_machine_are_not_those_of_the_nodes(self) -> None:
        plan = _plan("--ray", "--num_processes", "4", "s.py")
        assert "OMP_NUM_THREADS" not in RayLauncher().commands(plan)[0].environment
        plan = _plan("--ray", "--num_processes", "4", "--num_cpu_threads_per_process", "3", "s.py")
        assert RayLauncher().commands(plan)[0].environment["OMP_NUM_THREADS"] == "3"


def test_a_cluster_that_does_not_answer() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with (
        pytest.raises(ConfigurationError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: "),
        connected("127.0.0.1:1", None, False),
    ):
        raise AssertionError("not reached")


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'ray\[default\]'"), connected("auto", None, False):
        raise AssertionError("not reached")


class _Actor(RankActor):
    """The actor in this process: all but where it is comes from the system."""

    def place(self) -> Place:
        return _place("1")


VARIABLES = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}


def _start(actor: RankActor, text: str, *args: str) -> int:
    Path("run.py").write_text(text)
    return actor.start(Entrypoint("script", "run.py", args), str(Path.cwd()), VARIABLES, True)


def _read_all(actor: RankActor) -> tuple[list[tuple[int, bytes]], Answer]:
    output: list[tuple[int, bytes]] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = actor.read(0.1)
        output += answer.output
        if answer.end is not None:
            return output, answer
    raise AssertionError(f"the rank has not ended: {output}")


class TestActor:
    def test_output_exit_code_and_arguments(self) -> None:
        actor = _Actor(0)
        _start(
            actor, "import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\nprint('no end', end='')\nsys.exit(7)", "a"
        )
        output, answer = _read_all(actor)
        assert output == [(1, b"3 ['a']\n"), (1, b"no end")]
        assert answer.end is not None and answer.end.failure is not None
        assert (answer.end.failure.exit_code, answer.end.failure.rank, answer.end.failure.local_rank) == (7, 3, 1)

    def test_modules_that_ray_has_brought_are_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", "/brought")
        Path("run.py").write_text("import os\nprint(os.environ['PYTHONPATH'])\n")
        actor, variables = _Actor(0), {**VARIABLES, "PYTHONPATH": "/own"}
        actor.start(Entrypoint("script", "run.py", ()), str(Path.cwd()), variables, True)
        assert _read_all(actor)[0] == [(1, b"/brought:/own\n")]

    def test_progress_bars_and_much_output(self) -> None:
        actor = _Actor(0)
        _start(actor, "import sys\nsys.stderr.write('1%\\r2%\\r\\n')\nfor n in range(5000): print(n)")
        output, answer = _read_all(actor)
        assert [line for stream, line in output if stream == 2] == [b"1%\r", b"2%\r\n"]
        assert [line for stream, line in output if stream == 1] == [f"{n}\n".encode() for n in range(5000)]
        assert answer.end is not None and answer.end.failure is None and answer.end.completed

    def test_a_killed_rank(self) -> None:
        actor = _Actor(0)
        pid = _start(actor, "import time\ntime.sleep(100)")
        psutil.Process(pid).kill()
        _, answer = _read_all(actor)
        assert answer.end is not None and answer.end.failure is not None
        assert (answer.end.failure.signal, answer.end.failure.exit_code) == ("SIGKILL", 137)

    def test_a_rank_that_the_launcher_ends_has_not_failed(self) -> None:
        actor = _Actor(0)
        _start(
            actor, "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(100)"
        )
        while not actor.read().output:
            pass
        actor.stop(signal.SIGTERM, 0.2)
        _, answer = _read_all(actor)
        assert answer.end is not None and answer.end.failure is None and not answer.end.completed

    def test_signals_reach_the_rank_where_they_are_blocked(self) -> None:
        """Ray blocks SIGINT in its processes, and what they start inherits that."""
        actor = _Actor(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            _start(actor, "import time\nprint('up', flush=True)\ntime.sleep(100)")
            while not actor.read().output:
                pass
            actor.send(signal.SIGINT)
            _, answer = _read_all(actor)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        assert answer.end is not None and answer.end.failure is not None and answer.end.failure.signal == "SIGINT"

    def test_it_leaves_no_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "temporary").mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
        actor = _Actor(0)
        _start(actor, "raise ValueError")
        _, answer = _read_all(actor)
        assert (
            answer.end is not None and answer.end.failure is not None and "ValueError" in answer.end.failure.traceback
        )
        assert not list((tmp_path / "temporary").iterdir())

    def test_a_missing_script_is_named(self) -> None:
        with pytest.raises(FileNotFoundError, match=r"no\.py does not exist \(looked in "):
            _Actor(0).start(Entrypoint("script", "no.py", ()), str(Path.cwd()), VARIABLES, True)
        with pytest.raises(FileNotFoundError, match="the directory /no/where does not exist"):
            _Actor(0).start(Entrypoint("script", "s.py", ()), "/no/where", VARIABLES, True)

    def test_what_a_killed_actor_left_is_killed_and_nothing_else(self) -> None:
        actor = _Actor(0)
        pid = _start(actor, "import time\ntime.sleep(100)")
        # As Ray does it, in a process of its own: the parent would learn of the end in two places.
        code = f"from accel_launch.launchers.ray_rank import end_rank; end_rank({pid})"
        subprocess.run([sys.executable, "-c", code], check=True)
        _, answer = _read_all(actor)
        assert answer.end is not None and answer.end.failure is not None and answer.end.failure.signal == "SIGKILL"
        end_rank(1)  # another process with the number
        end_rank(pid)  # which does not exist any more
        assert psutil.pid_exists(1)


class _Replica(ReplicaActor):
    def place(self) -> Place:
        return _place("1")


# Reports as a replica does, and shows what it was told.
REPLICA = """
import os, pathlib, sys, time
report = pathlib.Path(os.environ["ACCELERATE_FT_DIRECTORY"], "replica_" + os.environ["ACCELERATE_FT_REPLICA"])
print(os.environ.get("ACCELERATE_FT_HOST"), os.environ["TORCHFT_LIGHTHOUSE"], flush=True)
report.write_text("computes 7")
sys.stdin.read() if "end" in sys.argv else time.sleep(100)
"""


class TestReplicaActor:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "temporary").mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
        Path("run.py").write_text(REPLICA)
        return tmp_path / "temporary"

    def _start(self, actor: ReplicaActor, entrance: tuple[str, int] | None, *words: str) -> tuple[int, list[Path]]:
        variables = {**VARIABLES, "RANK": "0", "ACCELERATE_FT_REPLICA": "3", "TORCHFT_LIGHTHOUSE": "http://here:1"}
        variables |= {run_token.VARIABLE: run_token.make_token()}
        return actor.start_replica(
            Entrypoint("script", "run.py", words), str(Path.cwd()), variables, "reports", entrance, {}
        )

    def _until(
        self, actor: ReplicaActor, condition: Callable[[ReplicaAnswer], bool], **elsewhere: str
    ) -> list[ReplicaAnswer]:
        answers, deadline = [], time.monotonic() + 60
        while time.monotonic() < deadline:
            answers.append(actor.look(0.2, elsewhere or {}))
            if condition(answers[-1]):
                return answers
        raise AssertionError(f"in vain: {answers}")

    def test_a_report_is_seen_and_kept_after_the_end(self, folder: Path) -> None:
        actor = _Replica(0)
        _, (report, here) = self._start(actor, None, "end")
        assert here.exists() and here.parent == report.parent, "another actor that ends leaves the directory"
        assert report == folder / "reports" / "replica_3" and report.parent.stat().st_mode & 0o077 == 0
        answers = self._until(actor, lambda answer: answer.answer.end is not None)
        assert answers[-1].report == "computes 7" and answers[-1].reported > 0
        assert [line for answer in answers for _, line in answer.answer.output] == [b"None http://here:1\n"]
        assert not list(folder.iterdir()), "the directory of reports goes with the last one"

    def test_the_lighthouse_of_another_machine_is_behind_a_tunnel(self) -> None:
        actor = _Replica(0)
        pid, (report, here) = self._start(actor, ("127.0.0.1", 1))
        printed: list[bytes] = []

        def has_reported(answer: ReplicaAnswer) -> bool:
            printed.extend(line for _, line in answer.answer.output)
            return bool(printed) and answer.report == "computes 7"

        self._until(actor, has_reported)
        (line,) = printed
        host, address = line.decode().split()
        assert host == "10.0.0.1" and re.fullmatch(r"http://127\.0\.0\.1:\d+", address)
        self._until(actor, lambda answer: True, replica_0="computes 9")
        assert (report.parent / "replica_0").read_text() == "computes 9", "a replica on another node"
        self._until(actor, lambda answer: True)
        assert sorted(file.name for file in report.parent.iterdir()) == [here.name, "replica_3"], "which has died"
        end_rank(1, [report])  # what another one has left; process 1 is none of ours
        assert not report.exists()
        os.kill(pid, signal.SIGSTOP)
        self._until(actor, lambda answer: answer.is_stopped)
        os.kill(pid, signal.SIGKILL)
        (*_, last) = self._until(actor, lambda answer: answer.answer.end is not None)
        assert last.answer.end is not None and last.answer.end.failure is not None
        assert last.answer.end.failure.signal == "SIGKILL" and last.report == "computes 7"
