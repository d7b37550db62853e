"""Sequence parallelism (Ulysses): ranks have shards of each sequence, and exchange them for heads in attention."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from accel_state.errors import ConfigurationError

from .attention_checks import window_of_layer
from .axis_settings import DeepSpeedSequenceParallelConfig
from .documents import Documents
from .sequence_inputs import SequenceCalls, SequenceShard, gather_shards, shift_labels

ATTENTION = "accel_ulysses"
"""The name of this attention in Transformers."""
DOCUMENTS = "accel_documents"
"""The argument of a model by which attention learns of the documents of its sequences."""


class _AllToAll(torch.autograd.Function):
    """Splits the tensor of each rank along one dimension and concatenates the parts of all ranks along another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, split_dim: int, concat_dim: int) -> torch.Tensor:
        ctx.group, ctx.split_dim, ctx.concat_dim = group, split_dim, concat_dim
        sent = torch.stack(x.chunk(dist.get_world_size(group), split_dim))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), concat_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _AllToAll.apply(gradients[0], ctx.group, ctx.concat_dim, ctx.split_dim), None, None, None


class SequenceParallel:
    """Splits sequences over the ranks of one mesh axis; each computes attention of some heads over full ones."""

    def __init__(self, mesh: DeviceMesh, settings: DeepSpeedSequenceParallelConfig) -> None:
        if settings.sp_attn_implementation != "sdpa":
            raise ConfigurationError(
                f"sp_attn_implementation={settings.sp_attn_implementation!r} is not available. Use 'sdpa', which takes "
                "the fastest kernel of the device."
            )
        self.mesh: DeviceMesh = mesh
        self.settings: DeepSpeedSequenceParallelConfig = settings
        self.size: int = mesh.size()
        # Enough for a training batch that is still in use while another loader is read.
        self._recent: deque[SequenceShard] = deque(maxlen=8)
        self._calls: list[SequenceCalls] = []

    def prepare_model(self, model: nn.Module) -> SequenceCalls:
        config: Any = getattr(model, "config", None)
        set_attention: Any = getattr(model, "set_attn_implementation", None)
        if set_attention is None or not hasattr(config, "_attn_implementation"):
            raise ConfigurationError(
                f"{type(model).__name__} is not a model of Transformers, whose attention sp_size={self.size} replaces. "
                "Split its sequences with cp_size and accelerator.maybe_context_parallel."
            )
        heads = config.get_text_config().num_attention_heads
        if heads % self.size:
            raise ConfigurationError(
                f"sp_size={self.size} does not divide num_attention_heads={heads} of {type(model).__name__}. Choose a "
                "size that does, or use cp_size."
            )
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, torch.compiler.disable(self.attend))
        set_attention(ATTENTION)
        self._calls.append(SequenceCalls(model, ATTENTION, self._shard_of))
        return self._calls[-1]

    def _shard_of(self, model: nn.Module, passed: list[torch.Tensor]) -> SequenceShard:
        ids = {id(tensor) for tensor in passed}
        for shard in reversed(self._recent):
            if any(id(tensor) in ids for tensor, _ in shard.tensors):
                return shard
        raise ConfigurationError(
            f"{type(model).__name__} was called with tensors that are not those of a split batch, and "
            f"sp_size={self.size} splits sequences. Read batches from "
            "accelerator.deepspeed_ulysses_dl_adapter(loader, model), and pass their tensors on unchanged."
        )

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention as Transformers calls it, on this rank's shard of sequences: ``[B, heads, length / sp, D]``."""
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
        if not causal or attention_mask is not None or options or query.shape[2] != key.shape[2]:
            raise ConfigurationError(
                f"{type(module).__name__} computes attention of {query.shape[2]} queries to {key.shape[2]} keys with "
                f"causal={causal}, {'a' if attention_mask is not None else 'no'} mask and "
                f"{', '.join(options) or 'no other options'}; sp_size={self.size} supports causal self-attention "
                "without a mask. Train this model with sp_size=1."
            )
        group = self.mesh.get_group()
        if query.shape[1] % self.size:
            raise ConfigurationError(
                f"sp_size={self.size} does not divide the {query.shape[1]} heads that tensor parallelism leaves a rank."
            )
        if key.shape[1] % self.size:
            # Fewer key heads than ranks: each rank gets the one that its queries attend to.
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        q, k, v = (_AllToAll.apply(x, group, 1, 2) for x in (query, key, value))
        is_grouped = q.shape[1] != k.shape[1]
        documents = kwargs.get(DOCUMENTS)
        window = window_of_layer(module, kwargs.get("sliding_window"), q.shape[2])
        if documents is not None:
            attended = documents.attend_whole(q, k, v, scaling, dropout, window)
        elif any(calls.packed for calls in self._calls):
            raise ConfigurationError(
                f"{type(module).__name__} did not receive the boundaries of packed documents: the model does not "
                "pass arguments on to its attention. Pad documents instead of packing them, or set sp_size=1."
            )
        elif window is not None:
            whole = Documents(torch.zeros(1, q.shape[2], dtype=torch.long, device=q.device))
            attended = whole.attend_whole(q, k, v, scaling, dropout, window)
        else:
            attended = functional.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=is_grouped
            )
        return _AllToAll.apply(attended, group, 2, 1).transpose(1, 2).contiguous(), None

    def split(self, batch: Any) -> dict[str, Any]:
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2:
            raise ConfigurationError(
                f"a batch of {type(batch).__name__} has no input_ids of shape (samples, positions), which "
                f"sp_size={self.size} needs to split sequences. Let the collator return a dictionary."
            )
        length = tokens.shape[1]
        self._check_length(length)
        local = length // self.size
        start = self.mesh.get_local_rank() * local
        shard = SequenceShard(length, torch.arange(start, start + local, device=tokens.device), self.size)
        items = dict(batch)
        if "labels" in items and "shift_labels" not in items:
            items["shift_labels"] = shift_labels(items["labels"])
        counted = "position_ids" not in items
        if counted:
            items["position_ids"] = torch.arange(length, device=tokens.device).expand(tokens.shape[0], -1)
        for name, value in items.items():
            if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == length:
                items[name] = shard.of(value, 1)
                shard.tensors.append((items[name], value))
        shard.documents_argument, shard.counted = DOCUMENTS, items["position_ids"] if counted else None
        self._recent.append(shard)
        return items

    def _check_length(self, length: int) -> None:
        expected = self.settings.sp_seq_length
        if expected is not None and not self.settings.sp_seq_length_is_variable and length != expected:
            raise ConfigurationError(
                f"a batch has sequences of {length} positions, and sp_seq_length={expected} with "
                "sp_seq_length_is_variable=False. Pad or truncate them, or allow variable lengths."
            )
        if length % self.size:
            raise ConfigurationError(
                f"sequences of {length} positions cannot be split over sp_size={self.size} ranks. Pad them to a "
                f"multiple, for example with pad_to_multiple_of={self.size} in the collator."
            )

    def unshard(self, tensor: torch.Tensor, seq_dim: int) -> torch.Tensor:
        """Return the full sequences on every rank of the axis, without a gradient."""
        return gather_shards(tensor, self.mesh, seq_dim)


class SplitLoader:
    """A prepared loader whose batches are split along the sequence; all other attributes are the loader's."""

    def __init__(self, sharding: SequenceParallel, loader: Any) -> None:
        self._sharding = sharding
        self._loader = loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._sharding.split, self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
