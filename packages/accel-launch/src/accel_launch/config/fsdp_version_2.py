"""Converts configuration files from FSDP 1 to FSDP 2. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
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
    section, mesh, notes = _convert(source, settings, content.get(_SECTION) or {})
    notes += [note for note in config.notes if "not a known key" in note]
    converted = {**content, _SECTION: section}
    if mesh:
        converted[_MESH] = {**(content.get(_MESH) or {}), **mesh}
    new_text = to_text(target, converted)
    notes += keep_comments(source, target)
    write_text(target, new_text, keep_unknown=True)
    return notes


def _convert(
    source: Path, settings: Resolution, section: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, int], list[str]]:
    """Return the new section, keys to add to ``parallelism_config``, and a note for each change."""
    names = {key: opt.name for opt in all_options().values() for key in opt.keys}
    named = {key: names.get(f"{_SECTION}.{key}", "") for key in section}  # the option of each key
    new, strategy = dict(section), settings[_STRATEGY]
    if strategy not in RESHARD_OF_STRATEGY:
        raise ConfigurationError(
            f"{settings.where(_STRATEGY)}: version 2 {UNSUPPORTED['sharding_strategy', strategy]}. Set "
            f"distributed_type: MULTI_GPU in {source}, or one of the strategies {', '.join(RESHARD_OF_STRATEGY)}."
        )
    notes = []
    if _RESHARD in new:
        value = _yaml_value(new.pop(_RESHARD))
        notes.append(f"{_RESHARD}: {value} had no effect in version 1; the sharding strategy decides")
    keys = [key for key in section if named[key] == _STRATEGY]
    for key in keys:
        del new[key]
    new[_RESHARD] = RESHARD_OF_STRATEGY[strategy]
    becomes = f"becomes {_RESHARD}: {_yaml_value(new[_RESHARD])}"
    notes.append(f"{keys[0] if keys else _STRATEGY}: {strategy} {becomes}")
    mesh = _mesh_of_hybrid(settings) if strategy.startswith("HYBRID") else {}
    if mesh:
        machines, shards = mesh.values()
        notes.append(
            f"{strategy} also becomes a mesh: {machines} replicas (one per machine), each sharded over {shards} "
            "processes"
        )
    for key, value in section.items():
        _, reason = WITHOUT_EFFECT.get(named[key].removeprefix("fsdp_"), (None, ""))
        if named[key] == "fsdp_sync_module_states" and settings["fsdp_sync_module_states"]:
            reason = "starts with the weights of rank 0 by default"
        if reason:
            del new[key]
            notes.append(f"{key}: {_yaml_value(value)} is left out: version 2 {reason}")
    keys = [key for key in section if named[key] == _STATE_DICT]
    if settings[_STATE_DICT] == "LOCAL_STATE_DICT":
        new[keys[0]] = "SHARDED_STATE_DICT"
        instead = UNSUPPORTED["state_dict_type", "LOCAL_STATE_DICT"]
        notes.append(f"{keys[0]}: LOCAL_STATE_DICT becomes SHARDED_STATE_DICT: version 2 {instead}")
    elif settings[_STATE_DICT] is None:
        for key in keys:
            del new[key]
        new[_STATE_DICT] = "FULL_STATE_DICT"
        notes.append(f"{_STATE_DICT}: FULL_STATE_DICT is added: the default of version 1, unlike version 2")
    new["fsdp_version"] = 2
    return new, mesh, [*notes, "fsdp_version is 2"]


def _mesh_of_hybrid(settings: Resolution) -> dict[str, int]:
    """Return the axes of a mesh with a replica on each machine, the replicating one first."""
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
    return {f"{_MESH}_dp_replicate_size": machines, f"{_MESH}_dp_shard_size": processes // machines}


def _yaml_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
