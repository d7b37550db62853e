"""The strategies, by the name they are registered under."""

from __future__ import annotations

from accel_state.registry import Registry

from .base import Strategy

STRATEGIES: Registry[type[Strategy]] = Registry(
    "strategy",
    {
        "single": "accel.strategies.single:SingleStrategy",
        "ddp": "accel.strategies.ddp:DDPStrategy",
    },
    entry_point_group="accel.strategies",
)
