"""GPT-NeoX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from accel_state.errors import ConfigurationError

from ..layers import ParallelResidualLayer, layer_spec
from ..weights import Weight, weight
from .base import Decoder


class GPTNeoX(Decoder):
    """GPTNeoXForCausalLM."""

    model_classes: ClassVar[tuple[str, ...]] = ("GPTNeoXForCausalLM",)

    def spec(self) -> Any:
        if self.hf.use_parallel_residual:
            return layer_spec("causal", layer=ParallelResidualLayer)
        return layer_spec("causal")

    def settings(self) -> dict[str, Any]:
        hf = self.hf
        if not hf.attention_bias:
            raise ConfigurationError("attention_bias=False of GPT-NeoX is not supported in Megatron-core.")
        return {
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "num_attention_heads": hf.num_attention_heads,
            "ffn_hidden_size": hf.intermediate_size,
            "layernorm_epsilon": hf.layer_norm_eps,
            "activation_func": self.activation(hf.hidden_act),
            "add_qkv_bias": True,
            "hidden_dropout": hf.hidden_dropout,
            "attention_dropout": hf.attention_dropout,
        }

    def file_weights(self) -> Iterator[Weight]:
        for pair in self.weights():
            if pair.names == ("lm_head.weight",):  # files have the name of Transformers 4
                pair = replace(pair, names=("embed_out.weight",))
            yield pair

    def weights(self) -> Iterator[Weight]:
        yield weight("gpt_neox.embed_in.weight", "embedding.word_embeddings.weight", rows=self.vocab_size)
        if not self.tied:
            yield weight("lm_head.weight", "output_layer.weight", rows=self.vocab_size)
        for part in ("weight", "bias"):
            yield weight(f"gpt_neox.final_layer_norm.{part}", f"decoder.final_layernorm.{part}")
            for index in range(self.hf.num_hidden_layers):
                source, target = f"gpt_neox.layers.{index}.", f"decoder.layers.{index}."
                yield weight(f"{source}input_layernorm.{part}", f"{target}input_layernorm.{part}")
                yield weight(f"{source}post_attention_layernorm.{part}", f"{target}pre_mlp_layernorm.{part}")
                # Queries, keys and values are stored by head in both.
                yield weight(f"{source}attention.query_key_value.{part}", f"{target}self_attention.linear_qkv.{part}")
                yield weight(f"{source}attention.dense.{part}", f"{target}self_attention.linear_proj.{part}")
                yield weight(f"{source}mlp.dense_h_to_4h.{part}", f"{target}mlp.linear_fc1.{part}")
                yield weight(f"{source}mlp.dense_4h_to_h.{part}", f"{target}mlp.linear_fc2.{part}")
