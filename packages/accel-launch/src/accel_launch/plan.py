"""From settings to a plan: how many processes here, with which variables, meeting where. Nothing is started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options import HardwareOptions, RendezvousOptions, Resolution, ScriptOptions, Setting, Source

from .accelerators.registry import Visible, find_visible
from .cpus import usable_cores
from .deepspeed_pool import read_pool
from .entrypoint import Target, find_target
from .hostfile import read_hostfile
from .launch_context import Place, Role, find_place, rendezvous_of
from .launch_mode import Kind, ask, choose_kind

STRENGTH = [Source.COMMAND_LINE, Source.ENVIRONMENT, Source.CONFIG_FILE, Source.DEFAULT]


@dataclass(frozen=True)
class Plan:
    """What this machine will start.

    Attributes:
        target: script, module or executable.
        num_processes: processes over all machines.
        num_machines: machines.
        local_processes: processes of this machine.
        environment: variables that the processes get on top of those of the launcher; a value of None unsets one.
        rendezvous: how they meet.
        quiet: whether the launcher keeps its notes to itself.
        debug: whether the log of the elastic agent is shown.
        notes: what was decided for the user, to be shown.
        kind: the way of starting them.
        settings: every option, for launchers that have some of their own.
        place: where this launcher itself runs.
    """

    target: Target
    num_processes: int
    num_machines: int
    local_processes: int
    environment: Mapping[str, str]
    rendezvous: RendezvousOptions
    quiet: bool = False
    debug: bool = False
    notes: Sequence[str] = field(default_factory=tuple)
    kind: Kind = Kind.LOCAL
    settings: Resolution = field(default_factory=lambda: Resolution((), {}))
    place: Place = field(default_factory=Place)

    def asks(self, name: str) -> Any:
        """The value of an option; None where no group of options that is installed declares it."""
        return ask(self.settings, name)

    @property
    def is_watched(self) -> bool:
        """Whether somebody must stay beside the processes: they are several, or are to be started again, or their
        output is kept.
        """
        options = self.rendezvous
        return self.num_processes > 1 or options.max_restarts > 0 or options.tee != "0" or options.log_dir is not None

    def full_environment(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """All variables of a process, ranks apart."""
        return {**(os.environ if environ is None else environ), **self.environment}


def make_plan(
    settings: Resolution, script: str, script_args: Sequence[str], environ: Mapping[str, str] | None = None
) -> Plan:
    """Decide what to start.

    Args:
        settings: all options.
        environ: variables of the launcher; left out, those of this process.

    Raises:
        ConfigurationError: settings contradict one another, or ask for what this machine does not have.
    """
    variables = dict(os.environ if environ is None else environ)
    place = find_place(settings, variables)
    settings = _settle(settings, place)
    kind = choose_kind(settings, place)
    _check_effect(settings, kind, place)
    script_options = settings.group(ScriptOptions)
    target = find_target(script_options, script, script_args)
    exported = settings.environment()
    on_cpu = _stays_on_cpu(settings)
    if not on_cpu and settings["cpu"]:
        exported["ACCELERATE_USE_CPU"] = "false"
    elsewhere = kind.counts_devices_there
    visible = Visible(0, None) if on_cpu or elsewhere else _choose_devices(settings, variables, exported)
    total, local, notes = _count(settings, place, kind, on_cpu, visible)
    if not kind.starts_every_machine:
        _check_devices(settings, on_cpu, local, visible)
        _check_rendezvous(settings, local)
    if total > 1 and not settings.is_set("num_cpu_threads_per_process"):
        exported["OMP_NUM_THREADS"] = str(max(1, usable_cores() // local))
    return Plan(
        target=target,
        num_processes=total,
        num_machines=settings["num_machines"],
        local_processes=local,
        environment=exported,
        rendezvous=settings.group(RendezvousOptions),
        quiet=script_options.quiet,
        debug=settings["debug"],
        notes=tuple(notes),
        kind=kind,
        settings=settings,
        place=place,
    )


def _check_effect(settings: Resolution, kind: Kind, place: Place) -> None:
    """Refuse what a user typed for the agent that watches over processes, where another program starts them. A file may
    be for all ways.
    """
    if kind not in (Kind.RANK, Kind.MPIRUN, Kind.DEEPSPEED):
        return
    starter = place.starter if kind is Kind.RANK else kind.value
    for name in ("tee", "log_dir", "max_restarts", "monitor_interval", "rdzv_conf", "role"):
        setting = settings.settings[name]
        if setting.source is Source.COMMAND_LINE and setting.value != setting.option.default:
            raise ConfigurationError(
                f"{setting.where} has no effect on ranks that {starter} starts. Leave it out, or start one launcher "
                "on each machine, which "
                "starts the ranks there itself."
            )


def _settle(settings: Resolution, place: Place) -> Resolution:
    """The settings with what the starter of this launcher has decided."""
    settled = dict(settings.settings)
    for name, value in rendezvous_of(place, settings).items():
        settled[name] = replace(
            settled[name], value=value, source=Source.ENVIRONMENT, where=f"{name} {value} of {place.starter}"
        )
    return replace(settings, settings=settled)


def _count(
    settings: Resolution, place: Place, kind: Kind, on_cpu: bool, visible: Visible
) -> tuple[int, int, list[str]]:
    """Processes in all, processes of this machine, and notes."""
    if place.role is Role.RANK and place.rank is not None:
        return place.rank.world_size, place.rank.local_world_size, []
    if kind.counts_devices_there:
        # How many there are is found out where they are.
        return settings["num_processes"] or 1, settings["num_processes"] or 1, []
    if kind is Kind.DEEPSPEED:
        slots = [len(slots) for slots in read_pool(settings).values()]
        return sum(slots), max(slots), []
    total, notes = _count_processes(settings, place, on_cpu, visible)
    return total, _split_over_machines(settings, total, place), notes


def stronger(settings: Resolution, first: str, second: str) -> Setting | None:
    """Which of two contradicting options counts: the one set closer to the command line; None where both were set in
    the same way.
    """
    one, other = settings.settings[first], settings.settings[second]
    if one.source is other.source:
        return None
    return min(one, other, key=lambda setting: STRENGTH.index(setting.source))


def _stays_on_cpu(settings: Resolution) -> bool:
    if not (settings["cpu"] and settings["multi_gpu"]):
        return bool(settings["cpu"])
    winner = stronger(settings, "cpu", "multi_gpu")
    if winner is None:
        raise ConfigurationError(
            f"{settings.where('cpu')} and {settings.where('multi_gpu')} contradict each other. Give one of them."
        )
    return winner.option.name == "cpu"


def _choose_devices(settings: Resolution, variables: Mapping[str, str], exported: dict[str, str]) -> Visible:
    """Apply --gpu_ids, and say which devices are visible then."""
    ids = settings.group(HardwareOptions).gpu_ids
    if ids is None or ids == "all":
        return find_visible(variables)
    hidden = {name: value for name, value in variables.items() if not name.endswith("_VISIBLE_DEVICES")}
    installed = find_visible(hidden)
    if installed.variable is None:
        raise ConfigurationError(f"{settings.where('gpu_ids')}: this machine has no GPU. Leave it out, or give --cpu.")
    wanted = len(ids.split(","))
    visible = find_visible({**hidden, installed.variable: ids})
    if visible.count < wanted:
        raise ConfigurationError(
            f"{settings.where('gpu_ids')}: this machine has {installed.count} GPU(s), with the ids 0 to "
            f"{installed.count - 1}."
        )
    exported[installed.variable] = ids
    return visible


def _count_processes(settings: Resolution, place: Place, on_cpu: bool, visible: Visible) -> tuple[int, list[str]]:
    if settings["num_processes"] is not None:
        return settings["num_processes"], []
    machines = _machines(settings, place)
    total = (visible.count or place.tasks_per_node or 1) * machines
    plural = "process" if total == 1 else "processes"
    return total, [
        f"starting {total} {plural} ({_reason(place, on_cpu, visible)}); --num_processes sets another number"
    ]


def _reason(place: Place, on_cpu: bool, visible: Visible) -> str:
    if visible.count:
        return "one for each visible GPU"
    why = "as asked" if on_cpu else "no GPU is visible"
    return (
        f"one for each task of the SLURM job, {why}"
        if place.tasks_per_node
        else f"one for each machine on the CPU, {why}"
    )


def _machines(settings: Resolution, place: Place) -> int:
    """Machines that take part: in a batch script of SLURM the nodes of the allocation, with a hostfile those that it
    lists.
    """
    hostfile = ask(settings, "mpirun_hostfile")
    if hostfile and place.role in (Role.ALONE, Role.BATCH):
        hosts = read_hostfile(hostfile, settings.where("mpirun_hostfile"))
        if settings["num_machines"] == 1:
            return len(hosts)
        if settings["num_machines"] > len(hosts):
            raise ConfigurationError(
                f"{settings.where('num_machines')}, but the hostfile lists {len(hosts)}: "
                f"{', '.join(host.name for host in hosts)} "
                f"({settings.where('mpirun_hostfile')}). Add the others to it, or leave num_machines out."
            )
    if place.role is Role.BATCH and settings["num_machines"] == 1:
        return len(place.hosts)
    return int(settings["num_machines"])


def _split_over_machines(settings: Resolution, total: int, place: Place) -> int:
    machines = _machines(settings, place)
    if total % machines:
        asked = (
            settings.where("num_machines")
            if settings["num_machines"] == machines
            else f"the {machines} machines that there are"
        )
        raise ConfigurationError(
            f"{settings.where('num_processes')} cannot be divided evenly over {asked}. "
            "Give a multiple of the number of machines: it counts the processes of all machines."
        )
    return int(total // machines)


def _check_devices(settings: Resolution, on_cpu: bool, local: int, visible: Visible) -> None:
    if on_cpu or not settings["multi_gpu"]:
        return
    if not visible.count:
        raise ConfigurationError(
            f"{settings.where('multi_gpu')}: no GPU is visible on this machine. Use --cpu to run on the CPU."
        )
    if local > visible.count:
        raise ConfigurationError(
            f"{settings.where('multi_gpu')}: {local} processes on this machine need as many GPUs, and {visible.count} "
            "can be seen. "
            f"Give --num_processes {visible.count * settings['num_machines']}, or make more GPUs visible."
        )


def _check_rendezvous(settings: Resolution, local: int) -> None:
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
    if machines > 1 and options.rdzv_backend == "static" and not settings.is_set("machine_rank"):
        raise ConfigurationError(
            f"{settings.where('num_machines')} needs --machine_rank on every machine: 0 on the first, 1 on the next, "
            "..."
        )
    if machines > 1 and options.main_process_port == 0:
        raise ConfigurationError(
            f"{settings.where('main_process_port')}: machines must agree on a port. Give a free port of "
            f"{options.main_process_ip}."
        )
    for entry in options.tee.split(",") if ":" in options.tee else ():
        if int(entry.partition(":")[0]) >= local:
            raise ConfigurationError(f"{settings.where('tee')}: this machine has the local ranks 0 to {local - 1}.")
