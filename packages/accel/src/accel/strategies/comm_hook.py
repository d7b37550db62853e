"""The state of a communication hook of DDP, such as PowerSGD's residuals, in checkpoints.

A hook gets the gradients in buckets, and may keep something for each. DDP builds them anew after the first backward
pass, in the order in which gradients have arrived. A run that continues would have the first buckets again, so a
backward pass of zeros repeats that order before the state is loaded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel_state.logging import get_logger, warn_once

from .._torch_compat import bucket_parameters, finish_forward, rebuild_buckets

logger: Final = get_logger(__name__)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, np.ndarray, np.generic)


class CommHookState:
    """The object that a communication hook gets with each bucket.

    Args:
        state: the object; what it keeps is what its ``state_dict`` returns, or else its attributes.

    Attributes:
        is_used: whether a backward pass has reduced gradients.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self.is_used = False
        attributes = dict(_attributes(state))
        self._settings = {name: value for name, value in attributes.items() if isinstance(value, (bool, int, float))}

    def capture(self, model: DistributedDataParallel) -> dict[str, Any]:
        """Return the state of this rank, and the buckets that it is about, as tensors and plain values."""
        names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        rebuild_buckets(model)  # as the next forward would
        buckets = [[names[id(parameter)] for parameter in bucket] for bucket in bucket_parameters(model)]
        return {"state": _captured(self._state, "state"), "settings": self._settings, "buckets": buckets}

    def restore(self, model: DistributedDataParallel, saved: Mapping[str, Any]) -> None:
        """Restore a captured state. Every rank must call it."""
        changed = [name for name, value in self._settings.items() if saved["settings"].get(name, value) != value]
        if changed:
            logger.warning(
                "The communication hook starts over: %s was %r when the state was saved, and is %r now.",
                changed[0],
                saved["settings"][changed[0]],
                self._settings[changed[0]],
            )
            return
        parameters = dict(model.module.named_parameters())
        expected = [[parameters.get(name) for name in bucket] for bucket in saved["buckets"]]
        order = [item for bucket in expected for item in bucket if item is not None]
        if model.static_graph and not self.is_used:
            # A static graph is recorded in the first pass, and buckets are built after the second.
            _repeat_pass(model, order)
        if _differ(bucket_parameters(model), expected):
            _repeat_pass(model, order)
        self.is_used = True
        if _differ(bucket_parameters(model), expected):
            logger.warning(
                "The communication hook starts over: the gradients are in other buckets than when the state was saved. "
                "Prepare the same model with the same bucket_cap_mb."
            )
            return
        self._state = _restored(self._state, saved["state"], next(iter(parameters.values())).device)


def _differ(buckets: list[list[torch.Tensor]], expected: list[list[Any]]) -> bool:
    return [list(map(id, bucket)) for bucket in buckets] != [list(map(id, bucket)) for bucket in expected]


def _repeat_pass(model: DistributedDataParallel, parameters: list[torch.Tensor]) -> None:
    """Let gradients of zeros arrive in the order of the parameters, and build the buckets for it, once a run."""
    former = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    with torch.enable_grad():
        loss = torch.zeros((), device=parameters[0].device)
        for parameter in reversed(parameters):  # the engine takes what was computed last first
            loss = loss + parameter.sum().to(loss.dtype) * 0
        finish_forward(model, loss).backward()
    for parameter, gradient in zip(parameters, former, strict=True):
        parameter.grad = gradient
    rebuild_buckets(model)


def _attributes(state: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        yield from state.items()
        return
    slots = [name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in [*slots, *getattr(state, "__dict__", ())]:
        if hasattr(state, name):
            yield name, getattr(state, name)


def _captured(value: Any, name: str) -> Any:
    """Return a value as tensors and plain values; None for what a run has to build again."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return [_captured(item, name) for item in value]
    if isinstance(value, dict):
        return {key: _captured(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (np.random.RandomState, torch.Generator)):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    if name == "state":
        return {key: _captured(item, f"{name}.{key}") for key, item in _attributes(value)}
    if not isinstance(value, dist.ProcessGroup) and not callable(value):
        warn_once(
            __name__,
            f"the communication hook's {name}, a {type(value).__name__}, is not saved: a run that continues has a new "
            "one. Give the state of the hook the methods state_dict and load_state_dict.",
        )
    return None


def _restored(current: Any, saved: Any, device: torch.device, is_state: bool = True) -> Any:
    """Return the value that was captured: a new one, or the current object after it was changed."""
    if isinstance(current, (np.random.RandomState, torch.Generator)):
        current.set_state(saved)
    elif isinstance(current, random.Random):
        version, words, gauss = saved
        current.setstate((version, tuple(words), gauss))
    elif isinstance(current, np.random.Generator):
        current.bit_generator.state = saved
    elif hasattr(current, "state_dict") and hasattr(current, "load_state_dict"):
        current.load_state_dict(saved)
    elif isinstance(current, dict):
        former = dict(current)
        current.clear()
        current.update({key: _restored(former.get(key), value, device, False) for key, value in saved.items()})
    elif isinstance(current, list):
        current[:] = [_restored(None, item, device, False) for item in saved]
    elif is_state:
        for name, value in saved.items():
            setattr(current, name, _restored(getattr(current, name), value, device, False))
    elif isinstance(saved, torch.Tensor):
        return saved.to(device, copy=True)
    elif isinstance(current, tuple):
        return tuple(saved)
    elif saved is not None or isinstance(current, _PLAIN):
        return saved
    return current
