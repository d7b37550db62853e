"""Loss scalers and autocast contexts for code without an Accelerator."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from accel_state import AcceleratorState, DistributedType, PartialState

from ..kwargs.base import Handlers
from ..kwargs.handlers import AutocastKwargs
from .registry import PRECISIONS
from .scaler import SharedGradScaler


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler for this process's device.

    Args:
        distributed_type: not used; all types take the same scaler.
        **kwargs: for ``torch.amp.GradScaler``.
    """
    return SharedGradScaler(PartialState().device.type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[None]:
    """Return a context manager that computes in the precision of the current Accelerator.

    Args:
        native_amp: use torch's autocast; otherwise compute in full precision.
        autocast_kwargs: how autocast runs.
    """
    settings = autocast_kwargs or AutocastKwargs()
    name = AcceleratorState().mixed_precision if native_amp else "no"
    return PRECISIONS.load(name)(PartialState(), Handlers([settings])).autocast(settings)
