"""Refusing a call because of values on a device, without waiting for the device in the middle of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel_state import devices
from accel_state.errors import AccelError

from .._torch_compat import FakeTensor


class LateChecks:
    """Conditions on the inputs of a call, read at its end.

    To read a value is to wait for all work before it. A condition is copied to the host as soon as it is computed, so
    at the end of the call it has arrived, while the device still has the work of the call to do: the host waits for
    none of it. On devices without streams, and on the CPU, conditions are read at once.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, Any, Callable[[], AccelError]]] = []

    def refuse_if(self, condition: torch.Tensor, error: Callable[[], AccelError], now: bool = False) -> None:
        """Raise an error, now or from :meth:`settle`, if a condition holds. It never does for tensors without values,
        in a model that is only traced.

        Args:
            condition: one bool.
            error: makes the error; it may read values of tensors.
            now: wait for the device, and raise here.
        """
        if isinstance(condition, FakeTensor):
            return
        known = devices.of(condition.device)
        device = None if known is None else known.streams()
        if now or device is None:
            if bool(condition):
                raise error()
            return
        host = torch.empty((), dtype=torch.bool, pin_memory=True)
        host.copy_(condition, non_blocking=True)
        arrival = device.Event()
        arrival.record(device.current_stream(condition.device))
        self._pending.append((host, arrival, error))

    def drop(self) -> None:
        """Forget the conditions of a call that has failed."""
        self._pending = []

    def settle(self) -> None:
        """Raise the error of the first condition that holds."""
        pending, self._pending = self._pending, []
        for host, arrival, error in pending:
            arrival.synchronize()
            if bool(host):
                raise error()
