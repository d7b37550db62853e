"""Automatic mixed precision: weights stay float32, and eligible operations compute in 16 bits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import nn

from accel_state import PartialState
from accel_state.errors import ConfigurationError
from accel_state.operations import convert_to_fp32

from ..core.unwrap import extract_model_from_parallel
from ..kwargs.base import Handlers
from ..kwargs.handlers import AutocastKwargs, GradScalerKwargs
from .full import Precision
from .scaler import SharedGradScaler


class AutocastForward:
    """A model's forward under autocast; an object because a copied model must call its own forward."""

    def __init__(
        self, forward: Callable[..., Any], device_type: str, dtype: torch.dtype, settings: AutocastKwargs
    ) -> None:
        self.forward = forward
        self.arguments: dict[str, Any] = {"device_type": device_type, "dtype": dtype, **settings.to_autocast()}
        self.outputs_to_fp32: bool = settings.outputs_to_fp32
        functools.update_wrapper(self, forward, updated=())

    @property
    def __code__(self) -> CodeType:
        # torch.export names the inputs after the forward's source.
        wrapped = inspect.unwrap(self.forward)
        code: CodeType = getattr(wrapped, "func", wrapped).__code__
        return code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(**self.arguments):
            outputs = self.forward(*args, **kwargs)
        return convert_to_fp32(outputs) if self.outputs_to_fp32 else outputs


class HalfPrecision(Precision):
    """torch's autocast with a 16-bit dtype."""

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype]

    def __init__(self, state: PartialState, handlers: Handlers) -> None:
        super().__init__(state, handlers)
        if not state.device_backend.supports_autocast(self.dtype):
            raise ConfigurationError(
                f"mixed_precision={self.name!r} is not available on {state.device.type} here: autocast does not "
                f"support {self.dtype} on it. Use mixed_precision='no', or another device."
            )

    @property
    def is_native(self) -> bool:
        return True

    def autocast(self, settings: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        return torch.autocast(self.state.device.type, dtype=self.dtype, **(settings or self.settings).to_autocast())

    def wrap_forward(self, model: nn.Module) -> None:
        model = extract_model_from_parallel(model)
        if "_original_forward" not in model.__dict__:
            model._original_forward = model.forward  # type: ignore[assignment]
            model.forward = AutocastForward(model.forward, self.state.device.type, self.dtype, self.settings)


class BFloat16(HalfPrecision):
    """bfloat16: the range of float32 with 8 bits of mantissa, so losses are not scaled."""

    name = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


class Float16(HalfPrecision):
    """float16: 11 bits of mantissa but little range, so the loss is scaled and overflowing steps are skipped."""

    name = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16

    def __init__(self, state: PartialState, handlers: Handlers) -> None:
        super().__init__(state, handlers)
        settings = handlers.get(GradScalerKwargs).to_kwargs()
        self.scaler: SharedGradScaler = SharedGradScaler(state.device.type, **settings)
