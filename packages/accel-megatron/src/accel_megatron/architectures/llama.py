"""Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from typing import ClassVar

from .base import LlamaLike


class Llama(LlamaLike):
    """LlamaForCausalLM."""

    model_classes: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM",)


class Mistral(LlamaLike):
    """MistralForCausalLM, with its sliding window."""

    model_classes: ClassVar[tuple[str, ...]] = ("MistralForCausalLM",)


class Qwen2(LlamaLike):
    """Qwen2ForCausalLM: queries, keys and values have biases."""

    model_classes: ClassVar[tuple[str, ...]] = ("Qwen2ForCausalLM",)
    qkv_bias = True


class Qwen3(LlamaLike):
    """Qwen3ForCausalLM: queries and keys are normalised."""

    model_classes: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM",)
    qk_norm = True
