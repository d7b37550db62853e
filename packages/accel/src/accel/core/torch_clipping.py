"""``torch.nn.utils.clip_grad_norm_`` of gradients that are not what it takes them for."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel_state.errors import ConfigurationError

from .._torch_compat import before_torch_clips

# By parameter: of gradients that are elsewhere or divided, and of those that a loss scale multiplies.
_REASONS: Final[Any] = WeakIdKeyDictionary()
_SCALED: Final[Any] = WeakIdKeyDictionary()


def refuse_torchs_clipping(parameters: Iterable[torch.Tensor], reason: str) -> None:
    """Make ``torch.nn.utils.clip_grad_norm_`` of these parameters an error: its norm would be another one.

    Args:
        parameters: of a prepared model.
        reason: where their gradients are, for the message.
    """
    for parameter in parameters:
        _REASONS[parameter] = reason
    before_torch_clips(_check)


def refuse_torchs_clipping_while(is_scaled: Callable[[], bool], parameters: Iterable[torch.Tensor]) -> None:
    """Make it an error while a loss scale multiplies the gradients of these parameters.

    Args:
        is_scaled: a method; its object is not kept, since an optimizer would keep the parameters.
        parameters: of an optimizer.
    """
    known = weakref.WeakMethod(is_scaled)
    for parameter in parameters:
        _SCALED[parameter] = known
    before_torch_clips(_check)


def _check(parameters: Iterable[torch.Tensor], max_norm: float) -> None:
    if math.isinf(max_norm):
        return  # only the norm is asked for, as within an accumulation window
    for parameter in parameters:
        reason = _REASONS.get(parameter)
        is_scaled = _SCALED[parameter]() if reason is None and parameter in _SCALED else None
        if is_scaled is not None and is_scaled():
            reason = "its gradients are multiplied by the loss scale of fp16"
        if reason is not None:
            raise ConfigurationError(
                f"torch.nn.utils.clip_grad_norm_ cannot clip this model: {reason}. Call "
                "accelerator.clip_grad_norm_(model.parameters(), max_norm) instead."
            )
