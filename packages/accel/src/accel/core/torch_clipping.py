"""torch's functions that clip gradients, where these are not what they take them for."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel_state.errors import ConfigurationError

from .._torch_compat import before_torch_clips, before_torch_clips_values

# By parameter: of gradients that are elsewhere or divided, of those that are elsewhere, and of those that a loss scale
# multiplies.
_REASONS: Final[Any] = WeakIdKeyDictionary()
_ELSEWHERE: Final[Any] = WeakIdKeyDictionary()
_SCALED: Final[Any] = WeakIdKeyDictionary()


def refuse_torchs_clipping(parameters: Iterable[torch.Tensor], reason: str, elsewhere: bool = False) -> None:
    """Make ``torch.nn.utils.clip_grad_norm_`` of these parameters an error: its norm would be another one.

    Args:
        parameters: of a prepared model.
        reason: where their gradients are, for the message.
        elsewhere: whether ``clip_grad_value_``, which needs no norm, would not find them either.
    """
    for parameter in parameters:
        _REASONS[parameter] = reason
        if elsewhere:
            _ELSEWHERE[parameter] = reason
    _check_before_torch_clips()


def refuse_torchs_clipping_while(is_scaled: Callable[[], bool], parameters: Iterable[torch.Tensor]) -> None:
    """Make both functions an error while a loss scale multiplies the gradients of these parameters.

    Args:
        is_scaled: a method; its object is not kept, since an optimizer would keep the parameters.
        parameters: of an optimizer.
    """
    known = weakref.WeakMethod(is_scaled)
    for parameter in parameters:
        _SCALED[parameter] = known
    _check_before_torch_clips()


def _check_before_torch_clips() -> None:
    before_torch_clips(_check_norm)
    before_torch_clips_values(_check_values)


def _check_norm(parameters: Iterable[torch.Tensor], max_norm: float) -> None:
    if not math.isinf(max_norm):  # else only the norm is asked for, as within an accumulation window
        _check(parameters, _REASONS, "clip_grad_norm_", "max_norm")


def _check_values(parameters: Iterable[torch.Tensor]) -> None:
    _check(parameters, _ELSEWHERE, "clip_grad_value_", "clip_value")


def _check(parameters: Iterable[torch.Tensor], reasons: Any, function: str, limit: str) -> None:
    for parameter in parameters:
        reason = reasons.get(parameter)
        is_scaled = _SCALED[parameter]() if reason is None and parameter in _SCALED else None
        if is_scaled is not None and is_scaled():
            reason = "its gradients are multiplied by the loss scale of fp16"
        if reason is not None:
            raise ConfigurationError(
                f"torch.nn.utils.{function} cannot clip this model: {reason}. Call "
                f"accelerator.{function}(model.parameters(), {limit}) instead."
            )
