"""Settings of a device mesh and of Megatron-LM that the launcher passes to the processes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from .declaration import MORE_THAN_ONE, OptionGroup, option

_axis = functools.partial(
    option,
    section="parallelism_config",
    prefix="parallelism_config_",
    env_prefix="PARALLELISM_CONFIG_",
    exported=True,
    alone=False,
)
_size = functools.partial(_axis, 1, minimum=1)


@dataclass(frozen=True)
class ParallelismOptions(OptionGroup):
    """Sizes of the mesh axes; the product of all but ep_size is the number of processes."""

    title = "mesh"
    description = (
        "Used with --use_parallelism_config. The product of the sizes, without ep_size, must be the number of "
        "processes."
    )
    enabled_by: ClassVar[tuple[str, Any] | None] = ("use_parallelism_config", True)

    dp_replicate_size: int = _size(
        help="Number of model replicas (data parallelism).",
        question="How many replicas of the model should there be?",
    )
    dp_shard_size: int = _size(
        help="Number of processes that each replica is sharded over (FSDP).",
        question="Over how many processes should each replica be sharded?",
    )
    tp_size: int = _size(
        other_keys=("tp_config.tp_size",),
        help="Number of processes that each layer is split over (tensor parallelism).",
        question="Over how many processes should each layer be split (tensor parallelism)?",
    )
    tp_sequence_parallel: bool | None = _axis(
        help="Shard hidden states between tensor-parallel layers along the sequence (default: if the model allows).",
        question="Should hidden states between tensor-parallel layers be sharded along the sequence?",
        asked_when={"parallelism_config_tp_size": (MORE_THAN_ONE,)},
        suggested=True,
    )
    enable_async_tp: bool = _axis(
        False,
        help="Overlap the products of tensor-parallel layers with their communication (CUDA devices of one node).",
        question="Should products of tensor-parallel layers overlap with their communication (CUDA only)?",
        asked_when={"parallelism_config_tp_size": (MORE_THAN_ONE,)},
    )
    cp_size: int = _size(
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
    cp_balance: str = _axis(
        "length",
        choices=("length", "documents"),
        help="Whether the ranks of context parallelism get parts of equal length, or of equal attention work where "
        "several documents are packed into a sequence.",
        question="Should the ranks get parts of sequences of equal length, or of equal work for packed documents?",
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
    ep_size: int = _size(
        help="Number of processes that experts are distributed over (expert parallelism). It divides dp_shard_size x "
        "cp_size x tp_size, and adds no processes.",
        question="Over how many processes should the experts of a mixture be distributed (expert parallelism)?",
    )


_megatron = functools.partial(
    option,
    section="megatron_lm_config",
    prefix="megatron_lm_",
    env_prefix="MEGATRON_LM_",
    exported=True,
    alone=False,
)
_degree = functools.partial(_megatron, 1, minimum=1)


@dataclass(frozen=True)
class MegatronOptions(OptionGroup):
    """Megatron-LM. A value of None leaves the choice to Megatron-LM."""

    title = "Megatron-LM"
    description = "Used with --use_megatron_lm."
    enabled_by: ClassVar[tuple[str, Any] | None] = ("use_megatron_lm", True)

    tp_degree: int = _degree(
        help="Tensor parallel size: number of processes that each layer is split over.",
        question="What is the tensor parallelism degree?",
    )
    pp_degree: int = _degree(
        help="Pipeline parallel size: number of stages that the layers are split into.",
        question="What is the pipeline parallelism degree?",
    )
    num_micro_batches: int | None = _megatron(
        minimum=1,
        help="Number of micro batches that the pipeline splits a batch into.",
        question="What is the number of micro-batches?",
        asked_when={"megatron_lm_pp_degree": (MORE_THAN_ONE,)},
        suggested=1,
    )
    sequence_parallelism: bool | None = _megatron(
        help="Split the sequence dimension over the tensor-parallel ranks as well.",
        question="Do you want to enable sequence parallelism?",
        asked_when={"megatron_lm_tp_degree": (MORE_THAN_ONE,)},
        suggested=True,
    )
    recompute_activations: bool | None = _megatron(
        help="Recompute selected activations in the backward pass.",
        question="Do you want to enable selective activation recomputation?",
        suggested=True,
    )
    use_distributed_optimizer: bool | None = _megatron(
        help="Shard optimizer states and gradients over the data-parallel ranks.",
        question="Should optimizer states and gradients be sharded over the data-parallel ranks?",
        suggested=True,
    )
    gradient_clipping: float = _megatron(
        1.0,
        minimum=0,
        metavar="NORM",
        help="Maximum global L2 norm of gradients; 0 turns clipping off.",
        question="To which global L2 norm should gradients be clipped (0 for no clipping)?",
    )
    expert_model_parallel_size: int | None = _megatron(
        minimum=1, help="Expert parallel size of mixture-of-experts layers."
    )
    expert_tensor_parallel_size: int | None = _megatron(minimum=1, help="Tensor parallel size of each expert.")
    context_parallel_size: int | None = _megatron(minimum=1, help="Context parallel size, which splits sequences.")
    decoder_last_pipeline_num_layers: int | None = _megatron(minimum=0, help="Decoder layers in the last stage.")
    recompute_granularity: str | None = _megatron(choices=("full", "selective"), help="Which activations to recompute.")
    recompute_method: str | None = _megatron(
        choices=("uniform", "block"), help="How layers are selected for recomputation."
    )
    recompute_num_layers: int | None = _megatron(minimum=1, help="Number of layers recomputed at a time.")
    attention_backend: str | None = _megatron(metavar="NAME", help="Attention implementation, by its Megatron-LM name.")
    attention_dropout: float | None = _megatron(minimum=0, metavar="P", help="Dropout probability in attention.")
    hidden_dropout: float | None = _megatron(minimum=0, metavar="P", help="Dropout probability after hidden layers.")
    attention_softmax_in_fp32: bool | None = _megatron(help="Compute the softmax of attention in float32.")
    calculate_per_token_loss: bool | None = _megatron(help="Average the loss over tokens, not over micro batches.")
    use_rotary_position_embeddings: bool | None = _megatron(help="Use rotary position embeddings in the model.")
    use_custom_fsdp: bool = _megatron(
        False, help="Shard parameters, gradients and optimizer states with the FSDP of Megatron-core."
    )
    no_load_optim: bool = _megatron(False, help="Do not load optimizer states from a checkpoint.")
    no_save_optim: bool = _megatron(False, help="Do not save optimizer states in a checkpoint.")
    eod_mask_loss: bool = _megatron(False, help="Mask end-of-document tokens in the loss.")
    optimizer_cpu_offload: bool = _megatron(False, help="Offload optimizer states to CPU memory.")
    overlap_cpu_optimizer_d2h_h2d: bool = _megatron(False, help="Overlap the CPU optimizer step with its copies.")
    use_precision_aware_optimizer: bool = _megatron(False, help="Store optimizer states in reduced precision.")
