"""A mesh of processes with several parallel axes, as the launcher hands it to the processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .option import MORE_THAN_ONE, OptionGroup, in_section

_axis = in_section("parallelism_config", "parallelism_config_")


@dataclass(frozen=True)
class ParallelismOptions(OptionGroup):
    """Sizes of the axes; their product is the number of processes."""

    title: ClassVar[str] = "mesh"
    description: ClassVar[str] = (
        "Used with --use_parallelism_config. The product of the sizes is the number of processes."
    )
    enabled_by: ClassVar[tuple[str, Any] | None] = ("use_parallelism_config", True)

    dp_replicate_size: int = _axis(
        1,
        "dp_replicate_size",
        kind=int,
        minimum=1,
        metavar="N",
        help="Replicas of the model (data parallelism).",
        question="How many replicas of the model should there be?",
    )
    dp_shard_size: int = _axis(
        1,
        "dp_shard_size",
        kind=int,
        minimum=1,
        metavar="N",
        help="Processes that a replica is sharded over.",
        question="Over how many processes should a replica be sharded?",
    )
    tp_size: int = _axis(
        1,
        "tp_size",
        other_keys=("tp_config.tp_size",),
        kind=int,
        minimum=1,
        metavar="N",
        help="Processes that share each layer (tensor parallelism).",
        question="How many processes should share each layer (tensor parallelism)?",
    )
    cp_size: int = _axis(
        1,
        "cp_size",
        kind=int,
        minimum=1,
        metavar="N",
        help="Processes that share a long sequence (context parallelism).",
        question="How many processes should share a sequence (context parallelism)?",
    )
    cp_backend: str = _axis(
        "torch", "cp_backend", kind=str, choices=("torch",), help="Implementation of context parallelism."
    )
    cp_comm_strategy: str = _axis(
        "allgather",
        "cp_comm_strategy",
        kind=str,
        choices=("allgather", "alltoall"),
        help="How keys and values travel in context parallelism.",
        question="How should keys and values travel in context parallelism?",
        asked_when={"parallelism_config_cp_size": (MORE_THAN_ONE,)},
    )
    sp_size: int = _axis(
        1,
        "sp_size",
        kind=int,
        minimum=1,
        metavar="N",
        help="Processes that share a sequence by attention heads (sequence parallelism).",
    )
    sp_backend: str = _axis(
        "deepspeed", "sp_backend", kind=str, choices=("deepspeed",), help="Implementation of sequence parallelism."
    )
    sp_seq_length: int | None = _axis(
        None,
        "sp_seq_length",
        kind=int,
        minimum=1,
        metavar="N",
        help="Tokens of a sequence, where they are always as many.",
    )
    sp_seq_length_is_variable: bool = _axis(
        True, "sp_seq_length_is_variable", kind=bool, help="Whether sequences differ in length."
    )
    sp_attn_implementation: str = _axis(
        "sdpa",
        "sp_attn_implementation",
        kind=str,
        metavar="NAME",
        help="Implementation of attention under sequence parallelism.",
    )
    pp_size: int = _axis(
        1,
        "pp_size",
        kind=int,
        minimum=1,
        metavar="N",
        help="Stages of a pipeline that the model is cut into (pipeline parallelism).",
    )
