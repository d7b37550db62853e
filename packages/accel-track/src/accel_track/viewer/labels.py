"""What the viewer calls runs: the settings in which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..jsonl_reader import Run
from .terminal import one_line

_SETTINGS, _LONGEST = 3, 24


def run_labels(runs: Sequence[Run]) -> dict[str, str]:
    """Return a label for each run, by its name: at most three settings, with the name where they are not enough."""
    configs = {run.name: flat_config(run.facts.get("config")) for run in runs}
    differing = differing_settings(configs.values())
    names = short_names(list(configs))
    ends = [key.rpartition(".")[2] for key in differing]
    short = {key: end if ends.count(end) == 1 else key for key, end in zip(differing, ends, strict=True)}
    labels = {}
    for name, config in configs.items():
        settings = []
        for key in [key for key in differing if key in config][:_SETTINGS]:
            text = one_line(config[key])
            settings.append(f"{short[key]}={text[:_LONGEST]}{'...' if len(text) > _LONGEST else ''}")
        labels[name] = ", ".join(settings)
    texts = list(labels.values())
    for name, label in labels.items():
        if not label or texts.count(label) > 1:
            labels[name] = f"{label} ({names[name]})" if label else names[name]
    return labels


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return the names without the project, where that leaves them distinct."""
    short = [name.rpartition("/")[2] for name in names]
    return {name: end if short.count(end) == 1 else name for name, end in zip(names, short, strict=True)}


def differing_settings(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the settings that are not the same in all runs."""
    found = list(configs)
    keys = dict.fromkeys(key for config in found for key in config)
    return [key for key in keys if len({repr(config.get(key)) for config in found}) > 1]


def flat_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the nested configuration of a run, with keys joined by dots."""
    if not isinstance(config, dict):
        return {}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flat_config(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
