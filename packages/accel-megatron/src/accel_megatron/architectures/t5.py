"""T5, also in a pipeline, which Megatron-core itself does not support."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from accel_state.errors import ConfigurationError

from .._megatron_compat import parallel_state
from ..layers import block_spec, layer_spec, mask_padded_logits
from ..weights import KV, QKV, Concatenated, Weight, weight
from .base import IGNORED, Architecture, Batch, Chunk, fixed_length, refuse_unknown


class T5(Architecture):
    """T5ForConditionalGeneration, of versions 1.0 and 1.1."""

    model_classes: ClassVar[tuple[str, ...]] = ("T5ForConditionalGeneration",)
    unmapped: ClassVar[tuple[str, ...]] = ("lm_head.output_layer.bias",)
    supports_context_parallel = False
    supports_interleaving = False
    sequence_lengths: ClassVar[tuple[str, ...]] = ("encoder_seq_length", "decoder_seq_length")
    max_length: int | None = None

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.scales_output: Any | bool = self.tied and getattr(self.hf, "scale_decoder_outputs", True)

    @property
    def sequences(self) -> int:  # type: ignore[override]
        # Those of encoder and decoder are passed from stage to stage together.
        return 2 if parallel_state.get_pipeline_model_parallel_world_size() > 1 else 1

    def settings(self) -> dict[str, Any]:
        hf = self.hf
        if hf.num_layers != hf.num_decoder_layers:
            raise ConfigurationError(
                f"num_layers={hf.num_layers} and num_decoder_layers={hf.num_decoder_layers} of T5 must be equal in "
                "Megatron-core."
            )
        return {
            "num_layers": hf.num_layers,
            "hidden_size": hf.d_model,
            "num_attention_heads": hf.num_heads,
            "kv_channels": hf.d_kv,
            "ffn_hidden_size": hf.d_ff,
            "layernorm_epsilon": hf.layer_norm_epsilon,
            "activation_func": self.activation(hf.dense_act_fn),
            "gated_linear_unit": hf.is_gated_act,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "softmax_scale": 1.0,
            "hidden_dropout": hf.dropout_rate,
            "attention_dropout": hf.dropout_rate,
        }

    def weights(self) -> Iterator[Weight]:
        hf = self.hf
        yield weight("shared.weight", "embedding.word_embeddings.weight", rows=self.vocab_size)
        if not self.tied:
            yield weight("lm_head.weight", "lm_head.output_layer.weight", rows=self.vocab_size)
        qkv = QKV(hf.num_heads, hf.num_heads)
        for stack in ("encoder", "decoder"):
            yield weight(f"{stack}.final_layer_norm.weight", f"{stack}.final_layernorm.weight")
            bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            yield weight(bias, f"{stack}_relative_pos_emb.relative_attention_bias.weight")
            dense = 1 if stack == "encoder" else 2
            for index in range(hf.num_layers):
                source, target = f"{stack}.block.{index}.layer.", f"{stack}.layers.{index}."
                attention, cross = f"{source}0.SelfAttention.", f"{source}1.EncDecAttention."
                mlp = f"{source}{dense}.DenseReluDense."
                yield weight(f"{source}0.layer_norm.weight", f"{target}input_layernorm.weight")
                yield weight(f"{source}{dense}.layer_norm.weight", f"{target}pre_mlp_layernorm.weight")
                names = [f"{attention}{name}.weight" for name in "qkv"]
                yield weight(names, f"{target}self_attention.linear_qkv.weight", qkv)
                yield weight(f"{attention}o.weight", f"{target}self_attention.linear_proj.weight")
                if hf.is_gated_act:
                    gated = [f"{mlp}wi_0.weight", f"{mlp}wi_1.weight"]
                    yield weight(gated, f"{target}mlp.linear_fc1.weight", Concatenated(), blocks=2)
                else:
                    yield weight(f"{mlp}wi.weight", f"{target}mlp.linear_fc1.weight")
                yield weight(f"{mlp}wo.weight", f"{target}mlp.linear_fc2.weight")
                if stack == "decoder":
                    yield weight(f"{source}1.layer_norm.weight", f"{target}pre_cross_attn_layernorm.weight")
                    yield weight(f"{cross}q.weight", f"{target}cross_attention.linear_q.weight")
                    names = [f"{cross}{name}.weight" for name in "kv"]
                    yield weight(names, f"{target}cross_attention.linear_kv.weight", KV(hf.num_heads))
                    yield weight(f"{cross}o.weight", f"{target}cross_attention.linear_proj.weight")

    def build(self, chunk: Chunk) -> nn.Module:
        from megatron.core.models.T5 import T5Model

        if chunk.config.pipeline_model_parallel_size > 1:
            model: Any = stage_class()(chunk, self)
        else:
            model = T5Model(
                chunk.config,
                chunk.config,
                block_spec(chunk.config, layer_spec("padding")),
                block_spec(chunk.config, layer_spec("causal", cross_attention=True)),
                chunk.vocab_size,
                0,  # positions are relative
                pre_process=chunk.pre,
                post_process=chunk.post,
                share_embeddings_and_output_weights=self.tied,
                position_embedding_type="relative",
                relative_attention_num_buckets=self.hf.relative_attention_num_buckets,
                relative_attention_max_distance=self.hf.relative_attention_max_distance,
            )
        if chunk.post:
            mask_padded_logits(model.lm_head.output_layer, self.vocab_size, chunk.vocab_size)
            if self.scales_output:
                model.lm_head.register_forward_pre_hook(self._scale)
        built: nn.Module = model
        return built

    def _scale(self, module: nn.Module, args: Any) -> Any:
        return args[0] * self.hf.d_model**-0.5, *args[1:]

    def inputs(self, batch: Batch) -> Batch:
        given = dict(batch)
        ids, labels = given.pop("input_ids"), given.pop("labels", None)
        decoder_ids = given.pop("decoder_input_ids", None)
        if decoder_ids is None:
            if labels is None:
                raise ConfigurationError(
                    "T5 was called without labels and without decoder_input_ids. Pass one of them."
                )
            start = self.hf.decoder_start_token_id
            decoder_ids = F.pad(labels, (1, 0), value=self.hf.pad_token_id if start is None else start)[:, :-1]
            decoder_ids = decoder_ids.masked_fill(decoder_ids == IGNORED, self.hf.pad_token_id)
        mask = given.pop("attention_mask", None)
        mask = torch.ones_like(ids) if mask is None else mask
        refuse_unknown("T5ForConditionalGeneration", given, "input_ids, attention_mask, labels and decoder_input_ids")
        length = fixed_length("encoder_seq_length", ids.shape[1], self.lengths[0])
        decoder = fixed_length("decoder_seq_length", decoder_ids.shape[1], self.lengths[1])
        if self.sequences == 2:  # stages exchange tensors of one length
            length = decoder = max(length, decoder)
        made = {
            "input_ids": F.pad(ids, (0, length - ids.shape[1])),
            "attention_mask": F.pad(mask == 0, (0, length - ids.shape[1]), value=True),
            "decoder_input_ids": F.pad(decoder_ids, (0, decoder - decoder_ids.shape[1])),
        }
        if labels is not None:
            made["labels"] = F.pad(labels, (0, decoder - labels.shape[1]), value=IGNORED)
        return made

    def shape(self, batch: Batch) -> tuple[int, int]:
        """Return the samples and the decoder's length, which the stages' messages and the logits have."""
        decoder = batch.get("decoder_input_ids", batch.get("labels"))
        return batch["input_ids"].shape[0], (batch["input_ids"] if decoder is None else decoder).shape[1]

    def call(self, model: nn.Module, batch: Batch) -> Any:
        blocked = batch["attention_mask"][:, None, None, :]
        labels = batch.get("labels")
        labels = None if labels is None else labels.clamp(min=0)
        return model(batch["input_ids"], batch["decoder_input_ids"], blocked, None, blocked, lm_labels=labels)


@functools.cache
def stage_class() -> Any:
    """Return the class of a stage, on Megatron-core's base class of language models."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    return type("T5Stage", (_Stage, LanguageModule), {})


class _Stage:
    """A stage of T5: it passes the states of encoder and decoder on, joined along the sequence dimension.

    Only the first stage embeds. The relative positions are on every stage, with the gradients summed over them.
    """

    # Of LanguageModule.
    setup_embeddings_and_output_layer: Any
    compute_language_model_loss: Any
    config: Any
    encoder_relative_pos_emb: Any
    decoder_relative_pos_emb: Any

    def __init__(self, chunk: Chunk, architecture: T5) -> None:
        from megatron.core.enums import ModelType
        from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
        from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
        from megatron.core.models.T5.t5_model import T5LMHead

        config, hf = chunk.config, architecture.hf
        super().__init__(config=config)  # type: ignore[call-arg]
        config.has_cond_embedder = True  # sums gradients of the relative positions over the stages
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process, self.vocab_size = chunk.pre, chunk.post, chunk.vocab_size
        self.share_embeddings_and_output_weights = architecture.tied
        self.fp16_lm_cross_entropy = False
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.input_tensor: torch.Tensor | None = None
        stages, rank = config.pipeline_model_parallel_size, parallel_state.get_pipeline_model_parallel_rank()
        split = chunk.options.pipeline_model_parallel_split_rank or stages // 2
        if not 0 < split < stages or hf.num_layers % split or hf.num_layers % (stages - split):
            raise ConfigurationError(
                f"{hf.num_layers} layers of T5's encoder cannot be split over {split} stages, and those of its decoder "
                f"over {stages - split}, evenly. Choose pp_degree and pipeline_model_parallel_split_rank that divide "
                "the layers."
            )
        if chunk.pre:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=chunk.vocab_size,
                max_sequence_length=0,
                position_embedding_type="relative",
                tp_group=self.tp_group,
            )
        self.position_embeddings = None
        for name in ("encoder", "decoder"):
            positions = RelativePositionEmbedding(
                bidirectional=name == "encoder",
                init_method=config.init_method,
                num_attention_heads=config.num_attention_heads,
                relative_attention_num_buckets=hf.relative_attention_num_buckets,
                relative_attention_max_distance=hf.relative_attention_max_distance,
            )
            setattr(self, f"{name}_relative_pos_emb", positions)
            shared = positions.relative_attention_bias.weight
            shared.pipeline_parallel, shared.shared = True, rank > 0
        self.encoder = self.decoder = None
        if rank < split:
            spec = layer_spec("padding")
            self.encoder = _stage_block(config, spec, hf.num_layers // split, rank, rank == split - 1)
        else:
            spec = layer_spec("causal", cross_attention=True)
            layers = hf.num_layers // (stages - split)
            self.decoder = _stage_block(config, spec, layers, rank - split, rank == stages - 1)
        if chunk.post:
            self.lm_head = T5LMHead(
                config, True, chunk.vocab_size, chunk.pre, architecture.tied, tp_group=self.tp_group
            )
            self.output_layer = self.lm_head.output_layer
        if chunk.pre or chunk.post:
            self.setup_embeddings_and_output_layer()

    def set_input_tensor(self, tensor: Any) -> None:
        """Receive the output of the stage before; called by the schedule."""
        self.input_tensor = tensor[0] if isinstance(tensor, list) else tensor

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """Return the embedding's weights, on the first and on the last stage."""
        if self.pre_process:
            return self.embedding.word_embeddings.weight
        return self.lm_head.output_layer.weight if self.post_process else None

    def _bias(self, positions: nn.Module, length: int) -> torch.Tensor:
        from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region

        heads_last = positions(length, length).permute(0, 2, 3, 1)
        return scatter_to_tensor_model_parallel_region(heads_last, self.tp_group).permute(0, 3, 1, 2)

    def forward(
        self,
        encoder_ids: torch.Tensor,
        decoder_ids: torch.Tensor,
        encoder_mask: torch.Tensor,
        decoder_mask: torch.Tensor | None,
        cross_mask: torch.Tensor,
        lm_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the states for the next stage, or on the last one the losses of the tokens (logits without labels)."""
        length = encoder_ids.shape[1]
        if self.pre_process:
            embedded = [self.embedding(input_ids=ids, position_ids=None) for ids in (encoder_ids, decoder_ids)]
            states = torch.cat(embedded)
        else:
            assert self.input_tensor is not None
            states = self.input_tensor
        encoded, decoded = states.chunk(2)
        if self.encoder is not None:
            bias = self._bias(self.encoder_relative_pos_emb, length)
            encoded = self.encoder(hidden_states=encoded, attention_mask=encoder_mask, attention_bias=bias)
        if self.decoder is not None:
            decoded = self.decoder(
                hidden_states=decoded,
                attention_mask=decoder_mask,
                context=encoded,
                context_mask=cross_mask,
                attention_bias=self._bias(self.decoder_relative_pos_emb, length),
            )
        if not self.post_process:
            return torch.cat([encoded, decoded])
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits = self.lm_head(decoded, word_embeddings_weight=tied)
        if lm_labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(lm_labels, logits)


def _stage_block(config: Any, spec: Any, layers: int, index: int, last: bool) -> Any:
    """Return the layers of a stage, as a block of their own."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    alone = copy.copy(config)
    alone.pipeline_model_parallel_size = 1
    block = TransformerBlock(
        config=alone, spec=block_spec(alone, spec, layers=layers), pre_process=True, post_process=last
    )
    for number, layer in enumerate(block.layers):
        layer.layer_number = index * layers + number + 1
    return block
