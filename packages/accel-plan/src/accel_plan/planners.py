"""Planners of other packages: strategies whose ranks cannot be traced with torch's fake process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_bigmodel.estimate.training import TrainingMemory
from accel_state.errors import MissingDependencyError
from accel_state.registry import Registry

from .record import Traffic, add_traffic, sent_bytes
from .trace import RankBatch

PLANNERS: Registry[Callable[..., dict[str, Any]]] = Registry("planner", {}, entry_point_group="accel.planners")
"""By the strategy: functions of the settings, the model on the meta device, and the numbers of a request."""


def plan_by(name: str, *arguments: Any, **numbers: Any) -> dict[str, Any]:
    """Return what the planner of a strategy says about a rank, as fields of RankPlan."""
    if name not in PLANNERS:
        raise MissingDependencyError(
            f"a plan of {name} needs its package. Install it with: pip install 'accel[{name}]'"
        )
    planned = PLANNERS.load(name)(*arguments, **numbers)
    traffic = [
        Traffic(kind, axis, ranks, calls, payload, sent_bytes(kind, payload, ranks))
        for kind, axis, ranks, calls, payload in planned["collectives"]
    ]
    return {
        "strategy": name,
        "coordinates": planned["coordinates"],
        "parameters": planned["parameters"],
        "memory": TrainingMemory(name, **planned["memory"]),
        "collectives": add_traffic([(1, traffic)]),
        "batch": RankBatch(*planned["data"]),
        "local_length": planned["local_length"],
    }
