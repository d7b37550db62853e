"""Every launcher, the more special ones first; other packages add theirs through the entry point group ``accel.launchers``."""

from __future__ import annotations

import itertools

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
    # The metadata of installed packages is searched only for a plan that none of our own takes.
    for name in itertools.chain(_BUILT_IN, LAUNCHERS):
        launcher = LAUNCHERS.load(name)()
        if launcher.accepts(plan):
            return launcher
    raise ConfigurationError(
        f"no launcher takes {plan.num_processes} processes on {plan.num_machines} machines. Known: {', '.join(LAUNCHERS)}."
    )
