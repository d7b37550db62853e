"""How many processes, machines and threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .option import OptionGroup, option
from .run_type import PARALLEL_TYPES


@dataclass(frozen=True)
class ResourceOptions(OptionGroup):
    """Counts."""

    title: ClassVar[str] = "resources"

    num_processes: int | None = option(
        None,
        kind=int,
        minimum=1,
        env="ACCELERATE_NUM_PROCESSES",
        metavar="N",
        help="Processes in total, over all machines. Left out: one for each visible GPU of every machine, or one for "
        "each machine where "
        "there is no GPU or --cpu is given.",
        question="How many processes in total will you use?",
        asked_when={"distributed_type": (*PARALLEL_TYPES, "XLA")},
    )
    num_machines: int = option(
        1,
        kind=int,
        minimum=1,
        env="ACCELERATE_NUM_MACHINES",
        metavar="N",
        help="Machines that take part. The command is started once on each.",
        question="How many different machines will you use (more than 1 for multi-node training)?",
        asked_when={"distributed_type": (*PARALLEL_TYPES, "XLA", "DATA_PARALLEL", "MODEL_PARALLEL")},
    )
    num_cpu_threads_per_process: int | None = option(
        None,
        kind=int,
        minimum=1,
        env="OMP_NUM_THREADS",
        exported=True,
        metavar="N",
        help="CPU threads of each process. Left out, several processes share the physical cores of the machine "
        "evenly; a single one takes "
        "what torch takes.",
    )
