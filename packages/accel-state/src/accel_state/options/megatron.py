"""Megatron-LM, as the launcher hands it to the processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .option import MORE_THAN_ONE, OptionGroup, in_section

_megatron = in_section("megatron_lm_config", "megatron_lm_")


@dataclass(frozen=True)
class MegatronOptions(OptionGroup):
    """Megatron-LM. A value of None leaves the choice to Megatron-LM."""

    title: ClassVar[str] = "Megatron-LM"
    description: ClassVar[str] = "Used with --use_megatron_lm."
    enabled_by: ClassVar[tuple[str, Any] | None] = ("use_megatron_lm", True)

    tp_degree: int = _megatron(
        1,
        "tp_degree",
        kind=int,
        minimum=1,
        metavar="N",
        help="Processes that share each layer (tensor parallelism).",
        question="What is the tensor parallelism degree?",
    )
    pp_degree: int = _megatron(
        1,
        "pp_degree",
        kind=int,
        minimum=1,
        metavar="N",
        help="Stages that the layers are split into (pipeline parallelism).",
        question="What is the pipeline parallelism degree?",
    )
    num_micro_batches: int | None = _megatron(
        None,
        "num_micro_batches",
        kind=int,
        minimum=1,
        metavar="N",
        help="Micro batches that a batch is split into for the pipeline.",
        question="What is the number of micro-batches?",
        asked_when={"megatron_lm_pp_degree": (MORE_THAN_ONE,)},
        suggested=1,
    )
    sequence_parallelism: bool | None = _megatron(
        None,
        "sequence_parallelism",
        kind=bool,
        help="Split the sequence too, over the processes that share a layer.",
        question="Do you want to enable sequence parallelism?",
        asked_when={"megatron_lm_tp_degree": (MORE_THAN_ONE,)},
        suggested=True,
    )
    recompute_activations: bool | None = _megatron(
        None,
        "recompute_activations",
        kind=bool,
        help="Compute selected activations again in the backward pass.",
        question="Do you want to enable selective activation recomputation?",
        suggested=True,
    )
    use_distributed_optimizer: bool | None = _megatron(
        None,
        "use_distributed_optimizer",
        kind=bool,
        help="Shard optimizer states and gradients over the data-parallel ranks.",
        question="Should optimizer states and gradients be sharded over the data-parallel ranks (distributed "
        "optimizer)?",
        suggested=True,
    )
    gradient_clipping: float = _megatron(
        1.0,
        "gradient_clipping",
        kind=float,
        minimum=0,
        metavar="NORM",
        help="Global L2 norm that gradients are clipped to; 0 for none.",
        question="To which global L2 norm should gradients be clipped (0 for none)?",
    )
    expert_model_parallel_size: int | None = _megatron(
        None,
        "expert_model_parallel_size",
        kind=int,
        minimum=1,
        metavar="N",
        help="Processes that share the experts of a layer.",
    )
    expert_tensor_parallel_size: int | None = _megatron(
        None,
        "expert_tensor_parallel_size",
        kind=int,
        minimum=1,
        metavar="N",
        help="Processes that share each single expert.",
    )
    context_parallel_size: int | None = _megatron(
        None, "context_parallel_size", kind=int, minimum=1, metavar="N", help="Processes that share a long sequence."
    )
    decoder_last_pipeline_num_layers: int | None = _megatron(
        None,
        "decoder_last_pipeline_num_layers",
        kind=int,
        minimum=0,
        metavar="N",
        help="Decoder layers of the last pipeline stage.",
    )
    recompute_granularity: str | None = _megatron(
        None,
        "recompute_granularity",
        kind=str,
        choices=("full", "selective"),
        help="Which activations are computed again.",
    )
    recompute_method: str | None = _megatron(
        None,
        "recompute_method",
        kind=str,
        choices=("uniform", "block"),
        help="How the layers to compute again are chosen.",
    )
    recompute_num_layers: int | None = _megatron(
        None,
        "recompute_num_layers",
        kind=int,
        minimum=1,
        metavar="N",
        help="How many layers are computed again at a time.",
    )
    attention_backend: str | None = _megatron(
        None, "attention_backend", kind=str, metavar="NAME", help="Implementation of attention, by Megatron-LM's name."
    )
    attention_dropout: float | None = _megatron(
        None, "attention_dropout", kind=float, minimum=0, metavar="P", help="Probability of dropout in attention."
    )
    hidden_dropout: float | None = _megatron(
        None,
        "hidden_dropout",
        kind=float,
        minimum=0,
        metavar="P",
        help="Probability of dropout after the hidden layers.",
    )
    attention_softmax_in_fp32: bool | None = _megatron(
        None, "attention_softmax_in_fp32", kind=bool, help="Compute the softmax of attention in 32 bits."
    )
    calculate_per_token_loss: bool | None = _megatron(
        None, "calculate_per_token_loss", kind=bool, help="Average the loss over tokens rather than over micro batches."
    )
    use_rotary_position_embeddings: bool | None = _megatron(
        None, "use_rotary_position_embeddings", kind=bool, help="Use rotary position embeddings in the model."
    )
    use_custom_fsdp: bool = _megatron(
        False, "use_custom_fsdp", kind=bool, help="Use Megatron-LM's own fully sharded data parallelism."
    )
    no_load_optim: bool = _megatron(
        False, "no_load_optim", kind=bool, help="Do not load the optimizer from a checkpoint."
    )
    no_save_optim: bool = _megatron(
        False, "no_save_optim", kind=bool, help="Do not save the optimizer in a checkpoint."
    )
    eod_mask_loss: bool = _megatron(
        False, "eod_mask_loss", kind=bool, help="Leave end-of-document tokens out of the loss."
    )
    optimizer_cpu_offload: bool = _megatron(
        False, "optimizer_cpu_offload", kind=bool, help="Keep optimizer states in CPU memory."
    )
    overlap_cpu_optimizer_d2h_h2d: bool = _megatron(
        False,
        "overlap_cpu_optimizer_d2h_h2d",
        kind=bool,
        help="Copy to and from the CPU while the optimizer computes there.",
    )
    use_precision_aware_optimizer: bool = _megatron(
        False,
        "use_precision_aware_optimizer",
        kind=bool,
        help="Keep optimizer states in the precision that each one needs.",
    )
