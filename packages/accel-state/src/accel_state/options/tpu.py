"""TPU cores, and pods of machines that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .option import OptionGroup, option

_TPU = {"distributed_type": ("XLA",)}
_POD = {**_TPU, "tpu_cluster": (True,)}


@dataclass(frozen=True)
class TpuOptions(OptionGroup):
    """TPUs."""

    title: ClassVar[str] = "TPU"
    description: ClassVar[str] = "Used with --tpu, and by accel tpu-config."

    main_training_function: str = option(
        "main",
        kind=str,
        env="ACCELERATE_MAIN_TRAINING_FUNCTION",
        metavar="NAME",
        help="Function of the script that each process runs; on TPUs only.",
        question="What is the name of the function in your script that every process should run?",
        asked_when=_TPU,
    )
    downcast_bf16: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_DOWNCAST_BF16",
        exported=True,
        help="With bf16 on TPUs: double tensors become 32-bit floats, and floats 16-bit ones.",
        question="Should bf16 on TPUs cast floats to 16 bits and doubles to 32?",
        asked_when={**_TPU, "mixed_precision": ("bf16",)},
    )
    tpu_cluster: bool = option(
        False,
        kind=bool,
        undo="no_tpu_cluster",
        env="ACCELERATE_TPU_CLUSTER",
        key="tpu_use_cluster",
        other_keys=("tpu_cluster",),
        help="Start the script on every machine of a TPU pod.",
        question="Are you using a TPU pod?",
        asked_when=_TPU,
    )
    tpu_use_sudo: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_TPU_USE_SUDO",
        help="Run it with sudo on every machine of a TPU pod.",
        question="Must commands run with sudo on the machines of the pod?",
        asked_when=_POD,
    )
    vm: tuple[str, ...] = option(
        (),
        kind=tuple,
        env="ACCELERATE_TPU_VM",
        key="tpu_vm",
        metavar="NAME",
        help="Name of a single machine of a TPU pod; may be given several times. Left out, all of them.",
    )
    env: tuple[str, ...] = option(
        (),
        kind=tuple,
        env="ACCELERATE_TPU_ENV",
        key="tpu_env",
        metavar="KEY=VALUE",
        help="Variable to set on the machines of a TPU pod; may be given several times.",
    )
    tpu_name: str | None = option(
        None,
        kind=str,
        env="ACCELERATE_TPU_NAME",
        metavar="NAME",
        help="Name of the TPU, as the cloud lists it.",
        question="What is the name of your TPU?",
        asked_when=_POD,
    )
    tpu_zone: str | None = option(
        None,
        kind=str,
        env="ACCELERATE_TPU_ZONE",
        metavar="ZONE",
        help="Zone of the cloud that the TPU is in.",
        question="In which zone is your TPU?",
        asked_when=_POD,
    )
    command_file: str | None = option(
        None,
        kind=str,
        env="ACCELERATE_TPU_COMMAND_FILE",
        metavar="FILE",
        help="File of commands, one on a line, that accel tpu-config runs on the machines of the pod.",
        question="Path of a file with commands to run on every machine of the pod (leave it empty for none)?",
        asked_when=_POD,
    )
    commands: tuple[str, ...] = option(
        (),
        name="command",
        kind=tuple,
        env="ACCELERATE_TPU_COMMANDS",
        key="commands",
        metavar="COMMAND",
        help="Command that accel tpu-config runs on the machines of the pod; may be given several times.",
    )
