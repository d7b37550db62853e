"""Options that torchrun has too, under its names, beyond those that other groups declare."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from .declaration import OptionGroup, option
from .rendezvous import parse_streams

_ENDPOINT = re.compile(r"(\[[0-9a-fA-F:.%\w]+\]|[^\s:\[\]/]+)(:\d+)?")
_WORKERS = ("auto", "gpu", "cpu", "xpu")
_once = functools.partial(option, key=None, env=None)


def parse_workers(text: str) -> str:
    """Check a number of processes on each machine, or the devices that determine it."""
    if text in _WORKERS or (text.isascii() and text.isdigit() and int(text) > 0):
        return text
    raise ValueError(f"{text!r} is neither an integer of at least 1 nor one of {', '.join(_WORKERS)}")


def parse_endpoint(text: str) -> str:
    """Check ``HOST`` or ``HOST:PORT``; an IPv6 address is in brackets."""
    found = _ENDPOINT.fullmatch(text)
    if found is None or int((found[2] or ":0")[1:]) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT, such as host1:29500 or [fd00::1]:29500")
    return text


def parse_run_id(text: str) -> str:
    """Check the name of a run, which is a part of file names."""
    if not re.fullmatch(r"[\w.-]{1,100}", text):
        raise ValueError(f"{text!r} is not a name of at most 100 letters, digits, dots, - and _")
    return text


def parse_ranks(text: str) -> str:
    """Check a comma-separated list of local ranks."""
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entry.isascii() and entry.isdigit() for entry in entries):
        raise ValueError(f"{text!r} is not a comma-separated list of local ranks, such as 0,1")
    return ",".join(entries)


@dataclass(frozen=True)
class TorchrunOptions(OptionGroup):
    """Options with torchrun's names and meaning."""

    title = "torchrun"
    description = "Options of torchrun that say the same in another way, or that are used with several processes."

    nproc_per_node: str | None = _once(
        parser=parse_workers,
        other_envs=("PET_NPROC_PER_NODE",),
        metavar="N",
        help="Number of processes on each machine, in the place of --num_processes, which counts those of all "
        "machines. gpu: one per GPU; cpu: one per CPU; auto: one per GPU, or per CPU without GPUs.",
    )
    rdzv_endpoint: str | None = _once(
        parser=parse_endpoint,
        other_envs=("PET_RDZV_ENDPOINT",),
        metavar="HOST:PORT",
        help="Where the machines meet, in the place of --main_process_ip and --main_process_port.",
    )
    rdzv_id: str | None = _once(
        parser=parse_run_id,
        other_envs=("PET_RDZV_ID",),
        metavar="ID",
        help="Name of the run, the same on all machines: launchers of runs with other names are not taken for those "
        "of this one. It begins the name of the directory in --log_dir.",
    )
    standalone: bool = _once(
        False, help="A run on this machine alone, at a free port, as without any option; refused with several machines."
    )
    redirects: str = _once(
        "0",
        parser=parse_streams,
        short="-r",
        metavar="STREAMS",
        help="Output streams that are written to a file in --log_dir, and not shown. As for --tee, which has "
        "precedence: 1 stdout, 2 stderr, 3 both; or by local rank, such as 0:3,1:2.",
    )
    local_ranks_filter: str | None = _once(
        parser=parse_ranks,
        metavar="RANKS",
        help="Local ranks whose output is shown, such as 0,1. Files of --tee and --redirects are written for all, and "
        "the traceback of the rank that fails first is always shown.",
    )
    log_line_prefix_template: str | None = _once(
        env="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        metavar="TEMPLATE",
        help="What is prepended to each line of --tee on the screen, with ${role_name}, ${local_rank} and ${rank}, "
        "such as '[rank ${rank}]:'. Left out: [${role_name}${local_rank}]: .",
    )
    shutdown_timeout: int | None = _once(
        minimum=1,
        other_envs=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
        metavar="SECONDS",
        help="How long processes may take to end after SIGTERM, before they are killed. Left out: 30 seconds.",
    )
