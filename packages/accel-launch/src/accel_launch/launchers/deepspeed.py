"""DeepSpeed's own launcher starts the ranks on the machines of its hostfile."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accel_state.env import convert_dict_to_env_variables
from accel_state.errors import ConfigurationError, require
from accel_state.ports import DEFAULT_PORT, get_free_port, reserved_port

from ..elastic.worker import ENCODED, RELAY_VARIABLE, encode
from ..entrypoint import WORKER, python_command
from ..external_launcher import run_external
from ..hostfile import Host, Pool, read_pool
from ..launch_plan import LaunchPlan
from ..scratch import scratch_directory
from .base import Launcher, MachineCommand

WITHOUT_SSH = "nossh"
DEFAULT_LAUNCHER = "pdsh"
_ENV_FILE = ".deepspeed_env"


class DeepSpeedLauncher(Launcher):
    """Runs DeepSpeed's runner: over pdsh, mpirun or srun from one machine, or without ssh on each of them."""

    def run(self, plan: LaunchPlan) -> int:
        pool = read_pool(plan.settings)
        with reserved_port() as port, scratch_directory() as directory:
            start = _runner(plan, pool, port)
            require("deepspeed", purpose="starting processes with DeepSpeed's launcher", install="deepspeed")
            file = directory / _ENV_FILE
            exported = convert_dict_to_env_variables({**plan.environment, RELAY_VARIABLE: "1"})
            file.write_text("".join([*_user_env_lines(), *exported]))
            environment = {**plan.full_environment(), "DS_ENV_FILE": str(file)}
            over_pdsh = functools.partial(_end_over_pdsh, ",".join(pool), start.command)
            end = over_pdsh if _launcher(plan) == DEFAULT_LAUNCHER else None
            return run_external(start.command, environment, end)

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """Return the runner on this machine, and what it starts on each."""
        pool = read_pool(plan.settings)
        return [_runner(plan, pool, get_free_port()), *_ranks(plan, pool)]


def _launcher(plan: LaunchPlan) -> str:
    return str(plan.settings["deepspeed_multinode_launcher"] or DEFAULT_LAUNCHER)


def _runner(plan: LaunchPlan, pool: Pool, free_port: int) -> MachineCommand:
    settings, launcher, first_host = plan.settings, _launcher(plan), next(iter(pool))
    command = python_command("-m", "deepspeed.launcher.runner", "--no_local_rank")
    if settings["deepspeed_hostfile"]:
        command += ["--hostfile", str(Path(settings["deepspeed_hostfile"]).expanduser())]
    command += _selection(plan, pool)
    port = plan.rendezvous.main_process_port
    if not port:
        port = free_port if launcher != WITHOUT_SSH and Host(first_host).is_here else DEFAULT_PORT
    # Without an address DeepSpeed asks the first host over ssh, which not every launcher needs.
    command += ["--master_addr", plan.rendezvous.main_process_ip or first_host, "--master_port", str(port)]
    if launcher == WITHOUT_SSH:
        command += ["--no_ssh", "--node_rank", str(_node_rank(plan, pool))]
    else:
        command += ["--launcher", launcher]
    if launcher != WITHOUT_SSH and len(pool) == 1:
        # DeepSpeed takes a single host for this machine; if it is, ssh is not needed.
        command += ["--no_ssh_check" if Host(first_host).is_here else "--force_multi"]
    notes = [
        f"DeepSpeed's launcher: {launcher}",
        "the script's arguments are encoded in the last word, because shells on the way would change some of them",
        "DS_ENV_FILE names a temporary file with these variables, which DeepSpeed exports on every machine",
    ]
    if importlib.util.find_spec("deepspeed") is None:
        notes.append("deepspeed is not installed here: pip install deepspeed")
    entrypoint = plan.entrypoint
    command += [str(WORKER), entrypoint.kind, ENCODED, entrypoint.name, encode(entrypoint.args)]
    return MachineCommand("this machine", command, plan.environment, notes=notes)


def _selection(plan: LaunchPlan, pool: Pool) -> list[str]:
    settings = plan.settings
    if settings["deepspeed_inclusion_filter"]:
        return ["--include", settings["deepspeed_inclusion_filter"]]
    if settings["deepspeed_exclusion_filter"]:
        return ["--exclude", settings["deepspeed_exclusion_filter"]]
    processes = settings["num_processes"]
    devices = [] if processes is None else ["--num_gpus", str(processes // len(pool))]
    return ["--num_nodes", str(len(pool)), *devices]


def _ranks(plan: LaunchPlan, pool: Pool) -> Iterator[MachineCommand]:
    rank, world_size = 0, sum(map(len, pool.values()))
    command = plan.entrypoint.command(python_command("-u"))
    for node, (host, slots) in enumerate(pool.items()):
        common = {"WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(len(slots)), "CROSS_RANK": str(node)}
        ranks = [{"RANK": str(rank + local), "LOCAL_RANK": str(local), **common} for local in range(len(slots))]
        rank += len(slots)
        notes = [f"slots {', '.join(map(str, slots))} of the hostfile"]
        yield MachineCommand(f"{host} (node {node} of {len(pool)})", command, {}, ranks, notes)


def _node_rank(plan: LaunchPlan, pool: Pool) -> int:
    rank = plan.rendezvous.machine_rank
    if rank >= len(pool) or not plan.settings.is_set("machine_rank"):
        raise ConfigurationError(
            f"--deepspeed_multinode_launcher {WITHOUT_SSH} needs --machine_rank on every machine, 0 to {len(pool) - 1} "
            f"in the order of the hostfile ({plan.settings.where('machine_rank')})."
        )
    return rank


def _user_env_lines() -> Iterator[str]:
    """Yield the user's own variable files, which DeepSpeed no longer reads when DS_ENV_FILE names another."""
    for directory in (Path.home(), Path.cwd()):
        file = directory / _ENV_FILE
        if file.is_file():
            yield from (line.rstrip("\n") + "\n" for line in file.read_text().splitlines() if line.strip())


def _end_over_pdsh(
    hosts: str, command: Sequence[str], process: subprocess.Popen[bytes], environment: Mapping[str, str]
) -> None:
    """End a run over pdsh: kill the runner before it handles the signal, then its ranks on every machine.

    Remote processes outlive their ssh connection, and DeepSpeed's own handler would end those of all runs.
    """
    process.kill()
    # The brackets keep the pattern from matching the shell that runs this command.
    pattern = f"[d]eepspeed.launcher.launch .*--master_port={command[command.index('--master_port') + 1]} "
    subprocess.run(
        ["pdsh", "-S", "-w", hosts, f"pkill -TERM -f '{pattern}'"],
        env={**environment, "PDSH_RCMD_TYPE": "ssh"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if sys.platform != "win32":
        os.killpg(process.pid, signal.SIGTERM)
