"""What torch_tpu needs before its processes start. torch_tpu is the successor of torch_xla.

Its ``set_tpu_launch_env`` decides, in the parent, variables that all ranks must agree on: an address for each, the
topology of the chips and the number of a profiling session; on several hosts also the rank of this one. A child process
calls it, because torch is not imported here.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options.resolution import Resolution

from ..entrypoint import python_command

_SECONDS = 400  # on several hosts torch_tpu asks the chips for their coordinates, for up to 300 s
_MARK = "accel:torch_tpu "
_PROGRAM = f"""
import json, os, sys
import torch_tpu
from torch.tpu import distributed

distributed.set_tpu_launch_env(**json.loads(sys.argv[1]))
names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
found = {{name: value for name, value in os.environ.items() if name in names or name.startswith("TORCH_TPU_")}}
print({_MARK!r} + json.dumps(found))
"""


@dataclass(frozen=True)
class TpuHosts:
    """What torch_tpu decided."""

    variables: Mapping[str, str]  # for every process
    total: int  # processes of all hosts
    settings: Mapping[str, Any]  # options of accel launch that follow; empty on one host
    kind: str = "TPU"


def is_installed() -> bool:
    """Return True if TPUs are used through torch_tpu. torch_xla wins, because ``--tpu`` has always meant it."""
    return importlib.util.find_spec("torch_tpu") is not None and importlib.util.find_spec("torch_xla") is None


def find_hosts(settings: Resolution, environ: Mapping[str, str]) -> TpuHosts:
    """Return what torch_tpu decides for these settings, of which those that were given stay.

    Raises:
        ConfigurationError: torch_tpu finds no TPU, or another rank for this machine than the one that was given.
    """
    machines, total = settings["num_machines"], settings["num_processes"]
    decided = launch_environment(machines, total and max(1, total // machines), environ)
    rank = decided.settings.get("machine_rank", settings["machine_rank"])
    if settings.is_set("machine_rank") and settings["machine_rank"] != rank:
        raise ConfigurationError(
            f"{settings.where('machine_rank')}, but this host is number {rank} of the TPU slice, counted by the place "
            "of its chips. Leave the option out."
        )
    new = {name: value for name, value in decided.settings.items() if not settings.is_set(name)}
    return replace(decided, settings=new)


def launch_environment(machines: int, local: int | None, environ: Mapping[str, str]) -> TpuHosts:
    """Ask torch_tpu, in a child process with these variables.

    Args:
        machines: hosts; with 1, ``TPU_WORKER_HOSTNAMES`` may name several.
        local: processes on each host; None for one on each TPU device.
        environ: all variables of the child.

    Raises:
        ConfigurationError: torch_tpu finds no TPU, or too few.
    """
    arguments = {"nproc_per_node": local, **({"nnodes": machines} if machines > 1 else {})}
    command = [*python_command("-c", _PROGRAM), json.dumps(arguments)]
    result = subprocess.run(
        command, capture_output=True, text=True, env=dict(environ), timeout=_SECONDS, check=False, errors="replace"
    )
    found = [line.removeprefix(_MARK) for line in result.stdout.splitlines() if line.startswith(_MARK)]
    variables: dict[str, str] = json.loads(found[0]) if found else {}
    # Without a TPU, and without a number of processes, the list of addresses is empty.
    addresses = variables.get("TORCH_TPU_SLICEBUILDER_ADDRESSES", "")
    if result.returncode or not addresses:
        errors = result.stderr.strip().splitlines()
        raise ConfigurationError(
            f"--tpu: torch_tpu cannot start processes here: {errors[-1] if errors else 'it finds no TPU'}. Run this "
            "on a host with TPUs, or leave --tpu out."
        )
    settings: dict[str, Any] = {}
    if "NODE_RANK" in variables and "NODE_RANK" not in environ:
        settings = {"machine_rank": int(variables["NODE_RANK"]), "num_machines": int(variables["NNODES"])}
        settings |= {"main_process_ip": variables["MASTER_ADDR"], "main_process_port": int(variables["MASTER_PORT"])}
    own = {name: value for name, value in variables.items() if name.startswith("TORCH_TPU_")}
    return TpuHosts(own, len(addresses.split(",")), settings)
