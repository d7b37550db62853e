"""Numbers of processes, machines and threads."""

from __future__ import annotations

from dataclasses import dataclass

from .declaration import OptionGroup, option
from .launch import PARALLEL_TYPES


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
        minimum=1,
        help="Number of machines. Run the command once on each.",
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
