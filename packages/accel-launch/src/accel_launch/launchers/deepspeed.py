"""DeepSpeed's own launcher starts the ranks, on the machines of its hostfile."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accel_state.env import convert_dict_to_env_variables
from accel_state.errors import ConfigurationError, require
from accel_state.ports import get_free_port, reserved_port

from ..deepspeed_pool import Pool, read_pool
from ..elastic.worker import ENCODED, RELAY_VARIABLE, encode
from ..external_launcher import run_relayed
from ..hostfile import Host
from ..interpreter import python_command
from ..launch_mode import Kind
from ..plan import Plan
from .base import Launcher, Start
from .rank import WORKER

WITHOUT_SSH = "nossh"
DEFAULT_LAUNCHER = "pdsh"
_DEFAULT_PORT = 29500
_ENV_FILE = ".deepspeed_env"


class DeepSpeedLauncher(Launcher):
    """Runs DeepSpeed's runner: over pdsh, mpirun or srun from one machine, or without ssh on each of them."""

    def accepts(self, plan: Plan) -> bool:
        """DeepSpeed on several machines, other than by torch's agent."""
        return plan.kind is Kind.DEEPSPEED

    def run(self, plan: Plan) -> int:
        """Run the runner and wait for it."""
        require("deepspeed", purpose="starting processes with DeepSpeed's launcher", install="deepspeed")
        with reserved_port() as port, tempfile.TemporaryDirectory(prefix="accel_launch_") as folder:
            start = _runner(plan, read_pool(plan.settings), port)
            file = Path(folder) / _ENV_FILE
            ours = {**plan.environment, RELAY_VARIABLE: "1"}
            file.write_text("".join([*_users_lines(), *convert_dict_to_env_variables(ours)]))
            environment = {**plan.full_environment(), "DS_ENV_FILE": str(file)}
            return run_relayed(start.command, environment, end=_Ender(plan, start.command))

    def starts(self, plan: Plan) -> Sequence[Start]:
        """The runner on this machine, and what it starts on each."""
        pool = read_pool(plan.settings)
        return [_runner(plan, pool, get_free_port()), *_ranks(plan, pool, list(pool))]


def _launcher(plan: Plan) -> str:
    return str(plan.settings["deepspeed_multinode_launcher"] or DEFAULT_LAUNCHER)


def _runner(plan: Plan, pool: Pool, free_port: int) -> Start:
    settings, launcher = plan.settings, _launcher(plan)
    words = python_command("-m", "deepspeed.launcher.runner", "--no_local_rank")
    if settings["deepspeed_hostfile"]:
        words += ["--hostfile", str(Path(settings["deepspeed_hostfile"]).expanduser())]
    words += _selection(plan, pool)
    words += ["--master_addr", _address(plan, pool), "--master_port", str(_port(plan, pool, free_port))]
    if launcher == WITHOUT_SSH:
        words += ["--no_ssh", "--node_rank", str(_node_rank(plan, pool))]
    else:
        # With a single machine DeepSpeed would otherwise take it for this one; and if it is, there is no need of ssh.
        only_here = len(pool) == 1 and Host(next(iter(pool))).is_here
        words += [
            "--launcher",
            launcher,
            *(["--no_ssh_check"] if only_here else ["--force_multi"] if len(pool) == 1 else []),
        ]
    notes = [
        f"DeepSpeed's launcher: {launcher}",
        "the script's arguments are the last word, encoded: a shell on the way to other machines would change some of "
        "them",
        "DS_ENV_FILE names a temporary file with these variables, which DeepSpeed exports on every machine",
    ]
    if importlib.util.find_spec("deepspeed") is None:
        notes.append("deepspeed is not installed here: pip install deepspeed")
    return Start(
        "this machine",
        [*words, str(WORKER), plan.target.kind, ENCODED, plan.target.name, encode(plan.target.args)],
        plan.environment,
        notes=notes,
    )


def _selection(plan: Plan, pool: Pool) -> list[str]:
    settings = plan.settings
    if settings["deepspeed_inclusion_filter"]:
        return ["--include", settings["deepspeed_inclusion_filter"]]
    if settings["deepspeed_exclusion_filter"]:
        return ["--exclude", settings["deepspeed_exclusion_filter"]]
    nodes = ["--num_nodes", str(len(pool))]
    return (
        nodes
        if settings["num_processes"] is None
        else [*nodes, "--num_gpus", str(settings["num_processes"] // len(pool))]
    )


def _ranks(plan: Plan, pool: Pool, hosts: list[str]) -> Iterator[Start]:
    rank, world_size = 0, sum(map(len, pool.values()))
    for node, host in enumerate(hosts):
        variables = []
        for local in range(len(pool[host])):
            places = {
                "RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_RANK": local,
                "LOCAL_SIZE": len(pool[host]),
                "CROSS_RANK": node,
            }
            variables.append({name: str(value) for name, value in places.items()})
            rank += 1
        slots = ", ".join(map(str, pool[host]))
        yield Start(
            f"{host} (node {node} of {len(hosts)})",
            plan.target.command(python_command("-u")),
            {},
            variables,
            [f"slots {slots} of the hostfile"],
        )


def _address(plan: Plan, pool: Pool) -> str:
    """The address of rank 0; DeepSpeed would ask for it over ssh, which not every launcher needs otherwise."""
    return plan.rendezvous.main_process_ip or next(iter(pool))


def _port(plan: Plan, pool: Pool, free_port: int) -> int:
    if plan.rendezvous.main_process_port:
        return plan.rendezvous.main_process_port
    starts_all = _launcher(plan) != WITHOUT_SSH
    return free_port if starts_all and Host(next(iter(pool))).is_here else _DEFAULT_PORT


def _node_rank(plan: Plan, pool: Pool) -> int:
    rank = plan.rendezvous.machine_rank
    if rank >= len(pool) or not plan.settings.is_set("machine_rank"):
        raise ConfigurationError(
            f"--deepspeed_multinode_launcher {WITHOUT_SSH} is started on every machine with its --machine_rank, from "
            "0 to "
            f"{len(pool) - 1}, in the "
            f"order of the hostfile ({plan.settings.where('machine_rank')})."
        )
    return rank


def _users_lines() -> Iterator[str]:
    """What the user's own files of variables hold: DeepSpeed would read these two, were it not told of ours."""
    for folder in (Path.home(), Path.cwd()):
        file = folder / _ENV_FILE
        if file.is_file():
            yield from (line.rstrip("\n") + "\n" for line in file.read_text().splitlines() if line.strip())


class _Ender:
    """Ends a run over pdsh: its remote processes outlive their ssh, and DeepSpeed's own handler ends those of every
    other run too.
    """

    def __init__(self, plan: Plan, command: Sequence[str]) -> None:
        self._remote = _launcher(plan) == DEFAULT_LAUNCHER
        self._hosts = ",".join(read_pool(plan.settings))
        self._port = command[list(command).index("--master_port") + 1]

    def __call__(self, process: subprocess.Popen[bytes], environment: Mapping[str, str]) -> bool:
        """Kill the runner before it hears of the signal, then its ranks on every machine."""
        if not self._remote:
            return False
        process.kill()
        # In brackets, so that the shell which runs this very command does not match it.
        pattern = f"[d]eepspeed.launcher.launch .*--master_port={self._port} "
        words = ["pdsh", "-S", "-w", self._hosts, f"pkill -TERM -f '{pattern}'"]
        subprocess.run(
            words,
            env={**environment, "PDSH_RCMD_TYPE": "ssh"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if sys.platform != "win32":
            os.killpg(process.pid, signal.SIGTERM)
        return True
