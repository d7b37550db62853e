"""Which engine shards or splits the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .option import OptionGroup, option
from .run_type import PARALLEL_TYPES


@dataclass(frozen=True)
class ParadigmOptions(OptionGroup):
    """At most one engine; a mesh may be laid over FSDP."""

    title: ClassVar[str] = "training paradigm"
    description: ClassVar[str] = (
        "At most one of DeepSpeed, FSDP and Megatron-LM; left out, every process holds the whole model."
    )

    use_deepspeed: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_USE_DEEPSPEED",
        exported=True,
        implied_by=("distributed_type", ("DEEPSPEED",)),
        help="Train with DeepSpeed.",
        question="Do you want to use DeepSpeed?",
        asked_when={"distributed_type": ("NO", *PARALLEL_TYPES)},
    )
    use_fsdp: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_USE_FSDP",
        exported=True,
        implied_by=("distributed_type", ("FSDP",)),
        help="Train with torch's FullyShardedDataParallel.",
        question="Do you want to use FullyShardedDataParallel?",
        asked_when={"distributed_type": PARALLEL_TYPES, "use_deepspeed": (False,)},
    )
    use_megatron_lm: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_USE_MEGATRON_LM",
        exported=True,
        implied_by=("distributed_type", ("MEGATRON_LM",)),
        help="Train with Megatron-LM.",
        question="Do you want to use Megatron-LM?",
        asked_when={"distributed_type": PARALLEL_TYPES, "use_deepspeed": (False,), "use_fsdp": (False,)},
    )
    use_parallelism_config: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_USE_PARALLELISM_CONFIG",
        exported=True,
        implied_by=("parallelism_config", ()),
        help="Lay the processes out as a mesh of the sizes given below; a parallelism_config section in a file says "
        "so too.",
        question="Do you want to combine several kinds of parallelism (a mesh of processes)?",
        asked_when={"use_fsdp": (True,)},
    )
