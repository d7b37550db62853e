"""Command lines of ``accel launch`` itself, for the machines that it is started on by another one."""

from __future__ import annotations

from collections.abc import Collection

from accel_state.options import Setting, Source

from ..entrypoint import Target
from ..plan import Plan

# Of one call alone: they say what this launcher does, not what is launched.
_OWN = frozenset(("dry_run", "json"))


def launch_words(plan: Plan, without: Collection[str] = (), **options: object) -> list[str]:
    """The words after ``accel``: what stood on the command line, without some options and with others."""
    left_out = _OWN | set(without) | set(options)
    given = [
        _flag(setting)
        for name, setting in plan.settings.settings.items()
        if _is_given(setting) and name not in left_out
    ]
    return ["launch", *given, *(f"--{name}={value}" for name, value in options.items()), *target_words(plan.target)]


def target_words(target: Target) -> list[str]:
    """The script and its arguments, as they stand behind the options."""
    return [target.name, *target.args]


def _is_given(setting: Setting) -> bool:
    return setting.source is Source.COMMAND_LINE


def _flag(setting: Setting) -> str:
    flag, text = setting.option.flags[0], setting.option.format(setting.value)
    return flag if setting.option.is_flag and text == "true" else f"{flag}={text}"
