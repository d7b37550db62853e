"""TPU cores and TPU pods."""

from __future__ import annotations

from dataclasses import dataclass

from .declaration import OptionGroup, option

_TPU = {"distributed_type": ("XLA",)}
_POD = {**_TPU, "tpu_cluster": (True,)}


@dataclass(frozen=True)
class TpuOptions(OptionGroup):
    """TPUs."""

    title = "TPU"
    description = "Used with --tpu, and by accel tpu-config."

    main_training_function: str = option(
        "main",
        metavar="NAME",
        help="Function of the script that each process runs; TPUs only.",
        question="What is the name of the function in your script that every process should run?",
        asked_when=_TPU,
    )
    downcast_bf16: bool = option(
        False,
        exported=True,
        help="With bf16 on TPUs: float64 tensors become float32, and float32 tensors become bfloat16.",
        question="Should bf16 on TPUs cast float32 to bfloat16 and float64 to float32?",
        asked_when={**_TPU, "mixed_precision": ("bf16",)},
    )
    tpu_cluster: bool = option(
        False,
        undo="no_tpu_cluster",
        key="tpu_use_cluster",
        other_keys=("tpu_cluster",),
        help="Start the script on every machine of a TPU pod.",
        question="Are you using a TPU pod?",
        asked_when=_TPU,
    )
    tpu_use_sudo: bool = option(
        False,
        help="Run the script with sudo on every machine of a TPU pod.",
        question="Must commands run with sudo on the machines of the pod?",
        asked_when=_POD,
    )
    vm: tuple[str, ...] = option(
        (),
        env="ACCELERATE_TPU_VM",
        key="tpu_vm",
        metavar="NAME",
        help="Name of one machine of a TPU pod; can be given several times. Left out, all machines.",
    )
    env: tuple[str, ...] = option(
        (),
        env="ACCELERATE_TPU_ENV",
        key="tpu_env",
        metavar="KEY=VALUE",
        help="Environment variable to set on the machines of a TPU pod; can be given several times.",
    )
    tpu_name: str | None = option(
        metavar="NAME",
        help="Name of the TPU in Google Cloud.",
        question="What is the name of your TPU?",
        asked_when=_POD,
    )
    tpu_zone: str | None = option(
        metavar="ZONE", help="Google Cloud zone of the TPU.", question="In which zone is your TPU?", asked_when=_POD
    )
    command_file: str | None = option(
        env="ACCELERATE_TPU_COMMAND_FILE",
        metavar="FILE",
        help="File of commands, one per line, that accel tpu-config runs on the machines of the pod.",
        question="Path of a file with commands to run on every machine of the pod (leave it empty for none)?",
        asked_when=_POD,
    )
    commands: tuple[str, ...] = option(
        (),
        name="command",
        env="ACCELERATE_TPU_COMMANDS",
        key="commands",
        metavar="COMMAND",
        help="Command that accel tpu-config runs on the machines of the pod; can be given several times.",
    )
