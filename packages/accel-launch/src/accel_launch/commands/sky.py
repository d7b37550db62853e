"""``accel sky``: writes a SkyPilot task that launches a training script. Torch-free."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any

from accel_state.command import Command
from accel_state.errors import ConfigurationError
from accel_state.options import Resolution
from accel_state.preemption import PREEMPTED_EXIT_CODE

from ..config.read import load_settings
from ..launchers.base import CHOSEN_BY_CLUSTER, launch_flags
from ..parser import CommandLine
from .job_files import (
    LABEL,
    VARIABLE,
    count_of,
    deliver,
    job_parser,
    name_of,
    one_line,
    parse_job,
    plain_variable,
    refuse_other_places,
)

_EPILOG = """\
What follows the options of this command is what you would write after `accel launch`: its options, the script and the
script's arguments. The settings of a configuration file become options of the command. Ranks and addresses come from
SkyPilot. Example:

  accel sky --accelerators H100:8 --nodes 2 --spot --setup 'pip install -r requirements.txt' --output task.yaml train.py
  sky jobs launch task.yaml
"""
_ACCELERATORS = re.compile(r"[A-Za-z0-9._-]+(:\d+)?")


def run(argv: list[str]) -> int:
    """Write a task, to a file or to the standard output.

    Raises:
        ConfigurationError: an error in the command line, or the file exists.
    """
    from ..cloud.yaml_text import as_yaml

    reason = "comes from SkyPilot in a task. Leave it out; --nodes counts the nodes."
    arguments, _, command_line = parse_job(argv, _parser(), CHOSEN_BY_CLUSTER, reason)
    settings = load_settings(command_line.options)
    text = as_yaml([_task(arguments, settings, command_line)])
    deliver(text, arguments.output, 0o666, "Start it with: sky jobs launch")
    return 0


def _parser() -> argparse.ArgumentParser:
    description = "Write a SkyPilot task that launches a training script."
    parser, task = job_parser("accel sky", "", "task", description, _EPILOG)
    repeated: dict[str, Any] = {"action": "append", "default": [], "type": one_line}
    task.add_argument("--name", type=_label, help="name of the task (default: that of the script)")
    task.add_argument("--nodes", default=1, type=count_of, metavar="N", help="number of nodes (default: 1)")
    task.add_argument(
        "--accelerators", type=_accelerators, metavar="NAME:N", help="devices of each node, such as H100:8"
    )
    task.add_argument("--cpus", type=one_line, metavar="N", help="CPUs of each node, such as 8 or 8+ (or more)")
    task.add_argument("--memory", type=one_line, metavar="GB", help="memory of each node in GB, such as 64 or 64+")
    task.add_argument(
        "--infra", type=one_line, metavar="PLACE", help="where to run, such as aws/us-east-1 or kubernetes"
    )
    task.add_argument("--image", type=one_line, help="image, such as docker:registry.example.com/train:1")
    text = "use spot machines: a preempted run is started again elsewhere, where accelerator.resume() continues"
    task.add_argument("--spot", action="store_true", help=text)
    task.add_argument("--workdir", default=".", type=one_line, metavar="DIR",
                      help="directory that is copied to the nodes (default: the current one)")  # fmt: skip
    task.add_argument("--storage", metavar="PATH=URL", help="bucket and where it is mounted, such as "
                      "/checkpoints=s3://bucket/run; may be repeated", **repeated)  # fmt: skip
    task.add_argument(
        "--setup", metavar="COMMAND", help="a shell command on each new node; may be repeated", **repeated
    )
    task.add_argument("--env", metavar="NAME=VALUE", help="variable of the task, not for secrets; may be repeated",
                      **repeated)  # fmt: skip
    task.add_argument("--secret", metavar="NAME", help="variable with a secret, which `sky jobs launch "
                      "--secret NAME` passes; may be repeated", **repeated)  # fmt: skip
    return parser


def _task(arguments: argparse.Namespace, settings: Resolution, command_line: CommandLine) -> dict[str, Any]:
    devices = f"--accelerators {arguments.accelerators}" if arguments.accelerators else None
    refuse_other_places(settings, "nodes", devices)
    recovery = {"max_restarts_on_errors": settings["max_restarts"], "recover_on_exit_codes": [PREEMPTED_EXIT_CODE]}
    resources = {
        "infra": arguments.infra,
        "accelerators": arguments.accelerators,
        "cpus": arguments.cpus,
        "memory": arguments.memory,
        "image_id": arguments.image,
        "use_spot": arguments.spot or None,
        "job_recovery": recovery,
    }
    flags = launch_flags(settings, CHOSEN_BY_CLUSTER)
    command = ["accel", "launch", *flags, command_line.script, *command_line.script_args]
    advice = "Give --secret NAME, and its value to `sky jobs launch --secret NAME=VALUE`"
    task = {
        "name": arguments.name or name_of(command_line.script),
        "num_nodes": arguments.nodes,
        "workdir": arguments.workdir,
        "resources": {name: value for name, value in resources.items() if value is not None},
        "envs": dict(plain_variable(text, "task", advice) for text in arguments.env),
        "secrets": dict.fromkeys(map(_secret, arguments.secret)),
        "file_mounts": dict(map(_storage, arguments.storage)),
        "setup": "".join(f"{command}\n" for command in arguments.setup),
        "run": f"{shlex.join(command)}\n",
    }
    return {name: value for name, value in task.items() if value}


def _label(text: str) -> str:
    if not LABEL.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name of at most 53 lower-case letters, digits and hyphens")
    return text


def _accelerators(text: str) -> str:
    if not _ACCELERATORS.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:N, such as H100:8")
    return text


def _secret(text: str) -> str:
    if not VARIABLE.fullmatch(text):
        raise ConfigurationError("--secret: give the name of a variable, without its value.")
    return text


def _storage(text: str) -> tuple[str, dict[str, str]]:
    path, _, url = text.partition("=")
    if not path.startswith("/") or "://" not in url:
        raise ConfigurationError(f"--storage {text}: give PATH=URL with an absolute path, such as /data=s3://bucket.")
    return path, {"source": url, "mode": "MOUNT"}


COMMAND = Command("write a SkyPilot task", run)
