"""The interface of an architecture, and the common part of decoders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from accel_state.errors import ConfigurationError

from ..layers import block_spec, layer_spec, mask_padded_logits
from ..weights import QKV, Concatenated, Weight, weight

IGNORED = -100
"""The label of tokens without a loss."""

Batch = dict[str, torch.Tensor]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True)
class Chunk:
    """The part of a model to build."""

    config: Any  # the TransformerConfig
    vocab_size: int  # padded to a multiple of the tensor-parallel size
    pre: bool  # whether it has the embedding
    post: bool  # whether it has the output layer
    vp_stage: int | None = None
    options: Any = None  # the MegatronLMPlugin


class Architecture:
    """How a model of Transformers is built and called in Megatron-core.

    Args:
        model: the Transformers model.
    """

    model_classes: ClassVar[tuple[str, ...]] = ()
    """The classes of Transformers that have all weights of the Megatron model."""
    unmapped: ClassVar[tuple[str, ...]] = ()
    """Parameters of Megatron-core that the Transformers model does not have. They are zero and not trained."""
    sequences: int = 1
    """Sequences that are passed from stage to stage, joined along the sequence dimension."""
    supports_context_parallel: ClassVar[bool] = True
    supports_interleaving: ClassVar[bool] = True
    takes_weights: ClassVar[bool] = True
    """Whether the weights of the Transformers model are taken over, and come back under its names."""
    pads_batches: bool = True
    """Whether samples without labels may be added to a batch, so that it splits into micro batches."""
    returns_logits: bool = True
    """Whether the model without labels returns the logits of all tokens."""
    sequence_lengths: ClassVar[tuple[str, ...]] = ()
    """Those of ``encoder_seq_length`` and ``decoder_seq_length`` that the model has."""
    lengths: tuple[int | None, int | None] = (None, None)
    """``encoder_seq_length`` and ``decoder_seq_length`` of the settings."""

    def __init__(self, model: Any) -> None:
        self.hf: Any = model.config
        if self.model_classes and type(model).__name__ not in self.model_classes:
            raise ConfigurationError(
                f"{type(model).__name__} cannot be trained with Megatron-core. Of model_type {self.hf.model_type!r} it "
                f"trains {', '.join(self.model_classes)}."
            )
        output = model.get_output_embeddings()
        self.tied: bool = output is not None and output.weight is model.get_input_embeddings().weight
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]

    @property
    def generates(self) -> bool:
        """True if ``megatron_generate`` works."""
        return False

    @property
    def max_length(self) -> int | None:
        """The longest sequence; None if there is no limit."""
        return getattr(self.hf, "max_position_embeddings", None)

    def settings(self) -> dict[str, Any]:
        """Arguments of TransformerConfig."""
        raise NotImplementedError

    def weights(self) -> Iterator[Weight]:
        """Return all weights."""
        raise NotImplementedError

    def file_weights(self) -> Iterator[Weight]:
        """Yield all weights, by their names in the files of ``save_pretrained``."""
        yield from self.weights()

    def build(self, chunk: Chunk) -> nn.Module:
        """Create a part of the model."""
        raise NotImplementedError

    def inputs(self, batch: Batch) -> Batch:
        """Return what the model is called with, from the arguments of the Transformers model's forward."""
        raise NotImplementedError

    def call(self, model: nn.Module, batch: Batch) -> Any:
        """Call the model with what :meth:`inputs` returned: the loss of every token, or without labels the logits."""
        raise NotImplementedError

    def shape(self, batch: Batch) -> tuple[int, int]:
        """Return the samples and the length of the sequences of a batch, which the logits have too."""
        samples, length = batch["input_ids"].shape
        return samples, length

    def weigh(self, batch: Batch) -> torch.Tensor:
        """Return what losses are divided by, summed over data-parallel ranks: the number of tokens with a loss."""
        return (batch["labels"] != IGNORED).sum()[None].float()

    def loss(self, batch: Batch, output: Any, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses in a micro batch.

        Args:
            batch: a micro batch of :meth:`inputs`.
            output: the result of :meth:`call`.
            weights: the sums of :meth:`weigh`. With the sum of the tokens as first element, a loss that is the mean
                over tokens must not be divided by it: this is done after the reduction over all ranks.
        """
        return (output.float() * (batch["labels"] != IGNORED)).sum()

    normalised: ClassVar[bool] = False
    """Whether :meth:`loss` divides by the weights itself."""

    def activation(self, name: str) -> Any:
        """Return the activation function of a name in Transformers' config."""
        if name not in ACTIVATIONS:
            raise ConfigurationError(f"the activation {name!r} is not one of {', '.join(ACTIVATIONS)}.")
        return ACTIVATIONS[name]


class Decoder(Architecture):
    """A causal language model: GPTModel."""

    position_embedding: ClassVar[str] = "rope"
    qk_norm: ClassVar[bool] = False

    @property
    def generates(self) -> bool:
        return True

    def spec(self) -> Any:
        """Return the modules of a layer."""
        return layer_spec("causal", qk_norm=self.qk_norm)

    def build(self, chunk: Chunk) -> nn.Module:
        from megatron.core.models.gpt import GPTModel

        model = GPTModel(
            chunk.config,
            block_spec(chunk.config, self.spec(), chunk.vp_stage),
            vocab_size=chunk.vocab_size,
            max_sequence_length=self.max_length,
            pre_process=chunk.pre,
            post_process=chunk.post,
            position_embedding_type=self.position_embedding,
            rotary_percent=self.rotary_percent,
            share_embeddings_and_output_weights=self.tied,
            vp_stage=chunk.vp_stage,
        )
        if self.position_embedding == "rope":
            model.rotary_pos_emb.inv_freq = self.frequencies().to(model.rotary_pos_emb.inv_freq.device)
        if chunk.post:
            mask_padded_logits(model.output_layer, self.vocab_size, chunk.vocab_size)
        built: nn.Module = model
        return built

    @property
    def rotary_percent(self) -> float:
        """The share of a head's elements that are rotated."""
        return float((getattr(self.hf, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0))

    def frequencies(self) -> torch.Tensor:
        """Return the frequencies of rotary embeddings, as Transformers computes them."""
        rope = dict(self.hf.rope_parameters or {})
        kind = rope.get("rope_type", "default")
        if kind == "default":
            size = getattr(self.hf, "head_dim", None) or self.hf.hidden_size // self.hf.num_attention_heads
            size = int(size * self.rotary_percent)
            return 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if kind in ("dynamic", "longrope") or kind not in ROPE_INIT_FUNCTIONS:
            raise ConfigurationError(
                f"rope_type {kind!r} changes with the sequence length, which Megatron-core does not support. "
                "Supported: default, linear, llama3."
            )
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](self.hf, torch.device("cpu"))
        if scale != 1.0:
            raise ConfigurationError(
                f"rope_type {kind!r} scales attention by {scale}, which Megatron-core does not support. Supported: "
                "default, linear, llama3."
            )
        return frequencies

    def inputs(self, batch: Batch) -> Batch:
        given = dict(batch)
        ids = given.pop("input_ids")
        made = {"input_ids": ids}
        ordered = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        positions = given.pop("position_ids", None)
        if positions is None:
            positions = ordered
        elif self.position_embedding == "rope" and not torch.equal(positions.expand_as(ids), ordered):
            raise ConfigurationError(
                "position_ids other than 0, 1, 2, ... are not supported with rotary embeddings in Megatron-core. Leave "
                "position_ids out, and pad sequences on the right."
            )
        made["position_ids"] = positions.expand_as(ids).contiguous()
        labels = given.pop("labels", None)
        if labels is not None:
            made["labels"] = F.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()
        mask = given.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            made["attention_mask"] = mask == 0
        given.pop("use_cache", None)
        refuse_unknown(type(self).__name__, given, "input_ids, labels, attention_mask and position_ids")
        return made

    def call(self, model: nn.Module, batch: Batch) -> Any:
        mask, labels = batch.get("attention_mask"), batch.get("labels")
        return model(
            batch["input_ids"],
            batch["position_ids"],
            None if mask is None else mask[:, None, None, :],
            labels=None if labels is None else labels.clamp(min=0),
        )


class LlamaLike(Decoder):
    """Decoders with rotary embeddings, RMSNorm and a gated MLP."""

    qkv_bias: ClassVar[bool] = False

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return getattr(self.hf, "head_dim", None) or self.hf.hidden_size // self.hf.num_attention_heads

    def settings(self) -> dict[str, Any]:
        if getattr(self.hf, "mlp_bias", False) or getattr(self.hf, "attention_bias", False):
            raise ConfigurationError("attention_bias=True and mlp_bias=True are not supported in Megatron-core.")
        window = getattr(self.hf, "sliding_window", None)
        if not getattr(self.hf, "use_sliding_window", True):
            window = None
        if window is not None and len(set(getattr(self.hf, "layer_types", None) or ["same"])) > 1:
            raise ConfigurationError("layers with and layers without a sliding window (layer_types) are not supported.")
        return {
            "num_layers": self.hf.num_hidden_layers,
            "hidden_size": self.hf.hidden_size,
            "num_attention_heads": self.hf.num_attention_heads,
            "num_query_groups": self.hf.num_key_value_heads,
            "kv_channels": self.head_size,
            "ffn_hidden_size": self.hf.intermediate_size,
            "layernorm_epsilon": self.hf.rms_norm_eps,
            "activation_func": self.activation(self.hf.hidden_act),
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "add_qkv_bias": self.qkv_bias,
            "normalization": "RMSNorm",
            "qk_layernorm": self.qk_norm,
            "window_size": None if window is None else (window - 1, 0),
            "hidden_dropout": 0.0,
            "attention_dropout": self.hf.attention_dropout,
        }

    def mlp_weights(self, source: str, target: str) -> Iterator[Weight]:
        """Yield the weights of a layer's MLP."""
        gated = [f"{source}mlp.gate_proj.weight", f"{source}mlp.up_proj.weight"]
        yield weight(gated, f"{target}mlp.linear_fc1.weight", Concatenated(), blocks=2)
        yield weight(f"{source}mlp.down_proj.weight", f"{target}mlp.linear_fc2.weight")

    def weights(self) -> Iterator[Weight]:
        yield weight("model.embed_tokens.weight", "embedding.word_embeddings.weight", rows=self.vocab_size)
        yield weight("model.norm.weight", "decoder.final_layernorm.weight")
        if not self.tied:
            yield weight("lm_head.weight", "output_layer.weight", rows=self.vocab_size)
        qkv = QKV(self.hf.num_attention_heads, self.hf.num_key_value_heads)
        for index in range(self.hf.num_hidden_layers):
            source, target = f"model.layers.{index}.", f"decoder.layers.{index}."
            yield weight(f"{source}input_layernorm.weight", f"{target}input_layernorm.weight")
            yield weight(f"{source}post_attention_layernorm.weight", f"{target}pre_mlp_layernorm.weight")
            for part in ("weight", "bias") if self.qkv_bias else ("weight",):
                names = [f"{source}self_attn.{name}_proj.{part}" for name in "qkv"]
                yield weight(names, f"{target}self_attention.linear_qkv.{part}", qkv)
            if self.qk_norm:
                for name in "qk":
                    yield weight(
                        f"{source}self_attn.{name}_norm.weight", f"{target}self_attention.{name}_layernorm.weight"
                    )
            yield weight(f"{source}self_attn.o_proj.weight", f"{target}self_attention.linear_proj.weight")
            yield from self.mlp_weights(source, target)


def fixed_length(name: str, length: int, fixed: int | None) -> int:
    """Return the length that sequences of a batch are padded to."""
    if fixed is not None and length > fixed:
        raise ConfigurationError(
            f"a batch has sequences of {length} tokens, and {name}={fixed}. Set max_length={fixed} of the tokenizer, "
            f"or a larger {name}."
        )
    return length if fixed is None else fixed


def refuse_unknown(name: str, given: Batch, known: str) -> None:
    """Refuse arguments of a model that are not passed on."""
    if given:
        raise ConfigurationError(
            f"{name} got {', '.join(given)}, which Megatron-core does not take. It takes {known}. Drop the others in "
            "the collate function, or set custom_get_batch_function."
        )
