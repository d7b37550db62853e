"""Converts configuration files from FSDP 1 to FSDP 2. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options.conflicts import check
from accel_state.options.fsdp_versions import RESHARD_OF_STRATEGY, UNSUPPORTED, WITHOUT_EFFECT
from accel_state.options.registry import all_options, load_groups
from accel_state.options.resolution import Resolution, resolve

from .read import read_config
from .write import keep_comments, to_text, write_text

_SECTION = "fsdp_config"
_MESH = "parallelism_config"
_STRATEGY = "fsdp_sharding_strategy"
_RESHARD = "fsdp_reshard_after_forward"
_STATE_DICT = "fsdp_state_dict_type"


@dataclass
class _Conversion:
    """The new content of a file."""

    section: dict[str, Any]  # the new section fsdp_config
    option_names: Mapping[str, str]  # option by key of the old section
    mesh: dict[str, int] = field(default_factory=dict)  # keys to add to parallelism_config
    notes: list[str] = field(default_factory=list)  # a line for each change

    def keys_of(self, option: str) -> list[str]:
        """Return the keys of the section that set an option."""
        return [key for key in self.section if self.option_names.get(key) == option]


def convert_file(source: Path, target: Path) -> list[str]:
    """Convert a configuration file from FSDP 1 to FSDP 2."""
    import yaml

    config = read_config(source, keep_unknown=True)
    if config is None:
        raise ConfigurationError(f"{source} does not exist.")
    settings = check(resolve(load_groups(), {}, environ={}, config=config))
    if not settings["use_fsdp"]:
        raise ConfigurationError(
            f"{source} does not use FSDP: its distributed_type is {settings['distributed_type'] or 'not set'}. Only "
            "files with distributed_type FSDP (or use_fsdp) can be converted."
        )
    if settings["fsdp_version"] == 2:
        return [f"{settings.where('fsdp_version')}: the file is of version 2 already; nothing was written"]
    text = source.read_text(encoding="utf-8-sig")
    content = yaml.safe_load(text.replace("\t", " ") if source.suffix == ".json" else text) or {}
    conversion = _convert(source, settings, content.get(_SECTION) or {})
    conversion.notes += [note for note in config.notes if "not a known key" in note]
    converted = {**content, _SECTION: conversion.section}
    if conversion.mesh:
        converted[_MESH] = {**(content.get(_MESH) or {}), **conversion.mesh}
    new_text = to_text(target, converted)
    conversion.notes += keep_comments(source, target)
    write_text(target, new_text, keep_unknown=True)
    return conversion.notes


def _convert(source: Path, settings: Resolution, section: Mapping[str, Any]) -> _Conversion:
    prefix = f"{_SECTION}."
    names = {
        key.removeprefix(prefix): opt.name
        for opt in all_options().values()
        for key in opt.keys
        if key.startswith(prefix)
    }
    conversion = _Conversion(dict(section), names)
    _convert_strategy(source, settings, conversion)
    for key, value in section.items():
        name = names.get(key, "")
        _, reason = WITHOUT_EFFECT.get(name.removeprefix("fsdp_"), (None, ""))
        if name == "fsdp_sync_module_states" and settings[name]:
            reason = "starts with the weights of rank 0 by default"
        if reason:
            del conversion.section[key]
            conversion.notes.append(f"{key}: {_yaml_value(value)} is left out: version 2 {reason}")
    _convert_state_dict_type(settings, conversion)
    conversion.section["fsdp_version"] = 2
    conversion.notes.append("fsdp_version is 2")
    return conversion


def _convert_strategy(source: Path, settings: Resolution, conversion: _Conversion) -> None:
    strategy = settings[_STRATEGY]
    if strategy not in RESHARD_OF_STRATEGY:
        raise ConfigurationError(
            f"{settings.where(_STRATEGY)}: version 2 {UNSUPPORTED['sharding_strategy', strategy]}. Set "
            f"distributed_type: MULTI_GPU in {source}, or one of the strategies {', '.join(RESHARD_OF_STRATEGY)}."
        )
    reshard = RESHARD_OF_STRATEGY[strategy]
    if _RESHARD in conversion.section:
        value = _yaml_value(conversion.section.pop(_RESHARD))
        conversion.notes.append(f"{_RESHARD}: {value} had no effect in version 1; the sharding strategy decides")
    keys = conversion.keys_of(_STRATEGY)
    for key in keys:
        del conversion.section[key]
    conversion.section[_RESHARD] = reshard
    conversion.notes.append(f"{keys[0] if keys else _STRATEGY}: {strategy} becomes {_RESHARD}: {_yaml_value(reshard)}")
    if strategy.startswith("HYBRID"):
        _convert_hybrid(settings, strategy, conversion)


def _convert_hybrid(settings: Resolution, strategy: str, conversion: _Conversion) -> None:
    """Convert a replica on each machine to a mesh axis."""
    processes, machines = settings["num_processes"], settings["num_machines"]
    if settings["use_parallelism_config"]:
        raise ConfigurationError(
            f"{settings.where(_STRATEGY)} replicates the model on each machine, which contradicts the section {_MESH}. "
            "Remove one of them."
        )
    if processes is None or machines < 2 or processes % machines:
        raise ConfigurationError(
            f"{settings.where(_STRATEGY)} keeps a replica on each of several machines, which is a mesh in version 2. "
            f"Its sizes must be in the file: num_machines is {machines}, num_processes is "
            f"{'not set' if processes is None else processes}. Set both, num_processes to a multiple of num_machines."
        )
    conversion.mesh = {f"{_MESH}_dp_replicate_size": machines, f"{_MESH}_dp_shard_size": processes // machines}
    conversion.notes.append(
        f"{strategy} also becomes a mesh: {machines} replicas (one per machine), each sharded over "
        f"{processes // machines} processes"
    )


def _convert_state_dict_type(settings: Resolution, conversion: _Conversion) -> None:
    keys = conversion.keys_of(_STATE_DICT)
    if settings[_STATE_DICT] == "LOCAL_STATE_DICT":
        conversion.section[keys[0]] = "SHARDED_STATE_DICT"
        instead = UNSUPPORTED["state_dict_type", "LOCAL_STATE_DICT"]
        conversion.notes.append(f"{keys[0]}: LOCAL_STATE_DICT becomes SHARDED_STATE_DICT: version 2 {instead}")
    elif settings[_STATE_DICT] is None:
        for key in keys:
            del conversion.section[key]
        conversion.section[_STATE_DICT] = "FULL_STATE_DICT"
        conversion.notes.append(f"{_STATE_DICT}: FULL_STATE_DICT is added: the default of version 1, unlike version 2")


def _yaml_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
