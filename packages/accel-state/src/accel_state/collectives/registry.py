"""The implementations of collectives."""

from __future__ import annotations

from ..registry import Registry
from .single import Collectives

COLLECTIVES: Registry[type[Collectives]] = Registry(
    "collectives backend",
    {
        "single": "accel_state.collectives.single:Collectives",
        "torch": "accel_state.collectives.torch:TorchCollectives",
        "xla": "accel_state.collectives.xla:XlaCollectives",
    },
)
