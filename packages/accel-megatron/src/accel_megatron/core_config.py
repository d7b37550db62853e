"""The TransformerConfig of a model: what follows from the settings, the model and the precision."""

from __future__ import annotations

from typing import Any

import torch

from accel_state.errors import ConfigurationError

from ._megatron_compat import load_core, parallel_state
from .architectures.base import Architecture
from .layout import sizes_for
from .plugin import MegatronLMPlugin

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Fields of TransformerConfig that split the layers over the stages in other ways.
_UNEVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)


def _reduced_later(*_: Any, **__: Any) -> None:
    """Gradients are reduced when the window ends, not by every schedule."""


# What the engine's steps rely on: gradients are sums over tokens, which it divides and reduces itself.
_ENGINE = {"calculate_per_token_loss": True, "finalize_model_grads_func": _reduced_later}


def dtype_of(mixed_precision: str, otherwise: torch.dtype) -> torch.dtype:
    """Return the dtype of the parameters that are computed with."""
    dtype = _HALF.get(mixed_precision, otherwise)
    if dtype not in (torch.float32, *_HALF.values()):
        raise ConfigurationError(f"the model's dtype {dtype} is not one of float32, bfloat16, float16.")
    return dtype


def transformer_config(**fields: Any) -> Any:
    """Return a TransformerConfig with this run's parallel sizes and dtype, for a ``custom_model_provider_function``.

    Args:
        **fields: fields of Megatron-core's TransformerConfig, at least ``num_layers``, ``hidden_size`` and
            ``num_attention_heads``. They come before those of the run.
    """
    from accel_state import AcceleratorState

    plugin: MegatronLMPlugin | None = AcceleratorState().megatron_lm_plugin
    if plugin is None:
        raise ConfigurationError(
            "transformer_config() needs the settings of the run. Call it in the provider, which runs in prepare()."
        )
    dtype = dtype_of(AcceleratorState().mixed_precision, torch.float32)
    return create(plugin, dtype, plugin.virtual_stages(fields.get("num_layers")), fields)


def config_for(plugin: MegatronLMPlugin, architecture: Architecture, dtype: torch.dtype, other: dict[str, Any]) -> Any:
    """Return the config of a mapped model, after a check that the settings fit it."""
    settings = architecture.settings()
    _check_model(plugin, architecture, settings)
    vp_size = _virtual_stages(plugin, architecture, other)
    dropout = {name: getattr(plugin, name) for name in ("attention_dropout", "hidden_dropout")}
    given = {name: value for name, value in dropout.items() if value is not None}
    # Weights are loaded after the model was built.
    unset = dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _no_init)
    return create(plugin, dtype, vp_size, {**settings, **given, **unset, **other})


def create(plugin: MegatronLMPlugin, dtype: torch.dtype, vp_size: int | None, fields: dict[str, Any]) -> Any:
    """Return a TransformerConfig; ``fields`` come before what follows from the settings."""
    load_core()
    from megatron.core.transformer.transformer_config import TransformerConfig

    recompute: dict[str, Any] = {}
    if plugin.recompute_granularity or plugin.recompute_activations:
        recompute["recompute_granularity"] = plugin.recompute_granularity or "selective"
        recompute |= {name: getattr(plugin, name) for name in ("recompute_method", "recompute_num_layers")}
    combined = {
        **parallel_fields(plugin, dtype, vp_size),
        **recompute,
        **_ENGINE,
        # Kernels of Apex and of Megatron-LM that need CUDA extensions.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        **fields,
    }
    if plugin.expert_model_parallel_size > 1 and not combined.get("num_moe_experts"):
        raise ConfigurationError(
            f"expert_model_parallel_size={plugin.expert_model_parallel_size}, and the model has no experts. Set it "
            "to 1."
        )
    try:
        return TransformerConfig(**combined)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigurationError(f"Megatron-core refuses these settings: {error}") from error


def parallel_fields(plugin: MegatronLMPlugin, dtype: torch.dtype, vp_size: int | None) -> dict[str, Any]:
    """Return the fields of the process groups, the schedule and the precision."""
    uneven = plugin.decoder_last_pipeline_num_layers
    fields = {
        "tensor_model_parallel_size": plugin.tp_degree,
        "pipeline_model_parallel_size": plugin.pp_degree,
        "virtual_pipeline_model_parallel_size": vp_size,
        "context_parallel_size": plugin.context_parallel_size,
        "expert_model_parallel_size": plugin.expert_model_parallel_size,
        "expert_tensor_parallel_size": plugin.expert_tensor_parallel_size or plugin.tp_degree,
        "sequence_parallel": bool(plugin.sequence_parallelism),
        "num_layers_in_last_pipeline_stage": uneven if uneven and plugin.pp_degree > 1 else None,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
    }
    if vp_size:  # batched messages give wrong losses with two stages
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return fields


def adopt(config: Any, plugin: MegatronLMPlugin, dtype: torch.dtype, vp_size: int | None) -> None:
    """Give the config of a provided model what the engine relies on; raises ConfigurationError on other sizes."""
    wrong = []
    for name, value in parallel_fields(plugin, dtype, vp_size).items():
        found = getattr(config, name)
        if name != "num_layers_in_last_pipeline_stage" and found != value:
            if name == "pipeline_dtype" and plugin.pp_degree == 1:
                continue
            wrong.append(f"{name}={found} (here: {value})")
    if wrong:
        raise ConfigurationError(
            f"custom_model_provider_function built a model for other settings: {', '.join(wrong)}. Create its config "
            "with accel_megatron.transformer_config(num_layers=..., ...), which knows them."
        )
    for name, value in _ENGINE.items():
        setattr(config, name, value)


def set_virtual_stages(vp_size: int | None) -> None:
    """Tell Megatron-core how many chunks of the model each rank has."""
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vp_size)
    parallel_state.set_virtual_pipeline_model_parallel_rank(None if vp_size is None else 0)


def _no_init(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _check_model(plugin: MegatronLMPlugin, architecture: Architecture, settings: dict[str, Any]) -> None:
    """Raise ConfigurationError where a setting is not one of the model."""
    kind = architecture.hf.model_type
    if plugin.context_parallel_size > 1 and not architecture.supports_context_parallel:
        raise ConfigurationError(
            f"context_parallel_size={plugin.context_parallel_size} needs a causal model, and this is a {kind}. Set it "
            "to 1."
        )
    rotary = getattr(architecture, "position_embedding", None) == "rope"
    if plugin.use_rotary_position_embeddings not in (None, rotary):
        raise ConfigurationError(
            f"use_rotary_position_embeddings={plugin.use_rotary_position_embeddings}, and a {kind} "
            f"{'has them' if rotary else 'has none'}. Leave it out."
        )
    for name, stack in (("encoder_seq_length", "encoder"), ("decoder_seq_length", "decoder after an encoder")):
        if getattr(plugin, name) is not None and name not in architecture.sequence_lengths:
            raise ConfigurationError(f"{name}={getattr(plugin, name)}, and a {kind} has no {stack}. Leave it out.")
    if settings.get("num_moe_experts") and plugin.tp_degree > 1 and not plugin.sequence_parallelism:
        raise ConfigurationError(
            f"tp_degree={plugin.tp_degree} of a model with experts needs sequence_parallelism=True."
        )


def _virtual_stages(plugin: MegatronLMPlugin, architecture: Architecture, other: dict[str, Any]) -> int | None:
    """Return the number of chunks of the model on a rank; None for one."""
    per_chunk = plugin.num_layers_per_virtual_pipeline_stage
    if not architecture.supports_interleaving:  # its stages check their layers themselves
        if per_chunk is not None:
            raise ConfigurationError(
                f"num_layers_per_virtual_pipeline_stage={per_chunk}: the stages of a {architecture.hf.model_type} "
                "cannot be interleaved. Leave it out."
            )
        return None
    if any(name in other for name in _UNEVEN):
        return None
    last = plugin.decoder_last_pipeline_num_layers or None
    sizes = (plugin.tp_degree, plugin.pp_degree, plugin.expert_model_parallel_size)
    chunks = sizes_for(architecture, *sizes, last, per_chunk).chunks
    plugin.check_interleaving(chunks)
    return chunks if chunks > 1 else None
