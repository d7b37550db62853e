"""Writes configuration files atomically; Hugging Face Accelerate can read them too."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from accel_state.env import all_variables
from accel_state.errors import ConfigurationError
from accel_state.options.config_file import default_path, expand
from accel_state.options.registry import all_options
from accel_state.options.resources import MachineRange

from ..accelerators.registry import find_visible
from .read import read_config

# Keys of every file; other tools that read this format require some of them.
BASE = (
    *("compute_environment", "debug", "distributed_type", "enable_cpu_affinity", "machine_rank"),
    *("main_training_function", "mixed_precision", "num_machines", "num_processes", "rdzv_backend", "same_network"),
    *("downcast_bf16", "tpu_cluster", "tpu_use_sudo", "cpu"),
)


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write a configuration file for all GPUs of this machine, or for its CPU.

    Args:
        mixed_precision: no, fp16, bf16 or fp8.
        save_location: the file (.yaml, .yml or .json); by default the file that ``accel launch`` reads.

    Returns:
        The file, or False if it exists already: it is not changed, and a message reports it.

    Raises:
        ConfigurationError: ``mixed_precision`` is not allowed, or the file cannot be written.
    """
    path = expand(save_location) if save_location is not None else default_path()
    values = basic_values(mixed_precision)
    if os.path.exists(path):
        print(
            f"{path} exists already and was not changed. Run `accel config update`, or give another save_location.",
            file=sys.stderr,
        )
        return False
    write_file(path, nest(values))
    return path


def basic_values(mixed_precision: str) -> dict[str, Any]:
    """Values for this machine, by option."""
    options = all_options()
    count = find_visible(all_variables()).count
    chosen = {
        "mixed_precision": options["mixed_precision"].parse(mixed_precision, "mixed_precision"),
        "num_processes": max(1, count),
        "distributed_type": "MULTI_GPU" if count > 1 else "NO",
        "cpu": count == 0,
    }
    return {name: chosen.get(name, options[name].default) for name in BASE}


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file from values by option; None is left out."""
    options, content = all_options(), dict[str, Any]()
    for name, value in values.items():
        key = options[name].key
        if name == "gradient_accumulation_steps" and values.get("distributed_type") == "DEEPSPEED":
            # Other tools that read this format look for it in the DeepSpeed section.
            key = options[name].other_keys[0]
        if value is not None and key is not None:
            section, _, inner = key.rpartition(".")
            mapping = content.setdefault(section, {}) if section else content
            if isinstance(value, (tuple, MachineRange)):
                value = list(value) if isinstance(value, tuple) else str(value)
            mapping[inner] = value
    return content


def write_file(path: Path, content: Mapping[str, Any]) -> None:
    """Write a configuration file atomically."""
    write_text(path, to_text(path, content))


def write_text(path: Path, text: str, keep_unknown: bool = False) -> None:
    """Write the text of a configuration file atomically."""
    path = Path(os.path.realpath(path))  # a link stays a link
    temporary = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.stat().st_mode & 0o777 if os.path.exists(path) else 0o666
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        read_config(temporary, keep_unknown=keep_unknown)
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}. Give another file with --config_file."
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def keep_comments(source: Path, target: Path) -> list[str]:
    """Copy a YAML file with comments that is about to be rewritten without them; return a note on where they are."""
    lines = source.read_text(encoding="utf-8-sig").splitlines()
    if source.suffix == ".json" or not any(line.lstrip().startswith("#") or " #" in line for line in lines):
        return []
    if not (target.exists() and target.samefile(source)):
        return [f"comments are not kept; they are in {source}"]
    names = (source.with_name(f"{source.name}.bak{number or ''}") for number in itertools.count())
    copy = next(name for name in names if not name.exists())  # copies of earlier updates are kept
    shutil.copy2(source, copy)
    return [f"comments are not kept; the original file was copied to {copy}"]


def check_file_name(path: Path) -> None:
    """Check the suffix of a configuration file."""
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigurationError(f"{path}: the name of a configuration file ends in .yaml, .yml or .json.")


def to_text(path: Path, content: Mapping[str, Any]) -> str:
    """JSON or YAML, depending on the file's suffix, with sorted keys."""
    check_file_name(path)
    if path.suffix == ".json":
        return json.dumps(content, indent=2, sort_keys=True) + "\n"
    import yaml  # `accel --help` imports this module

    return str(yaml.safe_dump(dict(content), sort_keys=True, allow_unicode=True))


def _sync_directory(directory: Path) -> None:
    """Make the rename durable, on systems that can."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
