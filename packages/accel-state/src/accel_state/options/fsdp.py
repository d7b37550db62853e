"""FSDP settings that the launcher passes to the processes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from .declaration import OptionGroup, option

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCH_POLICIES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
SHARD_FORMATS = ("dcp", "safetensors")
CHECKPOINTING_MODES = ("full", "selective")
TENSOR_PARALLEL_MODES = ("sums", "collectives")
STATE_DICT_TYPES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_VERSION_1: dict[str, tuple[Any, ...]] = {"fsdp_version": (1,)}

_fsdp = functools.partial(option, section="fsdp_config", prefix="fsdp_", env_prefix="FSDP_", exported=True, alone=False)
_version_1 = functools.partial(_fsdp, asked_when=_VERSION_1)


def _numbered(names: tuple[str, ...]) -> dict[str, str]:
    """Positions, counted from 1, as synonyms of the names."""
    return {str(number): name for number, name in enumerate(names, start=1)}


@dataclass(frozen=True)
class FsdpOptions(OptionGroup):
    """FSDP, versions 1 and 2."""

    title = "FSDP"
    description = "Used with --use_fsdp."
    enabled_by: ClassVar[tuple[str, Any] | None] = ("use_fsdp", True)

    version: int = _fsdp(
        1,
        choices=("1", "2"),
        help="1: FullyShardedDataParallel; 2: fully_shard, which makes each parameter a DTensor.",
        question="Which version of FSDP should be used?",
        suggested=2,
    )
    sharding_strategy: str = _version_1(
        "FULL_SHARD",
        choices=SHARDING_STRATEGIES,
        synonyms=_numbered(SHARDING_STRATEGIES),
        other_keys=("fsdp_config.sharding_strategy",),
        help="Sharding strategy of version 1, by name or number (1 to 5): FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, "
        "HYBRID_SHARD, HYBRID_SHARD_ZERO2.",
        metavar="STRATEGY",
        question="What should your sharding strategy be?",
    )
    reshard_after_forward: bool = _fsdp(
        True,
        help="Reshard parameters after the forward pass, with version 2: less memory, more communication.",
        question="Should parameters be resharded after the forward pass (less memory, more communication)?",
        asked_when={"fsdp_version": (2,)},
    )
    offload_params: bool = _fsdp(
        False,
        other_keys=("fsdp_config.offload_params",),
        help="Offload parameters and gradients to CPU memory.",
        question="Should parameters and gradients be offloaded to CPU memory?",
    )
    auto_wrap_policy: str | None = _fsdp(
        choices=WRAP_POLICIES,
        synonyms=_numbered(WRAP_POLICIES),
        other_keys=("fsdp_config.auto_wrap_policy",),
        help="Which modules are wrapped individually: those of given classes, those above a size, or none.",
        question="What should your auto wrap policy be?",
        suggested="TRANSFORMER_BASED_WRAP",
    )
    transformer_layer_cls_to_wrap: str | None = _fsdp(
        separated=True,
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
        other_keys=("fsdp_config.transformer_layer_cls_to_wrap",),
        metavar="NAMES",
        help="Class names of the layers to wrap with TRANSFORMER_BASED_WRAP, separated by commas, such as BertLayer. "
        "Left out, the model's _no_split_modules.",
        question="Which layer classes should be wrapped, separated by commas (empty: the model's _no_split_modules)?",
        asked_when={"fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",)},
    )
    min_num_params: int = _fsdp(
        100_000_000,
        minimum=0,
        other_keys=("fsdp_config.min_num_params",),
        help="Minimum number of parameters of a module that SIZE_BASED_WRAP wraps.",
        question="What is the minimum number of parameters of a module to wrap?",
        asked_when={"fsdp_auto_wrap_policy": ("SIZE_BASED_WRAP",)},
    )
    backward_prefetch: str | None = _version_1(
        also=("fsdp_backward_prefetch_policy",),
        choices=PREFETCH_POLICIES,
        synonyms=_numbered(PREFETCH_POLICIES),
        other_keys=("fsdp_config.fsdp_backward_prefetch_policy",),
        help="When the next parameters are all-gathered in the backward pass, with version 1.",
        question="When should the next parameters be all-gathered in the backward pass?",
        suggested="BACKWARD_PRE",
    )
    state_dict_type: str | None = _fsdp(
        choices=STATE_DICT_TYPES,
        synonyms=_numbered(STATE_DICT_TYPES),
        help="Format of checkpoints: full tensors, each rank's local shard, or sharded for any number of processes.",
        question="Which format should checkpoints have?",
        suggested="SHARDED_STATE_DICT",
    )
    sharded_state_format: str = _fsdp(
        "dcp",
        choices=SHARD_FORMATS,
        also=("sharded_state_format",),
        help="Format of the weights with SHARDED_STATE_DICT: that of torch.distributed.checkpoint, or whole tensors in "
        "safetensors files that from_pretrained reads.",
    )
    forward_prefetch: bool = _version_1(
        False,
        help="All-gather the next parameters ahead in the forward pass, with version 1; needs a fixed module order.",
        question="Should the next parameters be all-gathered ahead in the forward pass too?",
    )
    use_orig_params: bool = _version_1(
        True,
        help="Keep the original parameters, with version 1, so that frozen and trainable parameters can be mixed.",
        question="Should the original parameters be kept (to mix frozen and trainable parameters)?",
    )
    cpu_ram_efficient_loading: bool = _fsdp(
        True,
        help="Load a Transformers model's weights on the first process only; needs --fsdp_sync_module_states true.",
        question="Should only the first process load the weights of a Transformers model?",
    )
    sync_module_states: bool = _fsdp(
        True,
        help="Broadcast the parameters of the first process when a module is wrapped.",
        question="Should the parameters of the first process be broadcast when a module is wrapped?",
        asked_when={**_VERSION_1, "fsdp_cpu_ram_efficient_loading": (False,)},
    )
    activation_checkpointing: bool = _fsdp(
        False,
        help="Recompute activations in the backward pass instead of storing them.",
        question="Should activations be recomputed in the backward pass (less memory, more time)?",
    )
    activation_checkpointing_mode: str = _fsdp(
        "full",
        choices=(*CHECKPOINTING_MODES, *TENSOR_PARALLEL_MODES),
        help="What activation checkpointing recomputes: all of a unit (full), all except for matrix products, "
        "convolutions and attention (selective), or with tensor parallelism all except for sums over its ranks (sums), "
        "and gathered inputs too (collectives).",
        question="Should everything be recomputed (full), or all except for matrix products and attention (selective), "
        "for sums over tensor-parallel ranks (sums), or for these and gathered inputs (collectives)?",
        asked_when={"fsdp_activation_checkpointing": (True,)},
    )
    activation_checkpointing_every: int = _fsdp(
        1,
        minimum=1,
        metavar="N",
        help="Checkpoint one of every N units (Transformer blocks), beginning with the first.",
        question="Of how many units should one be checkpointed (1 for all)?",
        asked_when={"fsdp_activation_checkpointing": (True,)},
    )
    activation_checkpointing_offload: bool = _fsdp(
        False,
        help="Offload the tensors that activation checkpointing saves to CPU memory.",
        question="Should the tensors that activation checkpointing saves be offloaded to CPU memory?",
        asked_when={"fsdp_activation_checkpointing": (True,)},
    )
    ignored_modules: str | None = _fsdp(
        metavar="REGEX",
        help="Regular expression for the full names of modules that are not sharded, such as 'lm_head|.*router'.",
    )
