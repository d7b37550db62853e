"""Numbers of processes, machines and threads."""

from __future__ import annotations

from dataclasses import dataclass

from .declaration import OptionGroup, option
from .launch import PARALLEL_TYPES


class MachineRange(int):
    """A number of machines of which some may be missing: the largest one, with the smallest as ``minimum``."""

    minimum: int

    def __new__(cls, maximum: int, minimum: int) -> MachineRange:
        count = super().__new__(cls, maximum)
        count.minimum = minimum
        return count

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.minimum

    def __str__(self) -> str:
        return f"{self.minimum}:{int(self)}"

    __repr__ = __str__


def parse_machines(text: str) -> int:
    """Read a number of machines, or ``MIN:MAX``."""
    first, _, last = text.partition(":")
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in (first, last or first)]
    if not 1 <= numbers[0] <= numbers[1]:
        raise ValueError(f"{text!r} is neither an integer of at least 1 nor a range MIN:MAX, such as 2:4")
    return numbers[0] if numbers[0] == numbers[1] else MachineRange(numbers[1], numbers[0])


@dataclass(frozen=True)
class ResourceOptions(OptionGroup):
    """Numbers of processes, machines and threads."""

    title = "resources"

    num_processes: int | None = option(
        minimum=1,
        help="Total number of processes on all machines. Left out: one per visible GPU, or one per machine if there is "
        "no GPU or --cpu is given; with distributed_type MULTI_CPU one per NUMA node, at least two.",
        question="How many processes in total will you use?",
        asked_when={"distributed_type": (*PARALLEL_TYPES, "XLA")},
    )
    num_machines: int = option(
        1,
        parser=parse_machines,
        also=("nnodes",),
        other_envs=("PET_NNODES",),
        help="Number of machines. Run the command once on each. MIN:MAX: the run begins with MIN machines and takes up "
        "to MAX; its processes are restarted when a machine joins or leaves. num_processes counts those of MAX "
        "machines.",
        question="How many different machines will you use (more than 1 for multi-node training)?",
        asked_when={"distributed_type": (*PARALLEL_TYPES, "XLA", "DATA_PARALLEL", "MODEL_PARALLEL")},
    )
    num_cpu_threads_per_process: int | None = option(
        minimum=1,
        env="OMP_NUM_THREADS",
        exported=True,
        help="Number of CPU threads per process. Left out, several processes share the physical cores evenly, and a "
        "single process uses torch's default.",
    )
    oversubscribe: bool = option(
        False,
        help="Start any number of processes. Otherwise, more than 64, than 8 per CPU and than one per accelerator of "
        "this machine are refused.",
    )
