"""Command lines of ``accel launch`` for other machines."""

from __future__ import annotations

from collections.abc import Collection

from accel_state.options import Setting, Source

from ..launch_plan import LaunchPlan

# Options that concern this call only.
_NOT_FORWARDED = frozenset(("dry_run", "json"))


def launch_argv(plan: LaunchPlan, without: Collection[str] = (), **options: object) -> list[str]:
    """The arguments of ``accel``: those of this command line, without some options and with others."""
    left_out = _NOT_FORWARDED | set(without) | set(options)
    given = [
        _flag(setting)
        for name, setting in plan.settings.settings.items()
        if setting.source is Source.COMMAND_LINE and name not in left_out
    ]
    added = [f"--{name}={value}" for name, value in options.items()]
    return ["launch", *given, *added, plan.entrypoint.name, *plan.entrypoint.args]


def _flag(setting: Setting) -> str:
    flag, text = setting.option.flags[0], setting.option.format(setting.value)
    return flag if setting.option.is_flag and text == "true" else f"{flag}={text}"
