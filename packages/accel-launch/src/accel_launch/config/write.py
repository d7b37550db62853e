"""Writing configuration files: whole or not at all, and readable by Hugging Face Accelerate too."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from accel_state.env import all_variables
from accel_state.errors import ConfigurationError
from accel_state.options import Option, default_path, load_groups
from accel_state.options.config_file import expand

from ..accelerators.registry import find_visible
from .read import read_config

# What every file holds, whatever it is for; other tools that read this format ask for some of them.
BASE = (
    "compute_environment",
    "debug",
    "distributed_type",
    "enable_cpu_affinity",
    "machine_rank",
    "main_training_function",
    "mixed_precision",
    "num_machines",
    "num_processes",
    "rdzv_backend",
    "same_network",
    "downcast_bf16",
    "tpu_cluster",
    "tpu_use_sudo",
    "cpu",
)


@functools.cache
def declared() -> Mapping[str, Option]:
    """Every option by its name."""
    return {opt.name: opt for group in load_groups() for opt in group.options()}


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write a configuration file for this machine: all its GPUs, or its CPU where there is none.

    Args:
        mixed_precision: no, fp16, bf16 or fp8.
        save_location: the file (.yaml, .yml or .json); left out, the default one.

    Returns:
        The file, or False where it exists already: it is left as it is, and a message says so.

    Raises:
        ConfigurationError: ``mixed_precision`` is not allowed, or the file cannot be written.
    """
    path = expand(save_location) if save_location is not None else default_path()
    values = basic_values(mixed_precision)
    if os.path.exists(path):
        print(
            f"{path} exists already and is left as it is. Run `accel config update`, or give another save_location.",
            file=sys.stderr,
        )
        return False
    write_file(path, nest(values))
    return path


def basic_values(mixed_precision: str) -> dict[str, Any]:
    """Values, by option, for this machine.

    Raises:
        ConfigurationError: ``mixed_precision`` is not allowed.
    """
    options = declared()
    count = find_visible(all_variables()).count
    chosen = {
        "mixed_precision": options["mixed_precision"].parse(mixed_precision, "mixed_precision"),
        "num_processes": max(1, count),
        "distributed_type": "MULTI_GPU" if count > 1 else "NO",
        "cpu": count == 0,
    }
    return {name: chosen.get(name, options[name].default) for name in BASE}


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """A file's content from values by option; what is None is left out."""
    options, content = declared(), dict[str, Any]()
    for name, value in values.items():
        key = options[name].key
        if name == "gradient_accumulation_steps" and values.get("distributed_type") == "DEEPSPEED":
            # Where other tools that read this format look for it.
            key = options[name].other_keys[0]
        if value is not None and key is not None:
            section, _, inner = key.rpartition(".")
            place = content.setdefault(section, {}) if section else content
            place[inner] = list(value) if isinstance(value, tuple) else value
    return content


def write_file(path: Path, content: Mapping[str, Any]) -> None:
    """Write a configuration file: under another name first, then renamed, so that at no time half a file is there.

    Raises:
        ConfigurationError: the file cannot be written, or would not be a readable one; what was there before is
            untouched.
    """
    write_text(path, to_text(path, content))


def write_text(path: Path, text: str) -> None:
    """The same with a text that has been made already, with comments, say.

    Raises:
        ConfigurationError: see :func:`write_file`.
    """
    # A link stays a link.
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(temporary, text, path)
        read_config(temporary)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}. Give another file with --config_file."
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def to_text(path: Path, content: Mapping[str, Any]) -> str:
    """JSON for a file that is called so, else YAML; keys in alphabetical order.

    Raises:
        ConfigurationError: the file is called neither.
    """
    if path.suffix == ".json":
        return json.dumps(content, indent=2, sort_keys=True) + "\n"
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigurationError(f"{path}: a configuration file ends in .yaml, .yml or .json.")
    import yaml  # `accel --help` loads this module

    return str(yaml.safe_dump(dict(content), sort_keys=True, allow_unicode=True))


def _write_whole(temporary: Path, text: str, target: Path) -> None:
    mode = target.stat().st_mode & 0o777 if os.path.exists(target) else 0o666
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last; some systems have no such thing for folders."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
