"""Refusing models and calls whose attention would be wrong on a shard of each sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from .late_checks import LateChecks


def check_documents(kwargs: Mapping[str, Any], where: str, checks: LateChecks) -> None:
    """Refuse packed documents where attention has been fixed before it could see them."""
    if kwargs.get("attention_mask") is not None:
        return

    def error(mark: str) -> ConfigurationError:
        return ConfigurationError(
            f"{mark} marks several documents packed into a sequence, and {where} would let each attend to those "
            "before it. Pad documents instead of packing them."
        )

    for name in DOCUMENT_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise error(name)
    positions = kwargs.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.ndim < 3:
        checks.refuse_if((positions.diff(dim=-1) != 1).any(), lambda: error("position_ids"))


BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")
DOCUMENT_ARGUMENTS = (*BOUNDARIES, "cu_seqlens", "seq_idx", "document_ids")
"""Arguments of models by which libraries say where the documents of a packed sequence begin."""


_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe", "dense", "sparse"}
"""Kinds of layers of Transformers in which positions meet in attention over all of them, in windows or chunks only."""


def check_layers(model: nn.Module) -> None:
    """Refuse a model of Transformers with layers in which positions meet other than in attention.

    On each rank, a convolution or a recurrence would begin anew.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        others = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - _KINDS)
        if others or getattr(module, "_is_stateful", False):
            kinds = f" of the kind {', '.join(others)}" if others else ""
            raise ConfigurationError(
                f"{type(module).__name__} has layers{kinds} that pass on a state, or mix positions, other than by "
                "full, sliding or chunked attention. They would see this rank's part of each sequence only. Train this "
                "model with cp_size=1 and sp_size=1; dp_shard_size and activation checkpointing save memory too."
            )


def check_attention(config: Any, length: int, allowed: str) -> bool:
    """Refuse a Transformers model whose attention would use this rank's shard only.

    Returns:
        Whether layers attend to windows that are shorter than the sequence; see :func:`window_of_layer`.
    """
    if config._attn_implementation != allowed:
        raise ConfigurationError(
            f"attn_implementation={config._attn_implementation!r} attends to this rank's part of each sequence only. "
            f"Load the model with attn_implementation={allowed!r} (or model.set_attn_implementation({allowed!r}))."
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    chunk, kinds = getattr(text, "attention_chunk_size", None), getattr(text, "layer_types", None) or ()
    if chunk is not None and chunk < length and "chunked_attention" in kinds:
        raise ConfigurationError(
            f"attention_chunk_size={chunk} is shorter than sequences of {length} positions, and attention over split "
            f"sequences has no chunks. Use sequences of at most {chunk}, or cp_size=1 and sp_size=1."
        )
    windows = (window_of(text, layer) for layer in range(max(1, len(kinds))))
    return any(window is not None and window < length for window in windows)


def window_of(config: Any, layer: int) -> int | None:
    """Return the number of positions that a layer attends to, its own included; None for all before it."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window if kinds is None or kinds[layer] == "sliding_attention" else None


def window_of_layer(module: nn.Module, passed: int | None, length: int) -> int | None:
    """Return the window of an attention layer of Transformers; None if it is not shorter than the sequence.

    Args:
        module: the layer.
        passed: ``sliding_window`` of its call.
        length: of the full sequence.

    Raises:
        ConfigurationError: the call does not say what the configuration does.
    """
    window = window_of(getattr(module, "config", None), getattr(module, "layer_idx", None) or 0)
    if (window is not None and window < length) and window != passed:
        raise ConfigurationError(
            f"sliding_window={window} is shorter than sequences of {length} positions, and {type(module).__name__} "
            f"does not pass it on, so each token would attend to all before it. Use sequences of at most {window}, or "
            "cp_size=1 and sp_size=1."
        )
    return passed if passed is not None and passed < length else None


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
