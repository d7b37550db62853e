"""Which devices of a machine are used."""

from __future__ import annotations

from dataclasses import dataclass

from .declaration import OptionGroup, option
from .run_type import ACCELERATED_TYPES

_BUILT_IN = "these optimizations are part of torch and always on"


def parse_gpu_ids(text: str) -> str:
    """Check a comma-separated list of device indices or UUIDs; "all" is returned unchanged."""
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

    title = "hardware"

    multi_gpu: bool = option(
        False,
        help="Require GPUs: one process per visible GPU unless --num_processes is given; fails with fewer GPUs.",
    )
    gpu_ids: str | None = option(
        parser=parse_gpu_ids,
        metavar="IDS",
        help="GPUs of this machine to use, by index or UUID, such as 0,1,3; all uses every GPU.",
        question="Which GPUs (by id) should be used for training on this machine, as a comma-separated list?",
        asked_when={"distributed_type": ACCELERATED_TYPES, "num_machines": (1,), "cpu": (False,)},
        suggested="all",
    )
    tpu: bool = option(
        False, env="ACCELERATE_USE_TPU", implied_by=("distributed_type", ("XLA",)), help="Train on the cores of a TPU."
    )
    enable_cpu_affinity: bool = option(
        False,
        env="ACCELERATE_CPU_AFFINITY",
        exported=True,
        help="Bind each process to the CPU cores closest to its GPU (NUMA affinity).",
        question="Should each process be bound to the CPU cores closest to its GPU?",
        asked_when={"distributed_type": ACCELERATED_TYPES, "cpu": (False,)},
    )
    ipex: bool = option(
        False,
        env="ACCELERATE_USE_IPEX",
        key="ipex_config.ipex",
        retired=_BUILT_IN,
        help="Accepted for older command lines and files, without effect: torch includes these optimizations.",
    )
    use_xpu: bool = option(
        False,
        key="ipex_config.use_xpu",
        retired=_BUILT_IN,
        help="Accepted for older command lines and files, without effect: Intel GPUs are detected automatically.",
    )
    use_mps_device: bool = option(
        False,
        retired="the GPU of an Apple machine is detected automatically",
        help="Accepted for older command lines and files, without effect: Apple GPUs are detected automatically.",
    )
