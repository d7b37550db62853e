"""Turns settings into a launch plan: which processes to start here, with which variables. Starts nothing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from accel_state.errors import ConfigurationError, require
from accel_state.humanize import counted
from accel_state.options.launch import HardwareOptions, ScriptOptions
from accel_state.options.registry import all_options
from accel_state.options.rendezvous import RendezvousOptions
from accel_state.options.resolution import Resolution, Source
from accel_state.options.resources import MachineRange
from accel_state.ports import loopback_variables

from .accelerators.registry import VisibleDevices, find_visible
from .config.read import load_settings
from .cpus import check_process_count, default_cpu_processes, usable_cores
from .entrypoint import Entrypoint, find_entrypoint
from .hostfile import read_pool
from .launch_context import (
    LaunchContext,
    LaunchMode,
    Role,
    choose_mode,
    count_machines,
    detect_context,
    find_hosts,
    with_node,
    with_values,
)
from .torchrun_options import with_torchrun_options

# Options of the agent, without effect where another program starts the ranks.
_AGENT_OPTIONS: tuple[str, ...] = ("tee", "redirects", "log_dir", "local_ranks_filter", "max_restarts")
# Those that --ft, which has no agents either, neither uses nor refuses.
_WITHOUT_REPLICAS: tuple[str, ...] = ("role", "rdzv_id", "monitor_interval", "shutdown_timeout")
_WITHOUT_REPLICAS += ("log_line_prefix_template",)
_AGENT_OPTIONS += (*_WITHOUT_REPLICAS, "rdzv_conf", "machine_timeout")
# Of --rdzv_conf: "timeout" is another name of "join_timeout"; the last is of a range of machines.
_RENDEZVOUS_SETTINGS = ("timeout", "join_timeout", "last_call_timeout")


@dataclass(frozen=True)
class LaunchPlan:
    """What this machine starts.

    Attributes:
        entrypoint: script, module or executable.
        num_processes: processes over all machines.
        num_machines: machines.
        local_processes: processes of this machine.
        environment: variables that the processes get on top of those of the launcher.
        rendezvous: how the machines meet.
        quiet: whether notes are suppressed.
        debug: whether the log of the agent is shown.
        notes: decisions to tell the user.
        mode: which launcher starts the processes.
        settings: every option.
        context: where this launcher runs.
    """

    entrypoint: Entrypoint
    num_processes: int
    num_machines: int
    local_processes: int
    environment: Mapping[str, str]
    rendezvous: RendezvousOptions
    quiet: bool
    debug: bool
    notes: Sequence[str]
    mode: LaunchMode
    settings: Resolution
    context: LaunchContext

    @property
    def needs_agent(self) -> bool:
        """True if a launcher must supervise the processes: several, restartable, or with output kept in files."""
        options, settings = self.rendezvous, self.settings
        keeps_output = options.tee != "0" or options.log_dir is not None or settings["redirects"] not in (None, "0")
        keeps_output = keeps_output or settings["local_ranks_filter"] not in (None, "0")
        return self.num_processes > 1 or options.max_restarts > 0 or keeps_output

    def full_environment(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return all variables of a process, except those of its rank."""
        return {**(os.environ if environ is None else environ), **self.environment}


def make_plan(
    settings: Resolution, script: str, script_args: Sequence[str], environ: Mapping[str, str] | None = None
) -> LaunchPlan:
    """Decide what to start.

    Raises:
        ConfigurationError: settings contradict one another, or ask for what this machine does not have.
    """
    variables = dict(os.environ if environ is None else environ)
    context = detect_context(settings, variables)
    settings = with_node(settings, context)
    if settings["standalone"] or settings["nproc_per_node"] or settings["rdzv_endpoint"]:
        settings = with_torchrun_options(settings, context, variables)
    mode = choose_mode(settings, context)
    script_options = settings.group(ScriptOptions)
    entrypoint = find_entrypoint(script_options, script, script_args)
    environment, hosts = settings.environment(), None
    if mode is LaunchMode.LOCAL and (hosts := find_hosts(settings, variables)) is not None:
        settings = with_values(settings, hosts.settings, f"the {hosts.kind} runtime")
        environment |= hosts.variables
    on_cpu, counts = _uses_cpu(settings), _counts_of_settings(settings, context, mode)
    if not mode.starts_every_machine:
        _check_rendezvous(settings)
    # All settings are known and checked. What follows asks this machine for its packages and devices.
    if script_options.as_accelerate:
        compat = require("accel_compat", purpose="--as-accelerate", install="accel-compat")
        path = (str(compat.shim_path()), variables.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if not on_cpu and settings["cpu"]:
        environment["ACCELERATE_USE_CPU"] = "false"
    no_devices = on_cpu or mode.counts_devices_remotely
    if hosts is not None:
        visible = VisibleDevices(hosts.total // settings["num_machines"], None, hosts.kind)
    else:
        visible = VisibleDevices(0, None) if no_devices else _select_devices(settings, variables, environment)
    total, local, notes = (*counts, []) if counts else _counts_of_devices(settings, context, on_cpu, visible)
    if not mode.starts_every_machine:
        _check_local_ranks(settings, local)
        if settings["multi_gpu"] and not on_cpu:
            _check_devices(settings, local, visible)
    if mode is LaunchMode.LOCAL and not settings["oversubscribe"]:
        check_process_count(local, visible.count, settings.where("num_processes"), "give --oversubscribe")
    replicas = settings["num_replicas"] + settings["num_spares"] if settings["ft"] else 1
    sharing = replicas * local
    if max(total, sharing) > 1 and not settings.is_set("num_cpu_threads_per_process"):
        environment["OMP_NUM_THREADS"] = str(max(1, usable_cores() // sharing))
    if _is_alone(settings, context, mode):
        environment |= {name: value for name, value in loopback_variables().items() if not variables.get(name)}
    return LaunchPlan(
        entrypoint=entrypoint,
        num_processes=total,
        num_machines=settings["num_machines"],
        local_processes=local,
        environment=environment,
        rendezvous=settings.group(RendezvousOptions),
        quiet=script_options.quiet,
        debug=settings["debug"],
        notes=(*notes, *_unused_options(settings, mode, context, variables)),
        mode=mode,
        settings=settings,
        context=context,
    )


def plan_from_args(args: argparse.Namespace) -> LaunchPlan:
    """Return the launch plan for options of ``accel launch`` by name, with ``training_script``."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    if not given.get("training_script"):
        raise ConfigurationError("args has no training_script. Set it to the path of the script.")
    settings = load_settings({name: value for name, value in given.items() if name in all_options()})
    return make_plan(settings, str(given["training_script"]), list(given.get("training_script_args", ())))


def _unused_options(
    settings: Resolution, mode: LaunchMode, context: LaunchContext, variables: Mapping[str, str]
) -> list[str]:
    """Return notes about command-line options without effect in this run; a file may serve several kinds of runs.

    Settings of torch's rendezvous that the launchers do not read have none in any run, nor has the rank of a process
    that torchrun or an operator of Kubernetes started.
    """
    notes = []
    rank, world_size = variables.get("RANK"), variables.get("WORLD_SIZE", "1")
    if rank and world_size != "1" and mode is LaunchMode.LOCAL and settings["num_machines"] == 1:
        notes.append(
            f"RANK={rank} and WORLD_SIZE={world_size} of another launcher have no effect: this command starts a run of "
            "its own. To join several machines, give --num_machines, --machine_rank and --main_process_ip"
        )
    for names, where in _without_effect(settings, mode, context):
        for setting in map(settings.settings.__getitem__, names):
            if setting.source is Source.COMMAND_LINE and setting.value != setting.option.default:
                notes.append(f"{setting.where} has no effect {where}")
    for entry in filter(None, settings["rdzv_conf"].split(",")):
        key, known = entry.partition("=")[0].strip(), ", ".join(_RENDEZVOUS_SETTINGS)
        if key not in _RENDEZVOUS_SETTINGS:
            notes.append(f"{key} of {settings.where('rdzv_conf')} has no effect: the launchers read {known}")
    return notes


def _without_effect(
    settings: Resolution, mode: LaunchMode, context: LaunchContext
) -> Iterator[tuple[Sequence[str], str]]:
    """Yield names of options, and why they have no effect in this run."""
    if settings["ft"]:
        why = "with --ft, whose replicas watch each other: see --replica_timeout and --heartbeat_timeout"
        yield _WITHOUT_REPLICAS, why
    elif mode in (LaunchMode.RANK, LaunchMode.MPIRUN, LaunchMode.DEEPSPEED):
        starter = context.starter if mode is LaunchMode.RANK else mode.value
        why = f"on ranks that {starter} starts: start one launcher on each machine, which starts the ranks there"
        yield _AGENT_OPTIONS, why
    elif _is_alone(settings, context, mode):
        yield ("main_process_ip",), "on one machine. For several, give --num_machines"
    if _uses_cpu(settings):
        yield ("gpu_ids",), f"with {settings.where('cpu')}"


def _counts_of_settings(settings: Resolution, context: LaunchContext, mode: LaunchMode) -> tuple[int, int] | None:
    """Return the processes in total and of this machine, as far as no device decides about them; else None."""
    if context.role is Role.RANK and context.process is not None:
        return context.process.world_size, context.process.local_world_size
    if settings["ft"]:
        processes = settings["processes_per_replica"]
        return processes, processes  # of each replica
    if mode.counts_devices_remotely:
        count = settings["num_processes"] or 1
        return count, count
    if mode is LaunchMode.DEEPSPEED:
        slots = [len(slots) for slots in read_pool(settings).values()]
        return sum(slots), max(slots)
    machines, total = count_machines(settings, context), settings["num_processes"]
    if total is None:
        return None
    if total % machines:
        matches = settings["num_machines"] == machines
        machines_text = settings.where("num_machines") if matches else f"the {machines} available machines"
        raise ConfigurationError(
            f"{settings.where('num_processes')} cannot be divided evenly over {machines_text}. num_processes counts "
            "the processes of all machines: give a multiple of the number of machines."
        )
    return total, total // machines


def _counts_of_devices(
    settings: Resolution, context: LaunchContext, on_cpu: bool, visible: VisibleDevices
) -> tuple[int, int, list[str]]:
    """Return the processes in total, processes of this machine, and a note."""
    machines = count_machines(settings, context)
    on_cores = machines == 1 and settings["distributed_type"] == "MULTI_CPU" and not context.tasks_per_node
    asked = context.gpus_per_node if context.gpus_per_node and not on_cpu else None
    if asked is not None and visible.count < asked:
        raise ConfigurationError(
            f"SkyPilot was asked for {asked} GPU(s) on each node (SKYPILOT_NUM_GPUS_PER_NODE), but {visible.count} can "
            "be seen here. Check the driver and the image, or give --num_processes."
        )
    total = (asked or visible.count or context.tasks_per_node or 1) * machines
    reason = _count_reason(context, on_cpu, visible)
    if on_cores and not visible.count:
        total, reason = default_cpu_processes(), "one per NUMA node, at least two; distributed_type is MULTI_CPU"
    most = "up to " if isinstance(settings["num_machines"], MachineRange) else ""
    note = f"starting {most}{counted(total, 'process')} ({reason}); set --num_processes to change it"
    return total, total // machines, [note]


def _count_reason(context: LaunchContext, on_cpu: bool, visible: VisibleDevices) -> str:
    if visible.count:
        return f"one per visible {visible.kind}"
    cause = "--cpu is set" if on_cpu else "no GPU is visible"
    return f"one per task of the SLURM job, {cause}" if context.tasks_per_node else f"one per machine, {cause}"


def _is_alone(settings: Resolution, context: LaunchContext, mode: LaunchMode) -> bool:
    """Return True if all processes of the run are on this machine."""
    if mode is LaunchMode.RANK and context.process is not None:
        return context.process.num_nodes == 1
    return mode is LaunchMode.LOCAL and int(settings["num_machines"]) == 1


def _uses_cpu(settings: Resolution) -> bool:
    cpu, gpus = settings.settings["cpu"], settings.settings["multi_gpu"]
    if not (cpu.value and gpus.value):
        return bool(cpu.value)
    if cpu.source is gpus.source:
        raise ConfigurationError(f"{cpu.where} and {gpus.where} contradict each other. Give one of them.")
    return cpu.source.strength > gpus.source.strength


def _select_devices(settings: Resolution, variables: Mapping[str, str], environment: dict[str, str]) -> VisibleDevices:
    """Apply --gpu_ids to the environment, and return the devices that are visible then."""
    ids = settings.group(HardwareOptions).gpu_ids
    if ids is None or ids == "all":
        return find_visible(variables)
    unrestricted = {name: value for name, value in variables.items() if not name.endswith("_VISIBLE_DEVICES")}
    installed = find_visible(unrestricted)
    if installed.variable is None:
        raise ConfigurationError(f"{settings.where('gpu_ids')}: this machine has no GPU. Leave it out, or give --cpu.")
    visible = find_visible({**unrestricted, installed.variable: ids})
    if visible.count < len(ids.split(",")):
        raise ConfigurationError(
            f"{settings.where('gpu_ids')}: this machine has {installed.count} GPU(s), with ids 0 to "
            f"{installed.count - 1}."
        )
    environment[installed.variable] = ids
    return visible


def _check_devices(settings: Resolution, local: int, visible: VisibleDevices) -> None:
    if not visible.count:
        raise ConfigurationError(
            f"{settings.where('multi_gpu')}: no GPU is visible on this machine. Use --cpu to run on the CPU."
        )
    if local > visible.count:
        raise ConfigurationError(
            f"{settings.where('multi_gpu')}: {local} processes on this machine need {local} GPUs, but {visible.count} "
            f"are visible. Give --num_processes {visible.count * settings['num_machines']}, or make more GPUs visible."
        )


def _check_rendezvous(settings: Resolution) -> None:
    options, machines = settings.group(RendezvousOptions), settings["num_machines"]
    if options.machine_rank >= machines:
        raise ConfigurationError(
            f"{settings.where('machine_rank')}: with {machines} machine(s), ranks go from 0 to {machines - 1}. "
            "Set --num_machines to the number of machines, or correct the rank."
        )
    if machines > 1 and options.main_process_ip is None:
        raise ConfigurationError(
            f"{settings.where('num_machines')} needs --main_process_ip, the address of the machine of rank 0."
        )
    given = options.rdzv_backend == "static" and not isinstance(machines, MachineRange)
    if machines > 1 and given and not settings.is_set("machine_rank"):
        raise ConfigurationError(
            f"{settings.where('num_machines')} needs --machine_rank on every machine: 0 on the first, 1 on the second, "
            "and so on. Or let the machines agree on ranks: --rdzv_backend c10d."
        )
    if machines > 1 and options.main_process_port == 0:
        raise ConfigurationError(
            f"{settings.where('main_process_port')}: several machines need the same port. Give a free port of "
            f"{options.main_process_ip}."
        )


def _check_local_ranks(settings: Resolution, local: int) -> None:
    for name in ("tee", "redirects", "local_ranks_filter"):
        value = settings[name] or ""
        listed = value.split(",") if ":" in value or (value and name == "local_ranks_filter") else ()
        if any(int(entry.partition(":")[0]) >= local for entry in listed):
            raise ConfigurationError(f"{settings.where(name)}: this machine has local ranks 0 to {local - 1}.")
