"""Every group of options, in the order of the help."""

from __future__ import annotations

from ..registry import Registry
from .declare import OptionGroup

OPTION_GROUPS: Registry[type[OptionGroup]] = Registry(
    "option group",
    {
        "script": "accel_state.options.script:ScriptOptions",
        "core": "accel_state.options.core:CoreOptions",
        "hardware": "accel_state.options.hardware:HardwareOptions",
        "resources": "accel_state.options.resources:ResourceOptions",
        "dynamo": "accel_state.options.dynamo:DynamoOptions",
        "rendezvous": "accel_state.options.rendezvous:RendezvousOptions",
    },
)


def load_groups() -> tuple[type[OptionGroup], ...]:
    """All groups."""
    return tuple(OPTION_GROUPS.load(name) for name in OPTION_GROUPS)
