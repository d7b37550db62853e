"""Inputs of a causal language model on a shard of each sequence: positions, mask, labels and the token count."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accel_state.errors import ConfigurationError

IGNORED = -100


def shift_labels(labels: torch.Tensor, ignore_index: int = IGNORED) -> torch.Tensor:
    """The label of each position's prediction, which is the next token: ``[..., length]``; the last position has none.

    Shift labels before sequences are split: a shard's last position predicts the first token of another shard.

    Args:
        labels: the tokens, ``[..., length]``.
        ignore_index: the label that losses leave out.
    """
    return torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], ignore_index)], dim=-1)


def gather_shards(tensor: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """The shards of all ranks of an axis, concatenated along a dimension, without a gradient."""
    local = tensor.detach().contiguous()
    shards = [torch.empty_like(local) for _ in range(mesh.size())]
    dist.all_gather(shards, local, group=mesh.get_group())
    return torch.cat(shards, dim)


@dataclass
class SequenceShard:
    """This rank's shard of the sequences of a batch."""

    length: int  # positions of a full sequence
    positions: torch.Tensor  # the positions that this rank has, ``[length / size]``
    size: int  # number of ranks that a sequence is split over
    # pairs of a sharded tensor and the full one
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def full(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The full tensor of a shard; the tensor itself if it has the full length; None if it is not known."""
        if tensor.shape[-1] == self.length:
            return tensor
        return next((full for shard, full in self.tensors if shard is tensor), None)

    def of(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return tensor.index_select(dim, self.positions.to(tensor.device))


class ShardedCall:
    """The arguments of a model's call on a shard of sequences, and their correction."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shard: SequenceShard, attention: str
    ) -> None:
        self.model, self.shard, self.attention = model, shard, attention
        signature = inspect.signature(model.forward)
        kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
        self._names = set(signature.parameters)
        self._has_var_args = inspect.Parameter.VAR_POSITIONAL in kinds
        var_kwargs = kinds.get(inspect.Parameter.VAR_KEYWORD)
        self._arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
        if var_kwargs is not None:
            self._arguments.update(self._arguments.pop(var_kwargs, {}))

    def correct(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments to call the model with; None if they may stay as they are."""
        if self._has_var_args:
            return None
        config = getattr(self.model, "config", None)
        if hasattr(config, "_attn_implementation"):
            check_attention(config, self.shard.length, self.attention)
        tokens = self._tokens()
        if tokens is None:
            return None
        if "use_cache" in self._names:
            # The keys of a shard are of no use in generation, and activation checkpointing would add them twice.
            self._arguments["use_cache"] = False
        if "position_ids" in self._names and self._arguments.get("position_ids") is None:
            self._arguments["position_ids"] = self.shard.positions.to(tokens.device).expand(tokens.shape[0], -1)
        if "attention_mask" in self._names:
            self._set_mask(tokens)
        if hasattr(self.model, "loss_function"):
            self._set_labels()
        return (), self._arguments

    def _tensor(self, name: str) -> torch.Tensor | None:
        value = self._arguments.get(name)
        return value if isinstance(value, torch.Tensor) else None

    def _tokens(self) -> torch.Tensor | None:
        local = len(self.shard.positions)
        for name in ("input_ids", "inputs_embeds"):
            tokens = self._tensor(name)
            if tokens is not None and tokens.ndim > 1 and tokens.shape[1] != local:
                raise ConfigurationError(
                    f"{name} has {tokens.shape[1]} positions, and this rank has {local} of the {self.shard.length} of "
                    "each sequence. Pass the tensor in buffers, with its sequence dimension in buffer_seq_dims."
                )
            if tokens is not None:
                return tokens
        return None

    def _set_mask(self, tokens: torch.Tensor) -> None:
        mask = self._tensor("attention_mask")
        if mask is not None:
            full = self.shard.full(mask)
            if full is None or full.ndim != 2 or bool((full[:, 1:] > full[:, :-1]).any()):
                raise ConfigurationError(
                    f"attention_mask of shape {tuple(mask.shape)} hides more than padding at the end (or was not in "
                    "buffers). With split sequences, attention is causal and has no mask: pad on the right, and leave "
                    "attention_mask out."
                )
        # Without a mask of ones, Transformers takes positions with gaps for several packed sequences.
        self._arguments["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)

    def _set_labels(self) -> None:
        labels, shifted = self._tensor("labels"), self._tensor("shift_labels")
        if labels is None:
            return
        if labels.ndim < 2:
            raise ConfigurationError(
                f"labels of shape {tuple(labels.shape)} have one value for each sequence, and no rank has a full "
                "sequence. Train models that predict tokens, or use cp_size=1 and sp_size=1."
            )
        # Models of Transformers use the causal loss unless they name another.
        if getattr(self.model, "loss_type", None) not in (None, "ForCausalLM"):
            return
        full = self.shard.full(labels if shifted is None else shifted)
        if shifted is None:
            if full is None:
                raise ConfigurationError(
                    "labels were split before they were shifted, so each shard loses the label at its end. Pass the "
                    "same tensor in buffers, or pass shift_labels, made with accel.utils.shift_labels before the "
                    "split."
                )
            full = shift_labels(full)
            self._arguments["shift_labels"] = self._arguments["labels"] = self.shard.of(full)
        if full is not None and self._arguments.get("num_items_in_batch") is None:
            # Gradients are averaged over ranks. If each divides its sum by this, the average is the mean over all
            # labels of the batch.
            self._arguments["num_items_in_batch"] = (full != IGNORED).sum().clamp(min=1) / self.shard.size


def check_attention(config: Any, length: int, allowed: str) -> None:
    """Refuse a Transformers model whose attention would use this rank's shard only."""
    if config._attn_implementation != allowed:
        raise ConfigurationError(
            f"attn_implementation={config._attn_implementation!r} attends to this rank's part of each sequence only. "
            f"Load the model with attn_implementation={allowed!r} (or model.set_attn_implementation({allowed!r}))."
        )
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is not None and window < length and (kinds is None or "sliding_attention" in kinds):
        raise ConfigurationError(
            f"sliding_window={window} is shorter than sequences of {length} positions, and attention over split "
            f"sequences has no window. Use sequences of at most {window}, or cp_size=1 and sp_size=1."
        )


def _attach_context_parallel_hooks(model: nn.Module) -> None:
    """Make the ``self_attn`` modules of a model ignore the mask they are given, and be causal.

    A mask of the whole sequence does not fit the shard of a rank; libraries call this before they shard sequences.
    """

    def ignore_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "attention_mask" in kwargs:
            kwargs = {**kwargs, "attention_mask": None, "is_causal": True}
        return args, kwargs

    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "self_attn":
            module.register_forward_pre_hook(ignore_mask, with_kwargs=True, prepend=True)
