"""Settings of the process group."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from .base import KwargsHandler


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How ``torch.distributed.init_process_group`` is called.

    Args:
        backend: the communication back end. The default stands for the device's own ("gloo" on CPU).
        init_method: where the processes meet; None takes it from the launcher.
        timeout: how long a collective may take; None takes torch's default.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None
