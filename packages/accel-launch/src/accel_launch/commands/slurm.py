"""``accel slurm``: writes a SLURM batch script that launches a training script. Torch-free."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accel_state.command import Command
from accel_state.preemption import PREEMPTED_EXIT_CODE

from ..config.read import load_settings
from .job_files import count_of, deliver, job_parser, one_line, parse_job, refuse_cpu

_EPILOG = """\
What follows the options of this command is what you would write after `accel launch`: its options, the script and the
script's arguments. Machines, ranks, address and port come from SLURM. Example:

  accel slurm --nodes 4 --gpus-per-node 8 --time 04:00:00 --output job.sh train.py --lr 0.1
  sbatch job.sh
"""
# minutes; minutes:seconds; hours:minutes:seconds; days-hours, with minutes and seconds
_TIME = re.compile(r"\d+(:\d{2}){0,2}|\d+-\d{1,2}(:\d{2}){0,2}|UNLIMITED|INFINITE")
_MEMORY = re.compile(r"\d+[KMGT]?")
# The launchers of other nodes and addresses are SLURM's.
_NOT_HERE = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")


def run(argv: list[str]) -> int:
    """Write the script, to a file or to the standard output.

    Raises:
        ConfigurationError: an error in the command line, or the file exists.
    """
    reason = "comes from SLURM in a job. Leave it out; --nodes counts the machines."
    arguments, words, command_line = parse_job(argv, _parser(), _NOT_HERE, reason)
    settings = load_settings(command_line.options)
    refuse_cpu(settings, f"--gpus-per-node {arguments.gpus_per_node}" if arguments.gpus_per_node else None)
    text = "\n".join(_lines(arguments, words, Path(command_line.script).stem)) + "\n"
    deliver(text, arguments.output, 0o777, "Submit it with: sbatch")
    return 0


def _parser() -> argparse.ArgumentParser:
    description = "Write a SLURM batch script that launches a training script."
    parser, job = job_parser("accel slurm", "", "job", description, _EPILOG)
    numbers: dict[str, Any] = {"type": count_of, "metavar": "N"}
    job.add_argument("--nodes", default=1, help="number of nodes (default: 1)", **numbers)
    job.add_argument("--gpus-per-node", "--gpus_per_node", help="GPUs of each node, one process each", **numbers)
    job.add_argument("--tasks-per-node", "--tasks_per_node", help="without GPUs: processes of each node", **numbers)
    job.add_argument("--cpus-per-task", "--cpus_per_task", help="cores of each task", **numbers)
    job.add_argument("--mem", type=_size, metavar="SIZE", help="memory of each node, such as 64G")
    job.add_argument("--time", type=_time_limit, metavar="TIME", help="time limit: minutes, HH:MM:SS or days-hours")
    texts: dict[str, Any] = {"type": one_line, "metavar": "NAME"}
    job.add_argument("--job-name", "--job_name", help="name of the job (default: that of the script)", **texts)
    job.add_argument("--partition", help="partition", **texts)
    job.add_argument("--account", help="account that is charged", **texts)
    job.add_argument("--sbatch", action="append", default=[], type=one_line, metavar="OPTION",
                     help="a further line for sbatch, such as --sbatch=--constraint=a100; may be repeated")  # fmt: skip
    job.add_argument("--venv", metavar="DIR", type=one_line, help="virtual environment to activate")
    job.add_argument("--setup", action="append", default=[], metavar="COMMAND", type=one_line,
                     help="a shell command before the launch, such as 'module load gcc'; may be repeated")  # fmt: skip
    text = "send SIGUSR1 this long before the time limit, and requeue a run that has saved (needs save_on_signal)"
    job.add_argument("--requeue-before", "--requeue_before", type=count_of, metavar="SECONDS", help=text)
    return parser


def _lines(arguments: argparse.Namespace, words: Sequence[str], name: str) -> Iterator[str]:
    yield "#!/bin/bash"
    directives = {
        "job-name": arguments.job_name or name,
        "nodes": arguments.nodes,
        "gpus-per-node": arguments.gpus_per_node,
        "ntasks-per-node": arguments.tasks_per_node,
        "cpus-per-task": arguments.cpus_per_task,
        "mem": arguments.mem,
        "time": arguments.time,
        "partition": arguments.partition,
        "account": arguments.account,
        "output": "%x-%j.out",
    }
    for key, value in directives.items():
        if value is not None:
            yield f"#SBATCH --{key}={shlex.quote(str(value))}"
    if arguments.requeue_before is not None:
        yield f"#SBATCH --signal=USR1@{arguments.requeue_before}"
        yield "#SBATCH --requeue"
        yield "#SBATCH --open-mode=append"
    for option in arguments.sbatch:
        yield f"#SBATCH {option}"
    yield ""
    yield "set -uo pipefail"
    if arguments.venv:
        yield f"source {shlex.quote(str(Path(arguments.venv) / 'bin' / 'activate'))} || exit 1"
    for command in arguments.setup:
        yield f"{command} || exit 1"
    yield ""
    yield "# Machines, ranks, address and port come from SLURM."
    launch = f"accel launch {shlex.join(words)}"
    if arguments.requeue_before is None:
        yield launch
        return
    yield "code=0"
    yield f"{launch} || code=$?"
    yield f'if [ "$code" = {PREEMPTED_EXIT_CODE} ]; then'
    yield '    scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"
    yield 'exit "$code"'


def _time_limit(text: str) -> str:
    if not _TIME.fullmatch(text.upper()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: minutes, MM:SS, HH:MM:SS, days-HH or days-HH:MM:SS")
    return text


def _size(text: str) -> str:
    if not _MEMORY.fullmatch(text.upper()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: a number, with K, M, G or T, such as 64G")
    return text


COMMAND = Command("write a SLURM batch script", run)
