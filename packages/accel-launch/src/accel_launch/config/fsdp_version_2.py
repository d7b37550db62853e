"""Configuration files of FSDP 1 as files of FSDP 2, with their comments. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from accel_launch.config.read import read_config
from accel_launch.config.write import declared, to_text, write_text
from accel_state.errors import ConfigurationError
from accel_state.options import Resolution, check, load_groups, resolve

_SECTION = "fsdp_config"
_MESH = "parallelism_config"
_VERSION = "fsdp_version"
_RESHARD = "fsdp_reshard_after_forward"
_STATES = "fsdp_state_dict_type"
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}

_GONE: Mapping[str, str] = {
    "fsdp_backward_prefetch": "version 2 always fetches the next parameters before the current gradients are reduced",
    "fsdp_forward_prefetch": "version 2 fetches ahead by itself; model.set_modules_to_forward_prefetch asks for more",
    "fsdp_use_orig_params": "version 2 always keeps the original parameters",
}
"""Options that version 2 has not, and why."""


@dataclass
class Conversion:
    """What becomes of a file.

    Attributes:
        changed: new values by key of the section fsdp_config; a key under another name is a pair.
        removed: keys that go.
        added: further keys of the section.
        mesh: a section parallelism_config to add.
        notes: a line for each change.
    """

    changed: dict[str, tuple[str, Any]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    added: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def convert_file(source: Path, target: Path) -> list[str]:
    """Write a file of FSDP 1 as one of FSDP 2.

    Args:
        source: a configuration file.
        target: where to write; may be the same. Until the new file is whole, what is there stays.

    Returns:
        A line for each change; a single one where the file is of version 2 already, and nothing is written.

    Raises:
        ConfigurationError: the file is not one of FSDP, is not valid, or asks for what version 2 has not; nothing is
            written then.
    """
    config = read_config(source)
    if config is None:
        raise ConfigurationError(f"{source} does not exist.")
    settings = check(resolve(load_groups(), {}, environ={}, config=config))
    if not settings["use_fsdp"]:
        raise ConfigurationError(
            f"{source} is no configuration of FSDP: its distributed_type is "
            f"{settings['distributed_type'] or 'not given'}. Only files with "
            "distributed_type FSDP (or use_fsdp) are converted."
        )
    if settings["fsdp_version"] == 2:
        return [f"{settings.where('fsdp_version')}: it is a file of version 2 already; nothing was written"]
    text = source.read_text(encoding="utf-8-sig")
    content = yaml.safe_load(text.replace("\t", " ") if source.suffix == ".json" else text) or {}
    conversion = _conversion(source, settings, content)
    wanted = _applied(content, conversion)
    written = _new_text(target, text, content, wanted, conversion, is_yaml=source.suffix != ".json")
    write_text(target, written)
    return conversion.notes


def _conversion(source: Path, settings: Resolution, content: Mapping[str, Any]) -> Conversion:
    found = Conversion()
    section = content.get(_SECTION) or {}
    names = {
        key.removeprefix(f"{_SECTION}."): opt.name
        for opt in declared().values()
        for key in opt.keys
        if key.startswith(f"{_SECTION}.")
    }
    _map_strategy(source, settings, section, names, found)
    for key, value in section.items():
        name = names.get(key, "")
        if name in _GONE:
            found.removed.append(key)
            found.notes.append(f"{key}: {_text(value)} is left out: {_GONE[name]}")
        elif name == "fsdp_sync_module_states" and settings[name]:
            found.removed.append(key)
            found.notes.append(
                f"{key}: true is left out: version 2 always starts with the first process's weights unless told "
                "otherwise"
            )
    _map_states(settings, section, names, found)
    if _VERSION in section:
        found.changed[_VERSION] = (_VERSION, 2)
    else:
        found.added[_VERSION] = 2
    found.notes.append(f"{_VERSION} is 2")
    return found


def _map_strategy(
    source: Path, settings: Resolution, section: Mapping[str, Any], names: Mapping[str, str], found: Conversion
) -> None:
    strategy = settings["fsdp_sharding_strategy"]
    if strategy not in _RESHARDS:
        raise ConfigurationError(
            f"{settings.where('fsdp_sharding_strategy')}: version 2 has no {strategy}, which divides nothing. Set "
            "distributed_type: "
            f"MULTI_GPU in {source} (every process then has the whole model), or a strategy of {', '.join(_RESHARDS)}."
        )
    reshard = _RESHARDS[strategy]
    keys = [key for key in section if names.get(key) == "fsdp_sharding_strategy"]
    for key in [key for key in section if key == _RESHARD]:
        found.removed.append(key)
        found.notes.append(f"{key}: {_text(section[key])} had no effect with version 1; the sharding strategy decides")
    if keys:
        found.changed[keys[0]] = (_RESHARD, reshard)
        found.removed += keys[1:]
    else:
        found.added[_RESHARD] = reshard
    found.notes.append(
        f"{keys[0] if keys else 'fsdp_sharding_strategy'}: {strategy} becomes {_RESHARD}: {_text(reshard)}"
    )
    if strategy.startswith("HYBRID"):
        _map_hybrid(settings, strategy, found)


def _map_hybrid(settings: Resolution, strategy: str, found: Conversion) -> None:
    """A copy on each machine is an axis of its own in version 2."""
    processes, machines = settings["num_processes"], settings["num_machines"]
    if settings["use_parallelism_config"]:
        raise ConfigurationError(
            f"{settings.where('fsdp_sharding_strategy')} asks for a copy of the model on each machine, and there is a "
            f"{_MESH} section that "
            "says otherwise. Remove one of them."
        )
    if processes is None or machines < 2 or processes % machines:
        raise ConfigurationError(
            f"{settings.where('fsdp_sharding_strategy')} keeps a copy of the model on each of several machines, which "
            "in version 2 is a "
            f"mesh of as many copies. The file must say how many there are: num_machines is {machines}, num_processes "
            "is "
            f"{'not given' if processes is None else processes}. Set both, num_processes to a multiple of num_machines."
        )
    found.mesh = {f"{_MESH}_dp_replicate_size": machines, f"{_MESH}_dp_shard_size": processes // machines}
    found.notes.append(
        f"{strategy} becomes a mesh as well: {machines} copies (one a machine), each on {processes // machines} "
        "processes"
    )


def _map_states(settings: Resolution, section: Mapping[str, Any], names: Mapping[str, str], found: Conversion) -> None:
    keys = [key for key in section if names.get(key) == _STATES]
    if settings[_STATES] == "LOCAL_STATE_DICT":
        found.changed[keys[0]] = (keys[0], "SHARDED_STATE_DICT")
        found.notes.append(
            f"{keys[0]}: LOCAL_STATE_DICT becomes SHARDED_STATE_DICT, which loads on any number of processes"
        )
    elif settings[_STATES] is None:
        # Left out, version 1 writes whole states and version 2 sharded ones.
        found.removed += keys
        found.added[_STATES] = "FULL_STATE_DICT"
        found.notes.append(
            f"{_STATES}: FULL_STATE_DICT is written down: it is the default of version 1, and not of version 2"
        )


def _applied(content: Mapping[str, Any], conversion: Conversion) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for key, value in (content.get(_SECTION) or {}).items():
        if key in conversion.removed:
            continue
        new, changed = conversion.changed.get(key, (key, value))
        section[new] = changed
    result = {**content, _SECTION: {**section, **conversion.added}}
    if conversion.mesh:
        # A section that says nothing may be there already.
        result[_MESH] = {**(content.get(_MESH) or {}), **conversion.mesh}
    return result


def _new_text(
    target: Path,
    text: str,
    content: Mapping[str, Any],
    wanted: Mapping[str, Any],
    conversion: Conversion,
    is_yaml: bool,
) -> str:
    stays = is_yaml and target.suffix in (".yaml", ".yml") and not (conversion.mesh and _MESH in content)
    edited = _edited(text, conversion) if stays else None
    if edited is not None and _means(edited, wanted):
        return edited
    if is_yaml and any(line.lstrip().startswith("#") or " #" in line for line in text.splitlines()):
        conversion.notes.append("comments are not kept")
    return json.dumps(wanted, indent=2) + "\n" if target.suffix == ".json" else to_text(target, wanted)


def _means(text: str, wanted: Mapping[str, Any]) -> bool:
    try:
        return bool(yaml.safe_load(text) == wanted)
    except yaml.YAMLError:
        return False


def _edited(text: str, conversion: Conversion) -> str | None:
    """The text with its lines changed, so that comments stay; None where the section is not one key a line."""
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    lines = text.splitlines()
    header, value = next(((key, value) for key, value in root.value if key.value == _SECTION), (None, None))
    if header is None:
        return "\n".join([*lines, *_as_lines(_SECTION, conversion.added), *_as_lines(_MESH, conversion.mesh)]) + "\n"
    if not isinstance(value, yaml.MappingNode) or value.flow_style or not value.value:
        return None
    places = {key.value: key.start_mark for key, _ in value.value}
    if len({mark.line for mark in places.values()}) != len(places):
        return None
    indent = " " * value.value[0][0].start_mark.column
    new: dict[int, list[str]] = {}
    for key, mark in places.items():
        if key in conversion.removed:
            new[mark.line] = []
        elif key in conversion.changed:
            name, changed = conversion.changed[key]
            comment = _comment(lines[mark.line])
            new[mark.line] = [f"{indent}{name}: {_text(changed)}{comment}"]
    first = header.start_mark.line
    new[first] = [lines[first], *(f"{indent}{key}: {_text(added)}" for key, added in conversion.added.items())]
    kept = [line for number, old in enumerate(lines) for line in new.get(number, [old])]
    return "\n".join([*kept, *_as_lines(_MESH, conversion.mesh)]) + "\n"


def _as_lines(section: str, values: Mapping[str, Any]) -> list[str]:
    return [f"{section}:", *(f"  {key}: {_text(value)}" for key, value in values.items())] if values else []


def _comment(line: str) -> str:
    found = re.search(r"\s+#.*$", line)
    return found[0] if found else ""


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
