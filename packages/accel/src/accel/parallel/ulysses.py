"""Sequence parallelism: ranks of the sp axis share each sequence, and exchange it for heads in attention (Ulysses)."""

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

from .config import DeepSpeedSequenceParallelConfig
from .sequence_inputs import Call, Part, shift_labels

ATTENTION = "accel_ulysses"
"""The name of this attention among those of Transformers."""


class _Exchange(torch.autograd.Function):
    """Gives each rank its part along one dimension, for the parts that all ranks have along another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, given: int, taken: int) -> torch.Tensor:
        ctx.group, ctx.given, ctx.taken = group, given, taken
        sent = torch.stack(x.chunk(dist.get_world_size(group), given))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), taken)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Exchange.apply(gradients[0], ctx.group, ctx.taken, ctx.given), None, None, None


class SequenceParallel:
    """Shares sequences among the ranks of one mesh axis, each of which computes the attention of some heads over whole
    sequences.

    Args:
        mesh: the axis, of one dimension.
        settings: the length of sequences, and the implementation of attention.

    Raises:
        ConfigurationError: an implementation other than "sdpa".
    """

    def __init__(self, mesh: DeviceMesh, settings: DeepSpeedSequenceParallelConfig) -> None:
        if settings.sp_attn_implementation != "sdpa":
            raise ConfigurationError(
                f"sp_attn_implementation={settings.sp_attn_implementation!r} is not available here. Use 'sdpa', which "
                "takes the fastest "
                "kernel of the device."
            )
        self.mesh, self.settings = mesh, settings
        self.size = mesh.size()
        # Enough for a batch of training that is still in use while another loader is read.
        self._recent: deque[Part] = deque(maxlen=8)

    def adapt(self, model: nn.Module) -> None:
        """Have a model exchange sequences for heads in its attention, and told which positions it gets.

        Raises:
            ConfigurationError: it is no model of Transformers, or its heads cannot be divided.
        """
        config: Any = getattr(model, "config", None)
        set_attention: Any = getattr(model, "set_attn_implementation", None)
        if set_attention is None or not hasattr(config, "_attn_implementation"):
            raise ConfigurationError(
                f"{type(model).__name__} is no model of Transformers, in whose attention sp_size={self.size} works. "
                "Share its sequences "
                "with cp_size and accelerator.maybe_context_parallel."
            )
        heads = config.get_text_config().num_attention_heads
        if heads % self.size:
            raise ConfigurationError(
                f"sp_size={self.size} does not divide num_attention_heads={heads} of {type(model).__name__}. Choose "
                "one that does, or use "
                "cp_size."
            )
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, self.attend)
        set_attention(ATTENTION)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        given = {id(value) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}
        for part in reversed(self._recent):
            if any(id(tensor) in given for tensor, _ in part.wholes):
                return Call(model, args, kwargs, part, ATTENTION).fit()
        raise ConfigurationError(
            f"{type(model).__name__} was called with tensors that are not those of a split batch, and "
            f"sp_size={self.size} shares "
            "sequences. Read batches from accelerator.deepspeed_ulysses_dl_adapter(loader, model), and pass their "
            "tensors on as they are."
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
        """Attention as Transformers calls it, with this rank's part of sequences: ``[B, heads, length / sp, D]``.

        Returns:
            ``[B, length / sp, heads, D]``, and no weights.

        Raises:
            ConfigurationError: attention that is not causal, or that has a mask or a cap.
        """
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        strange = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
        if not causal or attention_mask is not None or strange or query.shape[2] != key.shape[2]:
            raise ConfigurationError(
                f"{type(module).__name__} computes attention of {query.shape[2]} queries to {key.shape[2]} keys with "
                f"causal={causal}, "
                f"{'a' if attention_mask is not None else 'no'} mask, {', '.join(strange) or 'nothing else'}; with "
                f"sp_size={self.size} it is that of a sequence to itself, causal and plain. Train this model with "
                "sp_size=1."
            )
        group = self.mesh.get_group()
        if query.shape[1] % self.size:
            raise ConfigurationError(
                f"sp_size={self.size} does not divide the {query.shape[1]} heads that tensor parallelism leaves a rank."
            )
        if key.shape[1] % self.size:
            # Fewer heads of keys than ranks: each rank gets the one that its queries look at.
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        q, k, v = (_Exchange.apply(x, group, 1, 2) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        attended = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        return _Exchange.apply(attended, group, 2, 1).transpose(1, 2).contiguous(), None

    def loader(self, loader: Any) -> SplitLoader:
        """A loader whose batches hold this rank's part of each sequence."""
        return SplitLoader(self, loader)

    def split(self, batch: Any) -> dict[str, Any]:
        """This rank's part of a batch, with the positions it has and labels that are shifted already.

        Raises:
            ConfigurationError: the batch is no dictionary with input_ids, or its sequences cannot be divided.
        """
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2:
            raise ConfigurationError(
                f"a batch of {type(batch).__name__} has no input_ids of shape (samples, positions), by which "
                f"sp_size={self.size} shares "
                "sequences. Let the collator return a dictionary."
            )
        length = self._check_length(tokens.shape[1])
        own = length // self.size
        begin = self.mesh.get_local_rank() * own
        positions = torch.arange(begin, begin + own, device=tokens.device)
        part = Part(length, positions, self.size)
        items = dict(batch)
        if "labels" in items and "shift_labels" not in items:
            items["shift_labels"] = shift_labels(items["labels"])
        items.setdefault("position_ids", torch.arange(length, device=tokens.device).expand(tokens.shape[0], -1))
        for name, value in items.items():
            if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == length:
                items[name] = part.cut(value, 1)
                part.wholes.append((items[name], value))
        self._recent.append(part)
        return items

    def _check_length(self, length: int) -> int:
        wanted = self.settings.sp_seq_length
        if wanted is not None and not self.settings.sp_seq_length_is_variable and length != wanted:
            raise ConfigurationError(
                f"a batch has sequences of {length} positions, and sp_seq_length={wanted} with "
                "sp_seq_length_is_variable=False. Pad or cut "
                "them, or let the length vary."
            )
        if length % self.size:
            raise ConfigurationError(
                f"sequences of {length} positions cannot be shared by sp_size={self.size} ranks. Pad them to a "
                "multiple, for example with "
                f"pad_to_multiple_of={self.size} in the collator."
            )
        return length

    def unshard(self, tensor: torch.Tensor, seq_dim: int) -> torch.Tensor:
        """Whole sequences again on every rank of the axis; without a gradient."""
        own = tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own, group=self.mesh.get_group())
        return torch.cat(parts, seq_dim)


class SplitLoader:
    """A prepared loader whose batches are split along the sequence; in all else the loader itself.

    Args:
        sharing: what splits them.
        loader: the prepared loader.
    """

    def __init__(self, sharing: SequenceParallel, loader: Any) -> None:
        self._sharing = sharing
        self._loader = loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._sharing.split, self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
