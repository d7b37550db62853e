"""Which devices of a machine are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .declare import OptionGroup, option


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
        help="Insist on GPUs: one process for each visible one unless --num_processes says otherwise; an error if there are not enough.",
    )
    gpu_ids: str | None = option(
        None,
        kind=str,
        parser=parse_gpu_ids,
        env="ACCELERATE_GPU_IDS",
        metavar="IDS",
        help="GPUs of this machine to use, by index or UUID, such as 0,1,3; all means every one.",
        question="Which GPUs (by id) should be used for training on this machine, as a comma-separated list?",
    )
