"""``accel slurm``: writes a SLURM batch script that launches a training script. Torch-free."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accel_state.command import Command
from accel_state.errors import ConfigurationError
from accel_state.preemption import PREEMPTED_EXIT_CODE

from ..config.read import load_settings
from ..parser import ConfigParser, parse

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
    parser = _parser()
    end = _end_of_own(argv, parser)
    arguments = parser.parse_args(argv[:end])
    words = argv[end + 1 :] if argv[end : end + 1] == ["--"] else argv[end:]
    command_line = parse(words)
    for name in _NOT_HERE:
        if name in command_line.options:
            raise ConfigurationError(f"--{name} comes from SLURM in a job. Leave it out; --nodes counts the machines.")
    load_settings(command_line.options)
    text = "\n".join(_lines(arguments, words, Path(command_line.script).stem)) + "\n"
    if arguments.output is None:
        print(text, end="")
        return 0
    _write(arguments.output, text)
    print(f"wrote {arguments.output}. Submit it with: sbatch {shlex.quote(str(arguments.output))}", file=sys.stderr)
    return 0


def _end_of_own(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """The index of the first word that is not an option of this command, each of which has one value."""
    index = 0
    while index < len(argv):
        flag, sign, _ = argv[index].partition("=")
        if flag not in parser._option_string_actions:
            break
        index += 1 if sign or flag in ("-h", "--help") else 2
    return min(index, len(argv))


def _write(path: Path, text: str) -> None:
    try:
        # Never in place of a file, or through a link: scripts are edited by hand.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o777)
    except FileExistsError:
        raise ConfigurationError(f"--output {path} exists. Choose another name, or delete the file.") from None
    except OSError as error:
        raise ConfigurationError(f"--output {path} cannot be written: {error.strerror}.") from None
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _parser() -> argparse.ArgumentParser:
    parser = ConfigParser(
        prog="accel slurm",
        usage="accel slurm [job options] [options of accel launch] script [script arguments]",
        description="Write a SLURM batch script that launches a training script.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    job = parser.add_argument_group("job options")
    numbers: dict[str, Any] = {"type": _count_of, "metavar": "N"}
    job.add_argument("--nodes", default=1, help="number of nodes (default: 1)", **numbers)
    job.add_argument("--gpus-per-node", "--gpus_per_node", help="GPUs of each node, one process each", **numbers)
    job.add_argument("--tasks-per-node", "--tasks_per_node", help="without GPUs: processes of each node", **numbers)
    job.add_argument("--cpus-per-task", "--cpus_per_task", help="cores of each task", **numbers)
    job.add_argument("--mem", type=_size, metavar="SIZE", help="memory of each node, such as 64G")
    job.add_argument("--time", type=_time_limit, metavar="TIME", help="time limit: minutes, HH:MM:SS or days-hours")
    texts: dict[str, Any] = {"type": _one_line, "metavar": "NAME"}
    job.add_argument("--job-name", "--job_name", help="name of the job (default: that of the script)", **texts)
    job.add_argument("--partition", help="partition", **texts)
    job.add_argument("--account", help="account that is charged", **texts)
    job.add_argument("--sbatch", action="append", default=[], type=_one_line, metavar="OPTION",
                     help="a further line for sbatch, such as --sbatch=--constraint=a100; may be repeated")  # fmt: skip
    job.add_argument("--venv", metavar="DIR", type=_one_line, help="virtual environment to activate")
    job.add_argument("--setup", action="append", default=[], metavar="COMMAND", type=_one_line,
                     help="a shell command before the launch, such as 'module load gcc'; may be repeated")  # fmt: skip
    text = "send SIGUSR1 so long before the time limit, and requeue a run that has saved (needs save_on_signal)"
    job.add_argument("--requeue-before", "--requeue_before", type=_count_of, metavar="SECONDS", help=text)
    text = "the file to write, which must not exist (default: print the script)"
    job.add_argument("--output", type=Path, metavar="FILE", help=text)
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


def _count_of(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer")
    return int(text)


def _time_limit(text: str) -> str:
    if not _TIME.fullmatch(text.upper()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: minutes, MM:SS, HH:MM:SS, days-HH or days-HH:MM:SS")
    return text


def _size(text: str) -> str:
    if not _MEMORY.fullmatch(text.upper()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: a number, with K, M, G or T, such as 64G")
    return text


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} must be one line of text")
    return text


COMMAND = Command("write a SLURM batch script", run)
