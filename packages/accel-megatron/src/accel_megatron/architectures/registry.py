"""The registered architectures, by the ``model_type`` of their Transformers config."""

from __future__ import annotations

from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.registry import Registry

from .base import Architecture

ARCHITECTURES: Registry[type[Architecture]] = Registry(
    "Megatron architecture",
    {
        "gpt2": "accel_megatron.architectures.gpt2:GPT2",
        "gpt_neox": "accel_megatron.architectures.gpt_neox:GPTNeoX",
        "llama": "accel_megatron.architectures.llama:Llama",
        "mistral": "accel_megatron.architectures.llama:Mistral",
        "qwen2": "accel_megatron.architectures.llama:Qwen2",
        "qwen3": "accel_megatron.architectures.llama:Qwen3",
        "mixtral": "accel_megatron.architectures.mixtral:Mixtral",
        "megatron-bert": "accel_megatron.architectures.bert:MegatronBert",
        "t5": "accel_megatron.architectures.t5:T5",
    },
    entry_point_group="accel_megatron.architectures",
)


def architecture_of(model: Any) -> Architecture:
    """Return the architecture of a Transformers model.

    Raises:
        ConfigurationError: none is registered for it.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ConfigurationError(
            f"{type(model).__name__} (model_type {model_type!r}) has no mapping to Megatron-core. Mapped: "
            f"{', '.join(ARCHITECTURES)}. Register one in the entry point group accel_megatron.architectures (see "
            "docs/guides/megatron.md), or pass MegatronLMPlugin(custom_model_provider_function=...)."
        )
    return ARCHITECTURES.load(model_type)(model)


def settings_of(model: Any) -> dict[str, Any]:
    """Return the fields of TransformerConfig that a model has; none for one without a mapping."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        return {}
    kind = ARCHITECTURES.load(model_type)
    return kind(model).settings() if type(model).__name__ in kind.model_classes else {}
