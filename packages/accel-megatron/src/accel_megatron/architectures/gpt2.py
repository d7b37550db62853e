"""GPT-2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from accel_state.errors import ConfigurationError

from ..weights import FusedQKV, Transposed, Weight, weight
from .base import Decoder


class GPT2(Decoder):
    """GPT2LMHeadModel."""

    model_classes: ClassVar[tuple[str, ...]] = ("GPT2LMHeadModel",)
    position_embedding = "learned_absolute"

    @property
    def max_length(self) -> int:
        return self.hf.n_positions

    def settings(self) -> dict[str, Any]:
        hf = self.hf
        if hf.scale_attn_by_inverse_layer_idx or not hf.scale_attn_weights or hf.add_cross_attention:
            raise ConfigurationError(
                "scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False and add_cross_attention=True of GPT-2 "
                "are not supported in Megatron-core."
            )
        if hf.embd_pdrop != hf.resid_pdrop:
            raise ConfigurationError(
                f"embd_pdrop={hf.embd_pdrop} and resid_pdrop={hf.resid_pdrop} differ, and Megatron-core has one "
                "hidden_dropout for both. Set them to the same value."
            )
        return {
            "num_layers": hf.n_layer,
            "hidden_size": hf.n_embd,
            "num_attention_heads": hf.n_head,
            "ffn_hidden_size": hf.n_inner or 4 * hf.n_embd,
            "layernorm_epsilon": hf.layer_norm_epsilon,
            "activation_func": self.activation(hf.activation_function),
            "add_qkv_bias": True,
            "hidden_dropout": hf.resid_pdrop,
            "attention_dropout": hf.attn_pdrop,
        }

    def weights(self) -> Iterator[Weight]:
        yield weight("transformer.wte.weight", "embedding.word_embeddings.weight", rows=self.vocab_size)
        yield weight("transformer.wpe.weight", "embedding.position_embeddings.weight")
        if not self.tied:
            yield weight("lm_head.weight", "output_layer.weight", rows=self.vocab_size)
        for part in ("weight", "bias"):
            yield weight(f"transformer.ln_f.{part}", f"decoder.final_layernorm.{part}")
            matrix = Transposed() if part == "weight" else None
            for index in range(self.hf.n_layer):
                source, target = f"transformer.h.{index}.", f"decoder.layers.{index}."
                yield weight(f"{source}ln_1.{part}", f"{target}input_layernorm.{part}")
                yield weight(f"{source}ln_2.{part}", f"{target}pre_mlp_layernorm.{part}")
                qkv = FusedQKV(self.hf.n_head, transposed=True)
                yield weight(f"{source}attn.c_attn.{part}", f"{target}self_attention.linear_qkv.{part}", qkv)
                yield weight(f"{source}attn.c_proj.{part}", f"{target}self_attention.linear_proj.{part}", matrix)
                yield weight(f"{source}mlp.c_fc.{part}", f"{target}mlp.linear_fc1.{part}", matrix)
                yield weight(f"{source}mlp.c_proj.{part}", f"{target}mlp.linear_fc2.{part}", matrix)
