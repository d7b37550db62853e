"""Loading weights into a model, after a check that they fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_checkpoint.names import CheckpointError
from accel_checkpoint.validation import check_weights
from accel_state.tensor_storage import id_tensor_storage

from .unwrap import clean_name, extract_model_from_parallel


def plan_weights(model: nn.Module, weights: Any, path: Path, strict: bool = True, **kwargs: Any) -> Callable[[], Any]:
    """The call that loads weights into a model."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    if not isinstance(weights, dict):
        raise CheckpointError(f"{path} holds a {type(weights).__name__} instead of the weights of a model.")
    renamed, absent, given = {}, {}, set()
    unknown = set(weights)
    state = inner.state_dict()
    for name, value in state.items():
        cleaned = clean_name(name)
        identity: Any = name
        if isinstance(value, torch.Tensor):
            layout = value.storage_offset(), value.shape, value.stride(), value.numel() or id(value)
            identity = (*id_tensor_storage(value), *layout)
        if cleaned in weights:
            renamed[name] = weights[cleaned]
            unknown.discard(cleaned)
            given.add(identity)
        else:
            absent[name] = identity
    missing = []
    for name, identity in absent.items():
        if identity not in given:
            missing.append(name)
    if strict and (missing or unknown):
        raise CheckpointError(
            f"{path} does not fit {type(inner).__name__}: it lacks {_some(missing)} and has {_some(unknown)} that "
            "the model lacks. Load it into the model that was saved, or pass strict=False to load what fits."
        )
    check_weights(inner, state, renamed, path)
    return partial(inner.load_state_dict, renamed, strict=False, **kwargs)


def _some(unsorted: Iterable[str]) -> str:
    names = sorted(unsorted)
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more names" if len(names) > 5 else shown or "no names"
