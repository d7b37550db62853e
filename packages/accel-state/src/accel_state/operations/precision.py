"""Converts outputs of half-precision computation to float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper, wraps
from typing import Any

import torch

from .nested import recursively_apply

_HALF_TYPES = (torch.float16, torch.bfloat16)


def _is_half(tensor: Any) -> bool:
    # Some data objects raise on unknown attributes, so the type is checked first.
    return isinstance(tensor, torch.Tensor) and tensor.dtype in _HALF_TYPES


def convert_to_fp32(tensor: Any) -> Any:
    """Convert the float16 and bfloat16 tensors in nested data to float32; everything else is unchanged."""
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)


class ConvertOutputsToFp32:
    """Wraps a forward function to convert its half-precision outputs to float32; can be pickled if the function can."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        # Without __wrapped__: some functions cannot be pickled through that second reference.
        return {"model_forward": self.model_forward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model_forward"])  # type: ignore[misc]


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward function to convert its half-precision outputs to float32."""
    converter = ConvertOutputsToFp32(model_forward)

    @wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return converter(*args, **kwargs)

    return forward
