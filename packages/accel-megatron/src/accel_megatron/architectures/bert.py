"""Megatron-BERT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..layers import Norm, block_spec, layer_spec, mask_padded_logits
from ..weights import QKV, Weight, weight
from .base import IGNORED, Architecture, Batch, Chunk, fixed_length, refuse_unknown

_LAYER = {
    "attention.ln": "input_layernorm",
    "attention.output.dense": "self_attention.linear_proj",
    "ln": "pre_mlp_layernorm",
    "intermediate.dense": "mlp.linear_fc1",
    "output.dense": "mlp.linear_fc2",
}
_HEADS = {
    "bert.encoder.ln": "encoder.final_layernorm",
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    "bert.pooler.dense": "pooler.dense",
    "cls.seq_relationship": "binary_head",
}


class MegatronBert(Architecture):
    """MegatronBertForPreTraining: masked words and the next sentence."""

    model_classes: ClassVar[tuple[str, ...]] = ("MegatronBertForPreTraining",)
    normalised: ClassVar[bool] = True
    supports_context_parallel = False
    sequence_lengths: ClassVar[tuple[str, ...]] = ("encoder_seq_length",)

    def settings(self) -> dict[str, Any]:
        hf = self.hf
        return {
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "num_attention_heads": hf.num_attention_heads,
            "ffn_hidden_size": hf.intermediate_size,
            "layernorm_epsilon": hf.layer_norm_eps,
            "activation_func": self.activation(hf.hidden_act),
            "add_qkv_bias": True,
            "hidden_dropout": hf.hidden_dropout_prob,
            "attention_dropout": hf.attention_probs_dropout_prob,
        }

    def weights(self) -> Iterator[Weight]:
        names = {"word": "word", "position": "position", "token_type": "tokentype"}
        for source, target in names.items():
            rows = self.vocab_size if source == "word" else None
            source = f"bert.embeddings.{source}_embeddings.weight"
            yield weight(source, f"embedding.{target}_embeddings.weight", rows=rows)
        yield weight("cls.predictions.bias", "output_layer.bias", rows=self.vocab_size)
        if not self.tied:
            yield weight("cls.predictions.decoder.weight", "output_layer.weight", rows=self.vocab_size)
        qkv = QKV(self.hf.num_attention_heads, self.hf.num_attention_heads)
        for part in ("weight", "bias"):
            for source, target in _HEADS.items():
                yield weight(f"{source}.{part}", f"{target}.{part}")
            for index in range(self.hf.num_hidden_layers):
                layer, block = f"bert.encoder.layer.{index}.", f"encoder.layers.{index}."
                for source, target in _LAYER.items():
                    yield weight(f"{layer}{source}.{part}", f"{block}{target}.{part}")
                names_of = [f"{layer}attention.self.{name}.{part}" for name in ("query", "key", "value")]
                yield weight(names_of, f"{block}self_attention.linear_qkv.{part}", qkv)

    def build(self, chunk: Chunk) -> nn.Module:
        from megatron.core.models.bert import bert_lm_head
        from megatron.core.models.bert.bert_model import BertModel

        bert_lm_head.LNImpl = Norm  # its own norm refuses sequence parallelism without Transformer Engine
        model: Any = BertModel(
            chunk.config,
            num_tokentypes=self.hf.type_vocab_size,
            transformer_layer_spec=block_spec(chunk.config, layer_spec("padding"), chunk.vp_stage),
            vocab_size=chunk.vocab_size,
            max_sequence_length=self.max_length,
            pre_process=chunk.pre,
            post_process=chunk.post,
            share_embeddings_and_output_weights=self.tied,
            add_binary_head=True,
            vp_stage=chunk.vp_stage,
        )
        if chunk.post:
            mask_padded_logits(model.output_layer, self.vocab_size, chunk.vocab_size)
        built: nn.Module = model
        return built

    def inputs(self, batch: Batch) -> Batch:
        given = dict(batch)
        ids = given.pop("input_ids")
        mask, types = given.pop("attention_mask", None), given.pop("token_type_ids", None)
        more = fixed_length("encoder_seq_length", ids.shape[1], self.lengths[0]) - ids.shape[1]
        made = {
            "input_ids": F.pad(ids, (0, more)),
            "attention_mask": F.pad(torch.ones_like(ids) if mask is None else mask.long(), (0, more)),
            "token_type_ids": F.pad(torch.zeros_like(ids) if types is None else types, (0, more)),
        }
        for name in ("labels", "next_sentence_label"):
            if given.get(name) is not None:
                value = given.pop(name)
                made[name] = F.pad(value, (0, more), value=IGNORED) if value.ndim > 1 else value
        if "labels" in made and "next_sentence_label" not in made:
            made["next_sentence_label"] = torch.full_like(ids[:, 0], IGNORED)
        refuse_unknown("MegatronBertForPreTraining", given, "input_ids, attention_mask, token_type_ids and labels")
        return made

    def call(self, model: nn.Module, batch: Batch) -> Any:
        labels = batch.get("labels")
        return model(
            batch["input_ids"],
            batch["attention_mask"],
            tokentype_ids=batch["token_type_ids"],
            lm_labels=None if labels is None else labels.clamp(min=0),
        )

    def weigh(self, batch: Batch) -> torch.Tensor:
        counted = [(batch[name] != IGNORED).sum() for name in ("labels", "next_sentence_label")]
        return torch.stack(counted).float()

    def loss(self, batch: Batch, output: Any, weights: torch.Tensor) -> torch.Tensor:
        words, sentences = output
        words = (words.float() * (batch["labels"] != IGNORED)).sum() / weights[0].clamp(min=1)
        labels = batch["next_sentence_label"]
        sentence = F.cross_entropy(sentences.float(), labels, reduction="sum", ignore_index=IGNORED)
        return words + sentence / weights[1].clamp(min=1)
