"""``accel k8s manifest``: writes a Kubernetes manifest that launches a training script. Torch-free."""

from __future__ import annotations

import argparse
import re
from typing import Any

from accel_state.command import Command
from accel_state.errors import ConfigurationError
from accel_state.options import Resolution

from ..accelerators.registry import ACCELERATORS
from ..cloud.kubernetes_manifest import CONTAINER, KINDS, PodJob, objects
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
script's arguments. The settings of a configuration file become options of the command in the pods. The script is a
path in the image. Examples:

  accel k8s manifest --image registry.example.com/train:1 --nodes 4 --gpus-per-node 8 --output job.yaml train.py
  accel k8s manifest --image registry.example.com/train:1 --kind Job --nodes 2 --config_file fsdp.yaml train.py --lr 0.1
  kubectl apply -f job.yaml
"""
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
_LONGEST_NAME = 63
# Machines, ranks and addresses come from the cluster, devices from the resources, and a file is not in the image.
_NOT_HERE = (*CHOSEN_BY_CLUSTER, "gpu_ids")
_LEFT_OUT = frozenset((*_NOT_HERE, "num_processes"))


def run(argv: list[str]) -> int:
    """Write a manifest, to a file or to the standard output.

    Raises:
        ConfigurationError: an error in the command line, or the file exists.
    """
    if not argv or argv[0] in ("-h", "--help"):
        _parser().print_help()
        return 0
    if argv[0] != "manifest":
        raise ConfigurationError(
            f"{argv[0]!r} is not a command of accel k8s. Allowed: manifest, whose output `kubectl create -f` takes."
        )
    reason = "comes from the cluster in a pod. Leave it out; --nodes counts the pods, whose number is fixed."
    arguments, _, command_line = parse_job(argv[1:], _parser(), _NOT_HERE, reason)
    settings = load_settings(command_line.options)
    documents = objects(_job(arguments, settings, command_line), arguments.kind)
    from ..cloud.yaml_text import as_yaml

    deliver(as_yaml(documents), arguments.output, 0o666, "Start it with: kubectl apply -f")
    return 0


def _parser() -> argparse.ArgumentParser:
    description = "Write a Kubernetes manifest that launches a training script."
    parser, job = job_parser("accel k8s manifest", "--image IMAGE ", "job", description, _EPILOG)
    devices = ", ".join(ACCELERATORS)
    texts: dict[str, Any] = {"type": one_line, "metavar": "NAME"}
    repeated: dict[str, Any] = {"action": "append", "default": [], "type": one_line}
    job.add_argument("--image", required=True, type=one_line, help="container image with accel and the script")
    job.add_argument("--kind", choices=KINDS, default="TrainJob", help="TrainJob (default): of Kubeflow Trainer 2; "
                     "JobSet; Job: an indexed Job, which every cluster has")  # fmt: skip
    job.add_argument("--name", type=_label, help="name of the job (default: that of the script)")
    job.add_argument("--namespace", type=_label, help="namespace (default: that of kubectl)")
    job.add_argument("--nodes", default=1, type=count_of, metavar="N", help="number of pods (default: 1)")
    job.add_argument("--gpus-per-node", "--gpus_per_node", type=count_of, metavar="N",
                     help="GPUs of each pod, one process each; without it, processes run on CPUs")  # fmt: skip
    text = f"whose GPUs: {devices}, or the name of another resource, such as example.com/device (default: the first)"
    job.add_argument("--device", type=_device, default=next(iter(ACCELERATORS)), metavar="NAME", help=text)
    job.add_argument("--cpus", type=_quantity, metavar="N", help="CPUs that each pod requests, such as 8 or 500m")
    job.add_argument("--memory", type=_quantity, metavar="SIZE", help="memory of each pod, such as 64Gi")
    job.add_argument("--shared-memory", "--shared_memory", type=_quantity, default="8Gi", metavar="SIZE",
                     help="size of /dev/shm, for loader workers (default: 8Gi); counts as memory")  # fmt: skip
    job.add_argument("--grace-period", "--grace_period", type=count_of, default=120, metavar="SECONDS",
                     help="seconds between SIGTERM and SIGKILL, for save_on_signal (default: 120)")  # fmt: skip
    job.add_argument("--volume", metavar="CLAIM:PATH", help="persistent volume claim, and where it is mounted; may be "
                     "repeated", **repeated)  # fmt: skip
    job.add_argument("--env", metavar="NAME=VALUE", help="variable of the pods, not for secrets; may be repeated",
                     **repeated)  # fmt: skip
    job.add_argument("--secret", metavar="NAME=SECRET:KEY", help="variable with a key of a Kubernetes secret; may be "
                     "repeated", **repeated)  # fmt: skip
    job.add_argument("--service-account", "--service_account", help="service account of the pods", **texts)
    text = "runtime of a TrainJob (default: torch-distributed)"
    job.add_argument("--runtime", help=text, default="torch-distributed", **texts)
    return parser


def _job(arguments: argparse.Namespace, settings: Resolution, command_line: CommandLine) -> PodJob:
    nodes, gpus = arguments.nodes, arguments.gpus_per_node or 0
    total = settings["num_processes"] if settings.is_set("num_processes") else (gpus or 1) * nodes
    if total % nodes:
        raise ConfigurationError(f"{settings.where('num_processes')} is not a multiple of --nodes {nodes}.")
    refuse_other_places(settings, "pods", f"--gpus-per-node {gpus}" if gpus else None)
    return PodJob(
        name=_job_name(arguments.name or name_of(command_line.script), arguments.kind, nodes),
        image=arguments.image,
        command=_command(settings, command_line, arguments.kind, nodes, total),
        nodes=nodes,
        processes_per_node=total // nodes,
        device=arguments.device,
        devices_per_node=gpus,
        cpus=arguments.cpus,
        memory=arguments.memory,
        shared_memory=arguments.shared_memory,
        grace_seconds=arguments.grace_period,
        max_restarts=settings["max_restarts"],
        namespace=arguments.namespace,
        runtime=arguments.runtime,
        service_account=arguments.service_account,
        environment=dict(map(_variable, arguments.env)),
        secret_keys=dict(map(_secret, arguments.secret)),
        claims=dict(map(_claim, arguments.volume)),
    )


def _command(settings: Resolution, command_line: CommandLine, kind: str, nodes: int, processes: int) -> list[str]:
    """Return the command of each pod."""
    flags = launch_flags(settings, _LEFT_OUT)
    if kind != "TrainJob":
        # Kubeflow's runtime tells the pods both.
        flags += [f"--num_processes={processes}", *([f"--num_machines={nodes}"] if nodes > 1 else [])]
    return ["accel", "launch", *flags, command_line.script, *command_line.script_args]


def _job_name(name: str, kind: str, nodes: int) -> str:
    """Return the name of a job, from which the controllers make names of pods."""
    most = _LONGEST_NAME - len(f"-{CONTAINER}-0-{nodes - 1}-abcde")
    if kind != "Job" and len(name) > most:
        raise ConfigurationError(
            f"the pods of {kind} {name} would have names of more than {_LONGEST_NAME} characters, which Kubernetes "
            f"refuses. Give a --name of at most {most} characters."
        )
    return name


def _label(text: str) -> str:
    if not LABEL.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name of at most 53 lower-case letters, digits and hyphens, which begins with a letter "
            "and does not end with a hyphen"
        )
    return text


def _device(text: str) -> str:
    if text in ACCELERATORS:
        return ACCELERATORS.load(text)().kubernetes_resource
    if "/" not in text.strip("/"):
        names = ", ".join(ACCELERATORS)
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {names}, nor a resource, such as example.com/device")
    return text


def _quantity(text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a quantity of Kubernetes, such as 8, 500m or 64Gi")
    return text


def _variable(text: str) -> tuple[str, str]:
    advice = "Create a secret (kubectl create secret generic SECRET --from-literal=KEY=...), and give --secret "
    return plain_variable(text, "manifest", f"{advice}{text.partition('=')[0]}=SECRET:KEY")


def _secret(text: str) -> tuple[str, tuple[str, str]]:
    name, _, reference = text.partition("=")
    secret, _, key = reference.partition(":")
    if not VARIABLE.fullmatch(name) or not secret or not key:
        raise ConfigurationError(f"--secret {name}: give NAME=SECRET:KEY, with the name of a secret and not its value.")
    return name, (secret, key)


def _claim(text: str) -> tuple[str, str]:
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/"):
        raise ConfigurationError(f"--volume {text}: give CLAIM:PATH with an absolute path.")
    return claim, path


COMMAND = Command("write a Kubernetes manifest", run)
