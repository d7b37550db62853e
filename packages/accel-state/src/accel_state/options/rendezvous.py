"""Rendezvous of the processes, restarts after failures, their output, and mpirun."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from .declaration import GIVEN, MORE_THAN_ONE, NO_RANGE, OptionGroup, option

_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
_several = functools.partial(option, asked_when={"num_machines": (MORE_THAN_ONE,)})
_fixed = functools.partial(option, asked_when={"num_machines": (MORE_THAN_ONE, NO_RANGE)})


def parse_streams(text: str) -> str:
    """Check a choice of output streams: 0 to 3 for all ranks, or RANK:STREAMS,... by local rank."""
    if not _STREAMS.fullmatch(text):
        raise ValueError(
            f"{text!r} is neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both), nor a list of these by local rank, "
            "such as 0:3,1:2"
        )
    return text


def parse_assignments(text: str) -> str:
    """Check ``key=value,key=value``."""
    for entry in text.split(",") if text else ():
        key, sign, value = (part.strip() for part in entry.partition("="))
        if not (key and sign and value):
            raise ValueError(
                f"{entry!r} is not key=value; give a comma-separated list, such as timeout=600,join_timeout=300"
            )
    return text


# What would have no effect, or contradict the launcher, and the option to use.
_OWN_OPTIONS = {
    **dict.fromkeys(("rdzv_endpoint", "endpoint"), "--rdzv_endpoint HOST:PORT"),
    **dict.fromkeys(("rdzv_backend", "backend"), "--rdzv_backend"),
    **dict.fromkeys(("rdzv_id", "run_id"), "--rdzv_id"),
    **dict.fromkeys(("main_process_ip", "master_addr"), "--main_process_ip"),
    **dict.fromkeys(("main_process_port", "master_port"), "--main_process_port"),
    **dict.fromkeys(("min_nodes", "max_nodes", "nnodes", "num_machines"), "--num_machines"),
    **dict.fromkeys(("machine_rank", "node_rank", "rank"), "--machine_rank"),
}


def parse_rendezvous(text: str) -> str:
    """Check ``key=value,key=value``, without what other options set."""
    for entry in parse_assignments(text).split(","):
        key = entry.partition("=")[0].strip()
        if key in _OWN_OPTIONS:
            raise ValueError(f"{key} is not one of its settings; give {_OWN_OPTIONS[key]} instead")
    return text


def parse_host(text: str) -> str:
    """Return a host name or address; an IPv6 address may be in brackets."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not host:
        raise ValueError(f"{text!r} is not a host; give a name or an address, or leave the option out")
    return host


@dataclass(frozen=True)
class RendezvousOptions(OptionGroup):
    """Rendezvous, restarts and log files."""

    title = "several processes"
    description = "Used when more than one process is started."

    machine_rank: int = _fixed(
        0,
        minimum=0,
        also=("node_rank",),
        other_envs=("PET_NODE_RANK",),
        metavar="RANK",
        help="Rank of this machine, from 0 to num_machines - 1. Not needed with --rdzv_backend c10d, and with a range "
        "of machines, where it follows from the order of arrival.",
        question="What is the rank of this machine?",
    )
    main_process_ip: str | None = _several(
        parser=parse_host,
        also=("master_addr",),
        other_envs=("PET_MASTER_ADDR",),
        metavar="HOST",
        help="Address or host name of the machine with rank 0.",
        question="What is the IP address of the machine that will host the main process?",
    )
    main_process_port: int | None = _several(
        minimum=0,
        maximum=65535,
        also=("master_port",),
        other_envs=("PET_MASTER_PORT",),
        metavar="PORT",
        help="Port on the machine with rank 0. Left out, or 0: a free port on one machine, 29500 on several.",
        question="What is the port you will use to communicate with the main process?",
    )
    same_network: bool = _several(
        False,
        help="All machines are on one local network, so rank 0 does not need a public address.",
        question="Are all the machines on the same local network? Answer no if they are in a cloud or on different "
        "networks.",
        suggested=True,
    )
    rdzv_backend: str = _fixed(
        "static",
        choices=("static", "c10d"),
        help="static: each machine is given its --machine_rank; c10d: the launcher at the main address assigns ranks. "
        "Has no effect on a range of machines.",
        question="What rendezvous backend will you use?",
    )
    rdzv_conf: str = option(
        "",
        parser=parse_rendezvous,
        metavar="KEY=VALUE,...",
        help="Additional rendezvous settings, such as timeout=600 (seconds).",
    )
    max_restarts: int = option(
        0,
        minimum=0,
        help="How many times all processes are restarted after one has failed. With a range of machines, those that "
        "join or leave are not counted.",
    )
    machine_timeout: float = _several(
        30.0,
        minimum=0,
        metavar="SECONDS",
        help="Seconds after which a machine without a heartbeat is declared lost, and the processes of all machines "
        "end, or are restarted if --max_restarts allows it. 0: never.",
        question="After how many seconds without a sign of life should a machine be declared lost (0: never)?",
    )
    monitor_interval: float = option(
        0.1, minimum=0.001, metavar="SECONDS", help="Interval between two checks of the processes, in seconds."
    )
    tee: str = option(
        "0",
        parser=parse_streams,
        short="-t",
        metavar="STREAMS",
        help="Output streams that are also written to a file in --log_dir; on the screen, the role and local rank are "
        "prepended to each line. 1 stdout, 2 stderr, 3 both; or by local rank, such as 0:3,1:2.",
    )
    log_dir: str | None = option(
        metavar="DIR",
        help="Directory for the files of --tee and the error reports of failed ranks, with a subdirectory for each "
        "start and rank. Left out, the files are deleted at the end.",
    )
    role: str = option(
        "default",
        metavar="NAME",
        help="Role name of the processes, exported as ROLE_NAME and prepended to each line of --tee.",
    )


_mpirun = functools.partial(option, section="mpirun_config", prefix="mpirun_", env_prefix="ACCELERATE_MPIRUN_")


@dataclass(frozen=True)
class MpiOptions(OptionGroup):
    """mpirun of OpenMPI, Intel MPI (Hydra), MPICH or MVAPICH, depending on which is installed."""

    title = "MPI"

    hostfile: str | None = _mpirun(
        metavar="FILE",
        help="Start the processes with mpirun on the machines listed in this file, one per line.",
        question="Path of a hostfile, to start the processes with mpirun (leave it empty not to use mpirun)?",
        asked_when={"cpu": (True,), "num_machines": (MORE_THAN_ONE,)},
    )
    ccl: int | None = _mpirun(
        minimum=1,
        env="CCL_WORKER_COUNT",
        exported=True,
        help="Number of oneCCL worker threads per process.",
        question="How many oneCCL worker threads should each process have?",
        asked_when={"mpirun_hostfile": (GIVEN,)},
        suggested=1,
    )
