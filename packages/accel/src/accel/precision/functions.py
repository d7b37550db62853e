"""Loss scalers and autocast contexts for code that has no Accelerator."""

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
    """A loss scaler for this process's device.

    Args:
        distributed_type: the kind of run; data parallelism needs no scaler of its own, so it changes nothing here.
        **kwargs: for ``torch.amp.GradScaler``.
    """
    return SharedGradScaler(PartialState().device.type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[None]:
    """A block that computes in the precision of the current Accelerator.

    Args:
        native_amp: whether to use torch's autocast; otherwise the block computes in full precision.
        autocast_kwargs: how autocast runs.
    """
    settings = autocast_kwargs or AutocastKwargs()
    name = AcceleratorState().mixed_precision if native_amp else "no"
    return PRECISIONS.load(name)(PartialState(), Handlers([settings])).autocast(settings)
