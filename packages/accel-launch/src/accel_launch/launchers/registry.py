"""Every launcher, the more special ones first; other packages add theirs through the entry point group ``accel.launchers``."""

from __future__ import annotations

from accel_state.errors import ConfigurationError
from accel_state.registry import Registry

from ..plan import Plan
from .base import Launcher

LAUNCHERS: Registry[type[Launcher]] = Registry(
    "launcher",
    {"single": "accel_launch.launchers.single:SingleLauncher", "elastic": "accel_launch.launchers.elastic:ElasticLauncher"},
    "accel.launchers",
)


def choose_launcher(plan: Plan) -> Launcher:
    """The first launcher that accepts the plan.

    Raises:
        ConfigurationError: there is none.
    """
    for name in LAUNCHERS:
        launcher = LAUNCHERS.load(name)()
        if launcher.accepts(plan):
            return launcher
    raise ConfigurationError(
        f"no launcher takes {plan.num_processes} processes on {plan.num_machines} machines. Known: {', '.join(LAUNCHERS)}."
    )
