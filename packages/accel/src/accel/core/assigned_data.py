"""Errors for ``parameter.data = value`` of sharded parameters, which torch ignores.

A DTensor keeps its values in another tensor, which the assignment does not reach. ``parameter.data.copy_(value)`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel_state.errors import ConfigurationError

from .local_part import local

_NAMES: Final[Any] = WeakIdKeyDictionary()


def refuse_assigned_data(parameters: Mapping[str, torch.Tensor]) -> None:
    """Make an assignment to ``data`` of these DTensors, given by name, an error."""
    from torch.distributed.tensor import DTensor

    for name, parameter in parameters.items():
        _NAMES[parameter] = name
    if "data" not in vars(DTensor):
        data: Any = property(torch.Tensor.data.__get__, _assign)  # type: ignore[attr-defined]
        DTensor.data = data


def _assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor in _NAMES:
        if local(tensor).is_set_to(local(value)):  # `parameter.data *= 2` assigns what it has changed in place
            return
        raise ConfigurationError(
            f"{_NAMES[tensor]}.data was assigned, which would change nothing: the parameter is sharded, and keeps its "
            "values elsewhere. Copy them: `with torch.no_grad(): parameter.copy_(value)`. Keep old values with "
            "parameter.detach().clone(), as parameter.data changes with the parameter."
        )
    torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
