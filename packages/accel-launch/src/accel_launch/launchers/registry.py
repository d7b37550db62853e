"""Every launcher; other packages add theirs through the entry point group ``accel.launchers``, and are asked before ours."""

from __future__ import annotations

from accel_state.errors import ConfigurationError
from accel_state.registry import Registry

from ..plan import Plan
from .base import Launcher

_BUILT_IN = {"single": "accel_launch.launchers.single:SingleLauncher", "elastic": "accel_launch.launchers.elastic:ElasticLauncher"}

LAUNCHERS: Registry[type[Launcher]] = Registry(
    "launcher",
    _BUILT_IN,
    "accel.launchers",
)


def choose_launcher(plan: Plan) -> Launcher:
    """The first launcher that accepts the plan.

    Raises:
        ConfigurationError: there is none.
    """
    # Between them, ours take every plan: what somebody installed beside them is meant to come first.
    for name in sorted(LAUNCHERS, key=lambda name: name in _BUILT_IN):
        launcher = LAUNCHERS.load(name)()
        if launcher.accepts(plan):
            return launcher
    raise ConfigurationError(
        f"no launcher takes {plan.num_processes} processes on {plan.num_machines} machines. Known: {', '.join(LAUNCHERS)}."
    )
