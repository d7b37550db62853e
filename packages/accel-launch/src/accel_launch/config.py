"""The configuration file of ``accel launch``: found, read, and checked for keys that nothing here would act on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options import ConfigFile, Entry, Option, find_default, load_groups

# Keys that files of this format hold also where they ask for nothing, with the values that ask for nothing.
_ASKS_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "compute_environment": ("LOCAL_MACHINE",),
    # The kind of run follows from the machine, from use_cpu and from num_processes.
    "distributed_type": ("NO", "MULTI_CPU", "MULTI_GPU"),
    "main_training_function": ("main",),
    "downcast_bf16": ("no",),
    "enable_cpu_affinity": (),
    "same_network": (True,),
    "tpu_env": (),
    "tpu_use_cluster": (),
    "tpu_use_sudo": (),
    "deepspeed_config": (),
    "fsdp_config": (),
    "megatron_lm_config": (),
    "fp8_config": (),
    "parallelism_config": (),
    "mpirun_config": (),
    "ipex_config": (),
    "command_file": (),
    "commands": (),
    "tpu_name": (),
    "tpu_zone": (),
}


def read_config(path: str | None, environ: Mapping[str, str] | None = None) -> ConfigFile | None:
    """Read a configuration file and check its keys.

    Args:
        path: the file; None means the default one, if it exists.
        environ: environment variables that say where the default one is.

    Raises:
        ConfigurationError: the file cannot be read, or holds a key that has no effect here; the message names file, line and key.
    """
    found = path if path is not None else find_default(environ)
    if found is None:
        return None
    config = ConfigFile.read(found)
    check_keys(config)
    return config


def check_keys(config: ConfigFile) -> None:
    """Refuse a key that would be ignored.

    Raises:
        ConfigurationError: see :func:`read_config`.
    """
    known = {opt.key: opt for group in load_groups() for opt in group.options() if opt.key}
    sections = {key.split(".")[0] for key in known if "." in key}
    for entry in config.entries.values():
        _check_entry(entry, known, sections)


def _check_entry(entry: Entry, known: Mapping[str, Option], sections: set[str]) -> None:
    section = entry.key.split(".")[0]
    if entry.key in known or (entry.key in sections and (entry.value is None or isinstance(entry.value, dict))):
        return
    if entry.key in sections:
        raise ConfigurationError(f"{entry.place}: {entry.key} must be a mapping of keys to values, not {entry.value!r}.")
    if section in _ASKS_FOR_NOTHING and "." not in entry.key:
        if not entry.value or entry.value in _ASKS_FOR_NOTHING[section]:
            return
        allowed = ", ".join(str(value) for value in _ASKS_FOR_NOTHING[section]) or "an empty value"
        raise ConfigurationError(
            f"{entry.place}: {entry.key}={entry.value!r} asks for something that this version of accel-launch does not start. "
            f"Allowed: {allowed}; or remove the key."
        )
    from .cli import suggest

    raise ConfigurationError(
        f"{entry.place}: {entry.key} is not a known key.{suggest(entry.key, sorted(known))} Known: {', '.join(sorted(known))}."
    )
