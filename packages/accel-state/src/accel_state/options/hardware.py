"""Which devices of a machine are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .option import OptionGroup, option
from .run_type import ACCELERATED_TYPES

_BUILT_IN = "torch itself has these optimisations by now, so there is nothing to switch on"


def parse_gpu_ids(text: str) -> str:
    """Check a comma-separated list of device indices or UUIDs; "all" comes back as it is.

    Raises:
        ValueError: an entry is empty or comes twice.
    """
    if text.lower() == "all":
        return "all"
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not entry or entries.count(entry) > 1 or any(letter.isspace() for letter in entry):
            raise ValueError(f"{text!r} is not a comma-separated list of different GPU ids, such as 0,1,3 (or all)")
        if not entry.isdigit() and not entry[0].isalpha():
            raise ValueError(f"{entry!r} is neither the index of a GPU (0, 1, ...) nor its UUID (GPU-...), nor all")
    return ",".join(entries)


@dataclass(frozen=True)
class HardwareOptions(OptionGroup):
    """Devices."""

    title: ClassVar[str] = "hardware"

    multi_gpu: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_MULTI_GPU",
        help="Insist on GPUs: one process for each visible one unless --num_processes says otherwise; an error if "
        "there are not enough.",
    )
    gpu_ids: str | None = option(
        None,
        kind=str,
        parser=parse_gpu_ids,
        env="ACCELERATE_GPU_IDS",
        metavar="IDS",
        help="GPUs of this machine to use, by index or UUID, such as 0,1,3; all means every one.",
        question="Which GPUs (by id) should be used for training on this machine, as a comma-separated list?",
        asked_when={"distributed_type": ACCELERATED_TYPES, "num_machines": (1,), "cpu": (False,)},
        suggested="all",
    )
    tpu: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_USE_TPU",
        implied_by=("distributed_type", ("XLA",)),
        help="Train on the cores of a TPU.",
    )
    enable_cpu_affinity: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_CPU_AFFINITY",
        exported=True,
        help="Bind each process to the CPU cores that are closest to its GPU.",
        question="Should each process be bound to the CPU cores closest to its GPU?",
        asked_when={"distributed_type": ACCELERATED_TYPES, "cpu": (False,)},
    )
    ipex: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_USE_IPEX",
        key="ipex_config.ipex",
        retired=_BUILT_IN,
        help="Accepted for older command lines and files; torch has these optimisations built in.",
    )
    use_xpu: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_USE_XPU",
        key="ipex_config.use_xpu",
        retired=_BUILT_IN,
        help="Accepted for older command lines and files; torch finds the device by itself.",
    )
    use_mps_device: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_USE_MPS_DEVICE",
        retired="the device of an Apple machine is found without it",
        help="Accepted for older command lines and files; the device of an Apple machine is found without it.",
    )
