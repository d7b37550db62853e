"""Layers that replace those for which Megatron-core needs Transformer Engine or Apex."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ._megatron_compat import parallel_state


class Norm:
    """Creates torch's LayerNorm or RMSNorm, with the mark that sequence parallelism reduces gradients by."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class _GatherSequence(torch.autograd.Function):
    """Gathers a tensor over the context-parallel group: (ranks, *shape)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.group.rank()], None


def zigzag_positions(length: int, ranks: int, device: Any) -> torch.Tensor:
    """Return the positions of each context-parallel rank, of shape (ranks, length): its chunk from either end."""
    half = length // 2
    rows = []
    for rank in range(ranks):
        mirrored = 2 * ranks - 1 - rank
        first = torch.arange(rank * half, (rank + 1) * half, device=device)
        rows.append(torch.cat([first, torch.arange(mirrored * half, (mirrored + 1) * half, device=device)]))
    return torch.stack(rows)


def blocked_keys(mask: torch.Tensor) -> torch.Tensor:
    """Return a causal mask (samples, 1, queries, keys), True where blocked, from one that is True at padding.

    Megatron-core's own attention takes the mask that it is given in place of the causal one.
    """
    length = mask.shape[1]
    future = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    return mask[:, None, None, :] | future


class CoreAttention(nn.Module):
    """Attention by torch's scaled_dot_product_attention, with masks, bias, sliding window and context parallelism.

    Masks are True where attention is not allowed. With context parallelism, keys and values of all ranks are gathered.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.mask_type: Any = attn_mask_type.name
        self.attention_type: str = attention_type
        self.softmax_scale: float = config.softmax_scale if softmax_scale is None else softmax_scale
        self.dropout: float = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window: int | None = None if config.window_size is None else config.window_size[0] + 1
        self.group: Any = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        length, device = query.shape[0], query.device
        causal = (self.mask_type if attn_mask_type is None else attn_mask_type.name) == "causal"
        rows: torch.Tensor = torch.arange(key.shape[0] - length, key.shape[0], device=device)
        columns: torch.Tensor = torch.arange(key.shape[0], device=device)
        if self.group is not None and self.attention_type == "self":
            gathered = _GatherSequence.apply(torch.stack([key, value]), self.group)
            key, value = gathered[:, 0].flatten(0, 1), gathered[:, 1].flatten(0, 1)
            positions = zigzag_positions(length, self.group.size(), device)
            rows, columns = positions[self.group.rank()], positions.flatten()
            if attention_mask is not None:
                attention_mask = attention_mask[..., columns]
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        # While tokens are generated one by one, the caller asks for no mask; the window still applies.
        windowed = self.mask_type == "causal" and self.window is not None and key.shape[2] > self.window
        plain = self.group is None and query.shape[2] == key.shape[2]
        is_causal = causal and plain and not windowed and attention_mask is None and attention_bias is None
        blocked = attention_mask
        if windowed or (causal and not is_causal):
            distance = rows[:, None] - columns[None, :]
            future = distance < 0
            if windowed and self.window is not None:
                future = future | (distance >= self.window)
            blocked = future[None, None] if blocked is None else blocked | future[None, None]
        bias = None
        if blocked is not None:
            bias = torch.zeros(blocked.shape, dtype=query.dtype, device=device)
            bias.masked_fill_(blocked, torch.finfo(query.dtype).min)
        if attention_bias is not None:
            bias = attention_bias.to(query.dtype) if bias is None else bias + attention_bias.to(query.dtype)
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias,
            is_causal=is_causal,
            scale=self.softmax_scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.permute(2, 0, 1, 3).flatten(2).contiguous()


class ParallelResidualLayer:
    """A TransformerLayer whose attention and MLP both read its input: x + attention(norm(x)) + mlp(norm'(x))."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.transformer.transformer_layer import TransformerLayer

        layer = TransformerLayer(*args, **kwargs)
        layer.forward = types.MethodType(_parallel_residual, layer)
        return layer


def _parallel_residual(layer: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
    known = ("rotary_pos_emb", "inference_context", "attention_bias", "packed_seq_params", "sequence_len_offset")
    options = {name: kwargs[name] for name in known if kwargs.get(name) is not None}
    attention = layer.self_attention(layer.input_layernorm(hidden_states), attention_mask=attention_mask, **options)
    mlp = layer.mlp(layer.pre_mlp_layernorm(hidden_states))
    output = layer.self_attn_bda(layer.training, False)(attention, hidden_states, layer.hidden_dropout)
    return layer.mlp_bda(layer.training, False)(mlp, output, layer.hidden_dropout), None


def layer_spec(
    mask_type: str, *, cross_attention: bool = False, qk_norm: bool = False, mlp: Any = None, layer: Any = None
) -> Any:
    """Return the modules of a layer.

    Args:
        mask_type: "causal", or "padding" for attention in both directions.
        cross_attention: add attention to an encoder.
        qk_norm: normalise queries and keys.
        mlp: the spec of the MLP, if it is not a dense one.
        layer: the class of the layer, if it is not TransformerLayer.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import attention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    shared: dict[str, Any] = {"core_attention": CoreAttention, "linear_proj": RowParallelLinear}
    norm = Norm if qk_norm else IdentityOp
    parts = {
        "input_layernorm": Norm,
        "self_attention": ModuleSpec(
            module=attention.SelfAttention,
            params={"attn_mask_type": AttnMaskType[mask_type]},
            submodules=attention.SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear, q_layernorm=norm, k_layernorm=norm, **shared
            ),
        ),
        "self_attn_bda": get_bias_dropout_add,
        "pre_mlp_layernorm": Norm,
        "mlp_bda": get_bias_dropout_add,
    }
    if mlp is None:
        dense = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        mlp = ModuleSpec(module=MLP, submodules=dense)
    if cross_attention:
        columns = {"linear_q": ColumnParallelLinear, "linear_kv": ColumnParallelLinear}
        parts["cross_attention"] = ModuleSpec(
            module=attention.CrossAttention,
            params={"attn_mask_type": AttnMaskType.padding},
            submodules=attention.CrossAttentionSubmodules(**columns, **shared),
        )
        parts |= {"pre_cross_attn_layernorm": Norm, "cross_attn_bda": get_bias_dropout_add}
    return ModuleSpec(module=layer or TransformerLayer, submodules=TransformerLayerSubmodules(mlp=mlp, **parts))


def block_spec(config: Any, spec: Any, vp_stage: int | None = None, layers: int | None = None) -> Any:
    """Return the modules of this rank's layers."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    count = get_num_layers_to_build(config, vp_stage=vp_stage) if layers is None else layers
    block = TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=Norm)
    # BertModel compares the class of a layer's core attention with its own.
    shown = copy.deepcopy(spec.submodules)
    shown.self_attention.submodules.core_attention = DotProductAttention
    block.submodules = shown
    return block


def mask_padded_logits(layer: nn.Module, vocab_size: int, padded_size: int) -> None:
    """Exclude the rows that only pad the vocabulary to a multiple of the tensor-parallel size from the softmax."""
    if padded_size == vocab_size:
        return
    part = padded_size // parallel_state.get_tensor_model_parallel_world_size()
    start = parallel_state.get_tensor_model_parallel_rank() * part

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        logits = output[0]
        words = torch.arange(logits.shape[-1], device=logits.device) + (start if logits.shape[-1] == part else 0)
        return logits.masked_fill(words >= vocab_size, float("-inf")), *output[1:]

    layer.register_forward_hook(hook)
