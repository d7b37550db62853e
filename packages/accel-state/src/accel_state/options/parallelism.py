"""Settings of a device mesh that the launcher passes to the processes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .declaration import MORE_THAN_ONE, OptionGroup, option

_axis = functools.partial(
    option,
    section="parallelism_config",
    prefix="parallelism_config_",
    env_prefix="PARALLELISM_CONFIG_",
    exported=True,
    alone=False,
)


@dataclass(frozen=True)
class ParallelismOptions(OptionGroup):
    """Sizes of the mesh axes; their product is the number of processes."""

    title = "mesh"
    description = "Used with --use_parallelism_config. The product of the sizes must be the number of processes."
    enabled_by = ("use_parallelism_config", True)

    dp_replicate_size: int = _axis(
        1,
        minimum=1,
        help="Number of model replicas (data parallelism).",
        question="How many replicas of the model should there be?",
    )
    dp_shard_size: int = _axis(
        1,
        minimum=1,
        help="Number of processes that each replica is sharded over (FSDP).",
        question="Over how many processes should each replica be sharded?",
    )
    tp_size: int = _axis(
        1,
        minimum=1,
        other_keys=("tp_config.tp_size",),
        help="Number of processes that each layer is split over (tensor parallelism).",
        question="Over how many processes should each layer be split (tensor parallelism)?",
    )
    cp_size: int = _axis(
        1,
        minimum=1,
        help="Number of processes that each sequence is split over (context parallelism).",
        question="Over how many processes should each sequence be split (context parallelism)?",
    )
    cp_backend: str = _axis("torch", choices=("torch",), help="Implementation of context parallelism.")
    cp_comm_strategy: str = _axis(
        "allgather",
        choices=("allgather", "alltoall"),
        help="How context parallelism exchanges keys and values.",
        question="How should context parallelism exchange keys and values?",
        asked_when={"parallelism_config_cp_size": (MORE_THAN_ONE,)},
    )
    sp_size: int = _axis(
        1, minimum=1, help="Number of processes that attention heads are split over (Ulysses sequence parallelism)."
    )
    sp_backend: str = _axis("deepspeed", choices=("deepspeed",), help="Implementation of sequence parallelism.")
    sp_seq_length: int | None = _axis(minimum=1, help="Sequence length in tokens, if it is the same for all batches.")
    sp_seq_length_is_variable: bool = _axis(True, help="Whether the sequence length differs between batches.")
    sp_attn_implementation: str = _axis("sdpa", metavar="NAME", help="Attention implementation with sp_size > 1.")
    pp_size: int = _axis(1, minimum=1, help="Number of pipeline stages that the model is split into.")
