"""How the processes find one another, and what happens to their output and when one of them fails."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from .option import MORE_THAN_ONE, OptionGroup, option

_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")


def parse_streams(text: str) -> str:
    """Check which output streams are meant: 0 to 3 for all ranks, or RANK:STREAMS,... by local rank.

    Raises:
        ValueError: it is neither.
    """
    if not _STREAMS.fullmatch(text):
        raise ValueError(
            f"{text!r} is neither 0 (none), 1 (stdout), 2 (stderr), 3 (both) nor such numbers by local rank, as in "
            "0:3,1:2"
        )
    return text


def parse_port(text: str) -> int:
    """Check a port number.

    Raises:
        ValueError: not an integer from 0 to 65535.
    """
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError(f"{text!r} is not a port: an integer from 0 (any free port) to 65535")
    return int(text)


def parse_assignments(text: str) -> str:
    """Check ``key=value,key=value``.

    Raises:
        ValueError: an entry has no key or no value.
    """
    for entry in text.split(",") if text else ():
        key, sign, value = (part.strip() for part in entry.partition("="))
        if not (key and sign and value):
            raise ValueError(
                f"{entry!r} is not key=value; give a comma-separated list, such as timeout=600,join_timeout=300"
            )
    return text


@dataclass(frozen=True)
class RendezvousOptions(OptionGroup):
    """Rendezvous, restarts and log files."""

    title: ClassVar[str] = "several processes"
    description: ClassVar[str] = "Used where more than one process is started."

    machine_rank: int = option(
        0,
        kind=int,
        minimum=0,
        env="ACCELERATE_MACHINE_RANK",
        metavar="RANK",
        help="Rank of this machine, from 0 to num_machines - 1; with --rdzv_backend c10d the rendezvous assigns it.",
        question="What is the rank of this machine?",
        asked_when={"num_machines": (MORE_THAN_ONE,)},
    )
    main_process_ip: str | None = option(
        None,
        kind=str,
        env="ACCELERATE_MAIN_PROCESS_IP",
        metavar="HOST",
        help="Address or host name of the machine of rank 0.",
        question="What is the IP address of the machine that will host the main process?",
        asked_when={"num_machines": (MORE_THAN_ONE,)},
    )
    main_process_port: int | None = option(
        None,
        kind=int,
        parser=parse_port,
        env="ACCELERATE_MAIN_PROCESS_PORT",
        metavar="PORT",
        help="Port on the machine of rank 0. Left out, or 0: any free port on one machine, 29500 on several.",
        question="What is the port you will use to communicate with the main process?",
        asked_when={"num_machines": (MORE_THAN_ONE,)},
    )
    same_network: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_SAME_NETWORK",
        help="All machines are on one local network, so rank 0 need not be reachable by a public address.",
        question="Are all the machines on the same local network? Answer no if they are in a cloud or on different "
        "networks.",
        asked_when={"num_machines": (MORE_THAN_ONE,)},
        suggested=True,
    )
    rdzv_backend: str = option(
        "static",
        kind=str,
        choices=("static", "c10d"),
        env="ACCELERATE_RDZV_BACKEND",
        help="How machines meet: static, each with its --machine_rank, or c10d, which assigns ranks and survives "
        "restarts.",
        question="What rendezvous backend will you use?",
        asked_when={"num_machines": (MORE_THAN_ONE,)},
    )
    rdzv_conf: str = option(
        "",
        kind=str,
        parser=parse_assignments,
        env="ACCELERATE_RDZV_CONF",
        metavar="KEY=VALUE,...",
        help="Further settings of the rendezvous, such as timeout=600 (seconds).",
    )
    max_restarts: int = option(
        0,
        kind=int,
        minimum=0,
        env="ACCELERATE_MAX_RESTARTS",
        metavar="N",
        help="How often all processes are started again after one of them failed.",
    )
    monitor_interval: float = option(
        0.1,
        kind=float,
        minimum=0.001,
        env="ACCELERATE_MONITOR_INTERVAL",
        metavar="SECONDS",
        help="Seconds between two looks at the processes.",
    )
    tee: str = option(
        "0",
        kind=str,
        parser=parse_streams,
        short="-t",
        env="ACCELERATE_TEE",
        metavar="STREAMS",
        help="Output streams that go to a file in --log_dir as well as to the screen, there with the role and local "
        "rank before each line: "
        "1 stdout, 2 stderr, 3 both; or by local rank, such as 0:3,1:2.",
    )
    log_dir: str | None = option(
        None,
        kind=str,
        env="ACCELERATE_LOG_DIR",
        metavar="DIR",
        help="Folder for the files of --tee and for reports of failed ranks, one sub-folder for each start and rank. "
        "Left out, they are removed at the end.",
    )
    role: str = option(
        "default",
        kind=str,
        env="ACCELERATE_ROLE",
        metavar="NAME",
        help="Name of the processes' role: in ROLE_NAME, and before each line of --tee.",
    )
