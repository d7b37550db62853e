"""The processes of a run as actors of a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_state import run_token
from accel_state.env import all_variables
from accel_state.errors import ConfigurationError
from accel_state.humanize import counted
from accel_state.options import FaultToleranceOptions, Source
from accel_state.torchft_version import torchft_version

from ..entrypoint import Entrypoint
from ..launch_context import is_explicit
from ..launch_plan import LaunchPlan
from ..replica_plan import rank_variables as replica_ranks
from ..supervisor import GRACE_SECONDS, SignalWatch
from .base import CHOSEN_BY_CLUSTER, Launcher, MachineCommand
from .mpirun import forwarded_variables
from .ray_actors import RayJob
from .ray_cluster import Request, amounts, connected
from .ray_ft import run_replicas
from .ray_run import run_on_ray

_CHOSEN = (*(name for name in CHOSEN_BY_CLUSTER if name not in ("num_machines", "main_process_port")), "gpu_ids")


class RayLauncher(Launcher):
    """Starts an actor for each process, in a placement group."""

    def run(self, plan: LaunchPlan) -> int:
        machines, runtime_env = _machines(plan), plan.settings["ray_runtime_env"]
        if plan.settings["ft"]:
            torchft_version("--ft")
        given, screen = _resources(plan), (sys.stdout, sys.stderr)
        with SignalWatch() as watch, connected(plan.settings["ray"], runtime_env, plan.debug) as cluster:
            share = plan.settings["processes_per_replica"] if plan.settings["ft"] else 1
            request = Request.of(_count(plan), machines, _each(plan, given, cluster.resources()), share)
            brought = cluster.runtime_env()
            directory = None if brought.get("working_dir") else os.getcwd()
            given_there = brought.get("env_vars") or {}
            inherited = forwarded_variables(all_variables())
            job = RayJob(
                entrypoint=_brought(plan.entrypoint, runtime_env) if directory is None else plan.entrypoint,
                directory=directory,
                request=request,
                inherited={name: value for name, value in inherited.items() if name not in given_there},
                variables=_variables(plan),
                max_restarts=plan.rendezvous.max_restarts,
                grace_seconds=plan.option("shutdown_timeout") or GRACE_SECONDS,
                wait_seconds=plan.settings["ray_timeout"],
                silence_seconds=plan.rendezvous.machine_timeout,
                port=plan.rendezvous.main_process_port or None,
                role=plan.rendezvous.role,
                line_prefix=plan.option("log_line_prefix_template"),
                quiet=plan.quiet,
                screen=screen,
            )
            return run_replicas(plan, job, cluster, watch) if plan.settings["ft"] else run_on_ray(job, cluster, watch)

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """Return the command of each rank; Ray chooses the nodes when the run starts."""
        machines, given = _machines(plan), _resources(plan)
        command = plan.entrypoint.command(["python"])
        share = _count(plan) // (machines or 1)
        address = plan.settings["ray"]
        starts = []
        for machine in range(machines or 1):
            here = range(machine * share, (machine + 1) * share)
            ranks = [_known_variables(plan, rank, rank - here[0], machines) for rank in here]
            name = f"node {machine + 1} of {machines}" if machines else "nodes"
            text = f"{name} of the Ray cluster {address}"
            starts.append(MachineCommand(text, command, _variables(plan), ranks, _notes(plan, machines, given)))
        return starts


def _machines(plan: LaunchPlan) -> int | None:
    """Over how many machines the processes are spread; None if they are packed, on however many."""
    settings, count = plan.settings, "num_replicas" if plan.settings["ft"] else "num_processes"
    if settings[count] is None:
        raise ConfigurationError(
            f"{settings.where('ray')}: give --num_processes, the number of processes to start on the cluster."
        )
    # Each replica has a port of its own.
    for name in (*_CHOSEN, *(("main_process_port",) if settings["ft"] else ())):
        setting = settings.settings[name]
        if settings.is_set(name) and setting.value not in (setting.option.default, "all"):
            raise ConfigurationError(
                f"{setting.where} and {settings.where('ray')} cannot be combined: Ray chooses nodes, addresses and "
                "devices. Leave it out."
            )
    machines = settings["num_machines"]
    if _units(plan) % machines:
        spares = f" and {settings.where('num_spares')}" if settings["ft"] and settings["num_spares"] else ""
        raise ConfigurationError(
            f"{settings.where(count)}{spares} cannot be divided evenly over {settings.where('num_machines')}. Give a "
            "multiple of the number of machines."
        )
    # Every configuration file of one machine has this value.
    return machines if machines > 1 or is_explicit(settings, "num_machines") else None


def _units(plan: LaunchPlan) -> int:
    """Return what is divided over the machines: processes, or replicas."""
    settings = plan.settings
    return int(settings["num_replicas"] + settings["num_spares"] if settings["ft"] else plan.num_processes)


def _count(plan: LaunchPlan) -> int:
    """Return the processes of the run; those of all replicas."""
    return _units(plan) * int(plan.settings["processes_per_replica"] if plan.settings["ft"] else 1)


def _resources(plan: LaunchPlan) -> dict[str, float]:
    """Return the resources of a process that were given."""
    where = plan.settings.where("ray_resources")
    resources = dict(plan.settings["ray_resources"] or {})
    for name, amount in resources.items():
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 <= amount < 1e9:
            raise ConfigurationError(
                f'{where}: {name}: {amount!r} is not a number of at least 0. Give a mapping, such as {{"CPU": 4}}.'
            )
    if resources.get("GPU", 0) not in (0, 1):
        raise ConfigurationError(f"{where}: a process uses one GPU, or none. Give 1 or 0, and change num_processes.")
    return resources


def _each(plan: LaunchPlan, given: Mapping[str, float], cluster: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of a process: those that were given, one CPU, and a GPU if the cluster has any."""
    gpus = 1.0 if cluster.get("GPU") and not plan.settings["cpu"] else 0.0
    each = {"CPU": 1.0, "GPU": gpus, **given}
    if not each["GPU"]:
        del each["GPU"]
    return {name: amount for name, amount in each.items() if amount}


def _brought(entrypoint: Entrypoint, runtime_env: Mapping[str, Any] | None) -> Entrypoint:
    """Return the entrypoint as it is called in the directory that Ray brings to the nodes."""
    if entrypoint.kind == "module":
        return entrypoint
    directory = str((runtime_env or {}).get("working_dir") or ".")
    root = Path.cwd() if "://" in directory else Path(directory).expanduser().resolve()
    path = Path(entrypoint.name).resolve()
    if entrypoint.kind == "executable" and not path.is_relative_to(root):
        return entrypoint  # a program of the nodes
    if not path.is_relative_to(root):
        raise ConfigurationError(
            f"{entrypoint.name} is not in the directory that Ray brings to the nodes (working_dir: {directory}). Give "
            "a directory that contains it."
        )
    return replace(entrypoint, name=str(path.relative_to(root)))


def _variables(plan: LaunchPlan) -> dict[str, str]:
    """Return the variables of all ranks, without those that describe this machine."""
    # OMP_NUM_THREADS of a shell is for the cores of this machine; Ray sets it to the CPUs of each process.
    source = plan.settings.settings["num_cpu_threads_per_process"].source
    threads = source in (Source.COMMAND_LINE, Source.CONFIG_FILE)
    return {name: value for name, value in plan.environment.items() if threads or name != "OMP_NUM_THREADS"}


def _known_variables(plan: LaunchPlan, rank: int, local: int, machines: int | None) -> dict[str, str]:
    """Return the variables of a rank that are known before Ray has chosen the nodes."""
    if plan.settings["ft"]:
        of_replica = replica_ranks(plan.settings.group(FaultToleranceOptions))
        return {"ACCELERATE_FT_REPLICA": str(rank // len(of_replica)), **of_replica[rank % len(of_replica)]}
    variables = {"RANK": str(rank), "WORLD_SIZE": str(plan.num_processes)}
    if machines is not None:
        share = plan.num_processes // machines
        variables |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(share)}
        variables |= {"GROUP_RANK": str(rank // share), "GROUP_WORLD_SIZE": str(machines)}
    return variables


def _notes(plan: LaunchPlan, machines: int | None, given: Mapping[str, float]) -> list[str]:
    settings, options = plan.settings, plan.rendezvous
    each = amounts({"CPU": 1, **given})
    gpu = "" if "GPU" in given or settings["cpu"] else ", and a GPU if the cluster has any"
    strategy = "PACK: on as few nodes as possible" if machines is None else "STRICT_SPREAD: each bundle on another node"
    bundles = counted(machines or _units(plan), "bundle")
    notes = [
        f"each process: {each}{gpu}",
        f"placement group of {bundles}, {strategy}; waits up to {settings['ray_timeout']:g} s for free resources",
        "MASTER_ADDR, MASTER_PORT and the ranks of a node are known when Ray has chosen the nodes",
    ]
    runtime_env = settings["ray_runtime_env"]
    if runtime_env:
        shown = {name: sorted(value) if name == "env_vars" else value for name, value in runtime_env.items()}
        notes.append(f"Ray brings to the nodes: {', '.join(f'{name} {value}' for name, value in shown.items())}")
    else:
        notes.append(f"the script and the packages must be on the nodes, in the directory {os.getcwd()}")
    if settings["ft"]:
        notes.append("TORCHFT_LIGHTHOUSE: torchft's lighthouse, which this command starts on a port that is free then")
        notes.append(f"a secret that this command makes, in {run_token.VARIABLE}")
        notes.append("a replica that ends before the run does is restarted, while the others continue")
    elif options.max_restarts:
        notes.append(f"if a process, an actor or a node fails, all are restarted, up to {options.max_restarts} times")
    return notes
