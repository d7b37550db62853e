"""Objects as YAML that people read. Imported where it is written: importing yaml takes longer than a command's help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Writes commands as blocks, as people do."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if text.endswith("\n") else None)


_Dumper.add_representer(str, _represent_text)


def as_yaml(objects: Sequence[Any]) -> str:
    """Documents, one after the other."""
    return "---\n".join(yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=120) for one in objects)
