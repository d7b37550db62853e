"""torch's FullyShardedDataParallel, as the launcher hands it to the processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .option import OptionGroup, in_section

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCH_POLICIES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATE_DICT_TYPES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_fsdp = in_section("fsdp_config", "fsdp_")
_FIRST: dict[str, tuple[Any, ...]] = {"fsdp_version": (1,)}


def _numbered(names: tuple[str, ...]) -> dict[str, str]:
    """Positions, counted from 1, as other words for names."""
    return {str(number): name for number, name in enumerate(names, start=1)}


@dataclass(frozen=True)
class FsdpOptions(OptionGroup):
    """FSDP, versions 1 and 2."""

    title: ClassVar[str] = "FSDP"
    description: ClassVar[str] = "Used with --use_fsdp."
    enabled_by: ClassVar[tuple[str, Any] | None] = ("use_fsdp", True)

    version: int = _fsdp(
        1,
        "version",
        kind=int,
        choices=("1", "2"),
        help="1: FullyShardedDataParallel; 2: fully_shard, with one DTensor for each parameter.",
        question="Which version of FSDP should be used?",
        suggested=2,
    )
    sharding_strategy: str = _fsdp(
        "FULL_SHARD",
        "sharding_strategy",
        kind=str,
        choices=SHARDING_STRATEGIES,
        synonyms=_numbered(SHARDING_STRATEGIES),
        other_keys=("fsdp_config.sharding_strategy",),
        help="What is sharded, with version 1, by name or number (1 to 5): FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, "
        "HYBRID_SHARD, "
        "HYBRID_SHARD_ZERO2.",
        metavar="STRATEGY",
        question="What should your sharding strategy be?",
        asked_when=_FIRST,
    )
    reshard_after_forward: bool = _fsdp(
        True,
        "reshard_after_forward",
        kind=bool,
        help="Shard parameters again after the forward pass, with version 2: less memory, more communication.",
        question="Should parameters be sharded again after the forward pass (less memory, more communication)?",
        asked_when={"fsdp_version": (2,)},
    )
    offload_params: bool = _fsdp(
        False,
        "offload_params",
        kind=bool,
        other_keys=("fsdp_config.offload_params",),
        help="Keep parameters and gradients in CPU memory.",
        question="Should parameters and gradients be kept in CPU memory?",
    )
    auto_wrap_policy: str | None = _fsdp(
        None,
        "auto_wrap_policy",
        kind=str,
        choices=WRAP_POLICIES,
        synonyms=_numbered(WRAP_POLICIES),
        other_keys=("fsdp_config.auto_wrap_policy",),
        help="Which modules are wrapped on their own: those of certain classes, those above a size, or none.",
        question="What should your auto wrap policy be?",
        suggested="TRANSFORMER_BASED_WRAP",
    )
    transformer_layer_cls_to_wrap: str | None = _fsdp(
        None,
        "transformer_layer_cls_to_wrap",
        kind=str,
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
        other_keys=("fsdp_config.transformer_layer_cls_to_wrap",),
        metavar="NAMES",
        help="Class names to wrap with TRANSFORMER_BASED_WRAP, separated by commas, such as BertLayer; left out, the "
        "model's "
        "_no_split_modules.",
        question="Which layer classes should be wrapped, separated by commas (leave it empty for the model's "
        "_no_split_modules)?",
        asked_when={"fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",)},
    )
    min_num_params: int = _fsdp(
        100_000_000,
        "min_num_params",
        kind=int,
        minimum=0,
        other_keys=("fsdp_config.min_num_params",),
        metavar="N",
        help="Parameters from which on a module is wrapped with SIZE_BASED_WRAP.",
        question="From how many parameters on should a module be wrapped?",
        asked_when={"fsdp_auto_wrap_policy": ("SIZE_BASED_WRAP",)},
    )
    backward_prefetch: str | None = _fsdp(
        None,
        "backward_prefetch",
        also=("fsdp_backward_prefetch_policy",),
        kind=str,
        choices=PREFETCH_POLICIES,
        synonyms=_numbered(PREFETCH_POLICIES),
        other_keys=("fsdp_config.fsdp_backward_prefetch_policy",),
        help="When the next parameters are fetched in the backward pass, with version 1.",
        question="When should the next parameters be fetched in the backward pass?",
        asked_when=_FIRST,
        suggested="BACKWARD_PRE",
    )
    state_dict_type: str | None = _fsdp(
        None,
        "state_dict_type",
        kind=str,
        choices=STATE_DICT_TYPES,
        synonyms=_numbered(STATE_DICT_TYPES),
        help="How checkpoints are written: whole, as each rank's own part, or sharded.",
        question="How should checkpoints be written?",
        suggested="SHARDED_STATE_DICT",
    )
    forward_prefetch: bool = _fsdp(
        False,
        "forward_prefetch",
        kind=bool,
        help="Fetch the next parameters in the forward pass too, with version 1; for models whose order of modules "
        "never changes.",
        question="Should the next parameters be fetched in the forward pass too?",
        asked_when=_FIRST,
    )
    use_orig_params: bool = _fsdp(
        True,
        "use_orig_params",
        kind=bool,
        help="Keep the original parameters, with version 1, so that frozen and trained ones can be mixed.",
        question="Should the original parameters be kept (to mix frozen and trained ones)?",
        asked_when=_FIRST,
    )
    cpu_ram_efficient_loading: bool = _fsdp(
        True,
        "cpu_ram_efficient_loading",
        kind=bool,
        help="Only the first process reads the weights of a Transformers model; needs --fsdp_sync_module_states true.",
        question="Should only the first process read the weights of a Transformers model?",
    )
    sync_module_states: bool = _fsdp(
        True,
        "sync_module_states",
        kind=bool,
        help="Broadcast the first process's parameters when a module is wrapped.",
        question="Should the first process's parameters be broadcast when a module is wrapped?",
        asked_when={**_FIRST, "fsdp_cpu_ram_efficient_loading": (False,)},
    )
    activation_checkpointing: bool = _fsdp(
        False,
        "activation_checkpointing",
        kind=bool,
        help="Compute activations again in the backward pass rather than keep them.",
        question="Should activations be computed again in the backward pass (less memory, more time)?",
    )
    activation_checkpointing_offload: bool = _fsdp(
        False,
        "activation_checkpointing_offload",
        kind=bool,
        help="Keep what activation checkpointing saves in CPU memory.",
        question="Should what activation checkpointing saves be kept in CPU memory?",
        asked_when={"fsdp_activation_checkpointing": (True,)},
    )
