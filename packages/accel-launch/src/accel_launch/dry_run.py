"""What ``accel launch --dry_run`` prints: for each machine the commands and the variables, and nothing is started."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence

from accel_state.options import load_groups

from .launchers.base import Start


def render(starts: Sequence[Start], as_json: bool) -> str:
    """The text for the screen; as JSON, a list of objects with the fields of :class:`Start`. Secrets are hidden in
    both.
    """
    if not as_json:
        return "\n\n".join("\n".join(_lines(start)) for start in starts)
    return json.dumps([_fields(start) for start in starts], indent=2)


def _fields(start: Start) -> dict[str, object]:
    return {
        "machine": start.machine,
        "command": list(start.command),
        "environment": _without_secrets(start.environment),
        "ranks": [dict(rank) for rank in start.ranks],
        "notes": list(start.notes),
    }


def _lines(start: Start) -> Iterator[str]:
    count = f"{len(start.ranks)} processes" if len(start.ranks) > 1 else "1 process" if start.ranks else ""
    yield f"{start.machine}:" + (f" {count}" if count else "")
    yield f"  command: {shlex.join(start.command)}"
    for name, value in sorted(_without_secrets(start.environment).items()):
        yield f"  {name}={shlex.quote(value)}"
    for rank in start.ranks:
        yield "  " + " ".join(f"{name}={shlex.quote(value)}" for name, value in rank.items())
    yield from (f"  note: {note}" for note in start.notes)


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    secret = {opt.env for group in load_groups() for opt in group.options() if getattr(opt, "secret", False)}
    return {name: "(hidden)" if name in secret else value for name, value in environment.items()}
