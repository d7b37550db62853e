"""Launch plans from the variables of SLURM and MPI, and from conflicting settings."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from accel_launch import launch_plan as plan_module
from accel_launch.accelerators.registry import VisibleDevices
from accel_launch.elastic import checks
from accel_launch.launch_context import LaunchMode, Role
from accel_launch.launch_plan import LaunchPlan, make_plan
from accel_launch.launchers.registry import choose_launcher
from accel_state.errors import ConfigurationError
from accel_state.options import ConfigFile, RendezvousOptions, load_groups, resolve

JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
BATCH = {**JOB, "SLURMD_NODENAME": "gpu07", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = {
    **BATCH,
    **{
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    },
    **{"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_PROCID": "1", "SLURM_NODEID": "1", "MASTER_ADDR": "10.0.0.7"},
}
TASKS = {
    **STEP,
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPENMPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))
}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A plan from variables and options, on a machine with this number of GPUs."""

    def make(environ: dict[str, str], gpus: int = 0, config: str | None = None, **options: str) -> LaunchPlan:
        monkeypatch.setattr(
            plan_module, "find_visible", lambda env: VisibleDevices(gpus, "CUDA_VISIBLE_DEVICES" if gpus else None)
        )
        script, file = tmp_path / "s.py", tmp_path / "c.yaml"
        script.touch()
        if config is not None:
            file.write_text(config)
        settings = resolve(load_groups(), options, environ, ConfigFile.read(file) if config is not None else None)
        return make_plan(settings, str(script), ["a"], environ)

    return make


def _without_effect(plan: LaunchPlan) -> list[str]:
    return [note for note in (*plan.settings.notes(), *plan.notes) if "has no effect" in note]


def test_outside_of_a_cluster(plan) -> None:
    made = plan({})
    assert (made.mode, made.context.role, made.num_processes) == (LaunchMode.LOCAL, Role.ALONE, 1)
    assert type(choose_launcher(made)).__name__ == "SingleLauncher"


class TestNode:
    """srun with one launcher on each node."""

    def test_no_options_are_needed(self, plan) -> None:
        made = plan(STEP, gpus=4)
        assert (made.mode, made.context.role) == (LaunchMode.LOCAL, Role.NODE)
        assert (made.num_processes, made.local_processes, made.num_machines) == (8, 4, 2)
        options = made.rendezvous
        assert (options.machine_rank, options.main_process_ip) == (1, "10.0.0.7")
        # Derived from the job's id: two jobs on the same nodes use different ports.
        assert options.main_process_port != plan({**STEP, "SLURM_JOB_ID": "78"}).rendezvous.main_process_port
        assert plan({**STEP, "MASTER_PORT": "1234"}).rendezvous.main_process_port == 1234

    def test_slurm_overrides_the_configuration_file(self, plan) -> None:
        made = plan(STEP, config="num_machines: 3\nmachine_rank: 0\nmain_process_ip: old\nnum_processes: 6\n")
        assert (made.num_machines, made.rendezvous.machine_rank, made.rendezvous.main_process_ip) == (2, 1, "10.0.0.7")
        assert made.local_processes == 3

    def test_the_command_line_overrides_slurm(self, plan) -> None:
        made = plan(STEP, machine_rank="0", main_process_ip="me", main_process_port="5")
        assert (made.rendezvous.machine_rank, made.rendezvous.main_process_ip, made.rendezvous.main_process_port) == (
            0,
            "me",
            5,
        )
        assert plan(STEP, num_machines="1").num_processes == 1, "each node for itself"
        assert plan({**STEP, "ACCELERATE_MACHINE_RANK": "0"}).rendezvous.machine_rank == 0

    def test_a_single_task(self, plan) -> None:
        lone = {
            **STEP,
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_PROCID": "0",
        }
        made = plan({**lone, "SLURM_NODEID": "0"}, num_processes="2")
        assert (made.context.role, made.num_processes, made.num_machines) == (Role.ALONE, 2, 1)


class TestRank:
    """One launcher for each rank."""

    @pytest.mark.parametrize(("variables", "ranks"), [(TASKS, 4), (OPENMPI, 2)], ids=["slurm", "openmpi"])
    def test_the_launcher_becomes_the_script(self, plan, variables, ranks) -> None:
        made = plan(variables)
        assert (made.mode, made.num_processes, made.local_processes) == (LaunchMode.RANK, ranks, 2)
        (start,) = choose_launcher(made).commands(made)
        assert (
            start.ranks[0]["RANK"] == str(ranks - 1)
            and start.ranks[0]["LOCAL_RANK"] == "1"
            and start.ranks[0]["WORLD_SIZE"] == str(ranks)
        )
        assert start.ranks[0]["MASTER_ADDR"] == ("10.0.0.7" if ranks == 4 else "127.0.0.1")

    def test_options_of_the_agent_are_noted(self, plan) -> None:
        notes = plan(OPENMPI, max_restarts="3").notes
        assert any("--max_restarts 3 has no effect on ranks that openmpi starts" in note for note in notes)
        notes = plan(OPENMPI, machine_timeout="60").notes
        assert any("--machine_timeout 60" in note and "has no effect" in note for note in notes)
        assert any("--tee 3 has no effect on ranks that slurm starts" in note for note in plan(TASKS, tee="3").notes)
        assert plan(OPENMPI, config="max_restarts: 3\n").mode is LaunchMode.RANK, "a file may be for other ways too"
        assert plan(OPENMPI, max_restarts="0", tee="0").mode is LaunchMode.RANK

    def test_options_without_effect_on_replicas_are_noted(self, plan) -> None:
        options = {"machine_timeout": "60", "monitor_interval": "1", "max_restarts": "3", "heartbeat_timeout": "9"}
        notes = plan({}, ft="true", **options).notes
        assert [note.split()[0] for note in notes if "has no effect with --ft" in note] == ["--monitor_interval"]

    def test_settings_of_the_rendezvous_of_torch_are_noted(self, plan) -> None:
        notes = plan({}, rdzv_conf="join_timeout=9,read_timeout=3,is_host=1").notes
        named = [note for note in notes if "has no effect: the launchers read timeout, join_timeout" in note]
        assert [note.split()[0] for note in named] == ["read_timeout", "is_host"]

    @pytest.mark.parametrize(
        ("options", "note"),
        [
            ({"gpu_ids": "0", "cpu": "true"}, "--gpu_ids 0 has no effect with --cpu"),
            ({"env": "SEED=1"}, "--env SEED=1 has no effect without --tpu"),
            ({"downcast_bf16": "true"}, "--downcast_bf16 has no effect without --tpu"),
            (
                {"fp8_margin": "2", "mixed_precision": "bf16"},
                "--fp8_margin 2 has no effect without --mixed_precision fp8",
            ),
            ({"main_process_ip": "10.0.0.1"}, "--main_process_ip 10.0.0.1 has no effect on one machine"),
        ],
    )
    def test_options_of_other_kinds_of_runs_are_noted(self, plan, options: dict[str, str], note: str) -> None:
        assert [text.split(". ")[0] for text in _without_effect(plan({}, **options))] == [note]

    def test_options_that_have_an_effect_are_not_noted(self, plan) -> None:
        machines = {"num_machines": "2", "machine_rank": "0", "main_process_ip": "10.0.0.1"}
        for options in (machines, {"fp8_margin": "2", "mixed_precision": "fp8"}, {"fp8_margin": "2"}):
            assert not _without_effect(plan({}, **options))
        # Other tools write these into every file.
        config = "main_training_function: main\ntpu_env: []\ndowncast_bf16: 'no'\nmixed_precision: bf16\n"
        assert not _without_effect(plan({}, config=config))

    def test_a_run_of_its_own_in_a_rank_of_another_launcher_is_noted(self, plan) -> None:
        rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0", "MASTER_PORT": "29500"}
        made = plan(rank, cpu="true")
        assert made.num_processes == 1 and made.notes[-1].startswith("RANK=1 and WORLD_SIZE=2 of another launcher")
        machines = {"num_machines": "2", "machine_rank": "1", "main_process_ip": "job-0", "cpu": "true"}
        for others in (plan({"RANK": "0", "WORLD_SIZE": "1"}, cpu="true"), plan(rank, **machines)):
            assert not [note for note in others.notes if "another launcher" in note]

    def test_another_number_of_processes_is_refused(self, plan) -> None:
        with pytest.raises(ConfigurationError, match="--num_processes 8.*started 4 launchers, 2 on"):
            plan(TASKS, num_processes="8")

    def test_the_address_of_rank_0_is_missing(self, plan) -> None:
        made = plan({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4"})
        with pytest.raises(ConfigurationError, match="started 4 ranks on 2 nodes.*rank 0"):
            choose_launcher(made).commands(made)


class TestBatch:
    """A batch script, or the shell of salloc, where srun has not been called."""

    def test_a_launcher_is_started_on_each_node(self, plan) -> None:
        made = plan(
            BATCH,
            config="num_machines: 2\nmachine_rank: 0\nmain_process_ip: gpu07\n",
            num_processes="4",
            mixed_precision="bf16",
        )
        (start,) = choose_launcher(made).commands(made)
        assert made.mode is LaunchMode.SRUN and start.command[:4] == [
            "srun",
            "--nodes=2",
            "--ntasks=2",
            "--ntasks-per-node=1",
        ]
        assert (
            start.command[-6:-2] == ["accel_launch", "launch", "--num_processes=4", "--mixed_precision=bf16"]
            and start.command[-1] == "a"
        )

    def test_the_requested_tasks_are_used(self, plan) -> None:
        asked = {**BATCH, "SLURM_TASKS_PER_NODE": "3(x2)", "SLURM_NTASKS": "6"}
        (start,) = choose_launcher(plan(asked)).commands(plan(asked))
        assert plan(asked).num_processes == 6 and start.environment == {"ACCEL_LAUNCH_TASKS_PER_NODE": "3"}
        assert plan({**STEP, "ACCEL_LAUNCH_TASKS_PER_NODE": "3"}).num_processes == 6
        assert plan({**STEP, "ACCEL_LAUNCH_TASKS_PER_NODE": "3"}, gpus=2).num_processes == 4, (
            "GPUs are counted where there are any"
        )
        assert "one per task of the SLURM job" in plan(asked).notes[0]

    def test_one_node(self, plan) -> None:
        here = {**BATCH, "SLURM_JOB_NODELIST": "gpu07"}
        assert plan(here).context.role is Role.ALONE
        assert (
            plan({name: value for name, value in here.items() if name != "SLURMD_NODENAME"}).mode is LaunchMode.SRUN
        ), "the login node"

    @pytest.mark.parametrize(
        "options", [{"num_machines": "1"}, {"machine_rank": "0", "num_machines": "2", "main_process_ip": "h"}]
    )
    def test_with_given_machines_no_launchers_are_started(self, plan, options) -> None:
        assert plan(BATCH, **options).mode is LaunchMode.LOCAL

    def test_some_of_the_nodes(self, plan) -> None:
        three = {**BATCH, "SLURM_JOB_NODELIST": "n[1-3]"}
        made = plan(three, num_machines="2")
        assert choose_launcher(made).commands(made)[0].command[1] == "--nodes=2"

    def test_processes_that_cannot_be_divided_evenly(self, plan) -> None:
        with pytest.raises(ConfigurationError, match="--num_processes 3 cannot.*the 2 available"):
            plan(BATCH, num_processes="3")

    def test_srun_is_missing(self, plan, monkeypatch, tmp_path) -> None:
        made = plan(BATCH)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ConfigurationError, match="srun is not on PATH"):
            choose_launcher(made).run(made)


class TestPods:
    """A launcher in each pod of an indexed Job, a JobSet or a TrainJob, with the variables of their controllers."""

    @pytest.fixture(autouse=True)
    def named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("socket.gethostname", lambda: "train-node-0-1")
        # As in the pod's /etc/hosts, which lists the full name first.
        monkeypatch.setattr("socket.getfqdn", lambda name: f"{name}.train.ml.svc.cluster.local")

    def test_rank_and_address_come_from_index_and_name(self, plan) -> None:
        made = plan({"JOB_COMPLETION_INDEX": "1"}, num_machines="2", num_processes="4")
        assert (made.context.role, made.context.starter, made.local_processes) == (Role.NODE, "kubernetes", 2)
        options = made.rendezvous
        assert (options.machine_rank, options.main_process_ip) == (1, "train-node-0-0.train.ml.svc.cluster.local")

    def test_what_kubeflow_sets(self, plan) -> None:
        variables = {
            "JOB_COMPLETION_INDEX": "1",
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "4",
            "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "train-node-0-0.train",
            "PET_MASTER_PORT": "29400",
        }
        made = plan(variables)
        options = made.rendezvous
        assert (made.num_machines, made.num_processes, made.local_processes) == (2, 8, 4)
        assert (options.machine_rank, options.main_process_ip) == (1, "train-node-0-0.train")
        assert options.main_process_port == 29400

    def test_a_single_pod_and_other_jobs_are_left_alone(self, plan) -> None:
        """The pods of an indexed Job may as well have nothing to do with each other."""
        made = plan({"JOB_COMPLETION_INDEX": "3"}, num_processes="2")
        assert (made.context.role, made.num_machines, made.num_processes) == (Role.ALONE, 1, 2)

    def test_options_override_the_pod(self, plan) -> None:
        made = plan({"JOB_COMPLETION_INDEX": "1"}, num_machines="2", machine_rank="0", main_process_ip="me")
        assert (made.rendezvous.machine_rank, made.rendezvous.main_process_ip) == (0, "me")

    @pytest.mark.parametrize("name", ["train-node-0-1", "train-node-0-2.train.ml"])
    def test_a_pod_that_others_cannot_find(self, plan, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setattr("socket.getfqdn", lambda _: name)
        variables = {"JOB_COMPLETION_INDEX": "1"}
        with pytest.raises(ConfigurationError, match="index 1 of 2, but it is not called NAME-1 in the domain"):
            plan(variables, num_machines="2")
        made = plan(variables, num_machines="2", config="main_process_ip: train-first\n")
        assert (made.rendezvous.machine_rank, made.rendezvous.main_process_ip) == (1, "train-first")

    def test_a_name_that_never_resolves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first pod is waited for; elsewhere a name that does not exist is an error at once."""

        def unknown(*_: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr("socket.getaddrinfo", unknown)
        monkeypatch.setattr(checks, "_NAME_SECONDS", 0.0)
        options = RendezvousOptions(main_process_ip="train-0.train")
        with pytest.raises(ConfigurationError, match=r"--main_process_ip 'train-0.train' is not a known host"):
            checks.check_rendezvous(options, 2)
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
        with pytest.raises(
            ConfigurationError, match=r"train-0.train did not resolve within 0 s: .* `kubectl get pods`"
        ):
            checks.check_rendezvous(options, 2)


SKY_NODE = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "2",
}


class TestSkyPilot:
    """A launcher on each node of a task."""

    def test_rank_and_address(self, plan) -> None:
        made = plan(SKY_NODE, gpus=4)
        assert (made.context.role, made.context.starter) == (Role.NODE, "skypilot")
        assert (made.num_machines, made.num_processes, made.local_processes) == (2, 4, 2), "GPUs that were asked for"
        assert (made.rendezvous.machine_rank, made.rendezvous.main_process_ip) == (1, "10.0.0.4")

    def test_missing_gpus_are_an_error(self, plan) -> None:
        with pytest.raises(ConfigurationError, match=r"asked for 2 GPU\(s\) on each node .* but 1 can be seen here"):
            plan(SKY_NODE, gpus=1)
        assert plan({**SKY_NODE, "ACCELERATE_USE_CPU": "true"}).num_processes == 2
        assert plan(SKY_NODE, gpus=1, num_processes="2").local_processes == 1

    def test_a_single_node(self, plan) -> None:
        made = plan({**SKY_NODE, "SKYPILOT_NODE_IPS": "10.0.0.4", "SKYPILOT_NODE_RANK": "0"}, gpus=2)
        assert (made.context.role, made.num_machines, made.num_processes) == (Role.ALONE, 1, 2)

    def test_a_rank_is_missing(self, plan) -> None:
        with pytest.raises(ConfigurationError, match="SKYPILOT_NODE_IPS is set but SKYPILOT_NODE_RANK is not"):
            plan({"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"})
