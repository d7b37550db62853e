"""Output of ``accel launch --dry_run``: commands and variables of each machine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence

from accel_state.options.registry import all_options
from accel_state.secrets import HIDDEN, hide, hide_arguments, hide_in_text, hide_values

from .launchers.base import MachineCommand


def render(commands: Sequence[MachineCommand], as_json: bool) -> str:
    """Text, or a JSON list of objects with the fields of :class:`MachineCommand`. Secrets are hidden in both."""
    if not as_json:
        return "\n\n".join("\n".join(_lines(command)) for command in commands)
    return json.dumps([_fields(command) for command in commands], indent=2)


def _fields(command: MachineCommand) -> dict[str, object]:
    return {
        "machine": command.machine,
        "command": hide_arguments(command.command),
        "environment": _without_secrets(command.environment),
        "ranks": [hide_values(rank) for rank in command.ranks],
        "notes": list(map(hide_in_text, command.notes)),
    }


def _lines(command: MachineCommand) -> Iterator[str]:
    ranks = len(command.ranks)
    count = f" {ranks} process{'es' if ranks > 1 else ''}" if ranks else ""
    yield f"{command.machine}:{count}"
    yield f"  command: {shlex.join(hide_arguments(command.command))}"
    for name, value in sorted(_without_secrets(command.environment).items()):
        yield f"  {name}={shlex.quote(value)}"
    for rank in command.ranks:
        yield "  " + " ".join(f"{name}={shlex.quote(value)}" for name, value in hide_values(rank).items())
    yield from (f"  note: {hide_in_text(note)}" for note in command.notes)


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    secret = {opt.env for opt in all_options().values() if opt.secret}
    return {name: HIDDEN if name in secret else hide(name, value) for name, value in environment.items()}
