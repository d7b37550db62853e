"""``accel env``: information for a bug report."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from importlib import metadata
from typing import Any

from accel_state.command import Command
from accel_state.env import all_variables, read_str
from accel_state.errors import ConfigurationError
from accel_state.options import ConfigFile, find_default
from accel_state.options.config_file import expand
from accel_state.secrets import hide_in_text, hide_values

from ..accelerators.registry import find_visible
from ..config.read import read_config
from ..parser import ConfigParser, parse_options

_GIB = 1024**3
_LIBRARIES = (
    *("numpy", "safetensors", "transformers", "deepspeed", "bitsandbytes"),
    *("torchao", "transformer-engine", "megatron-core", "torch-xla"),
)
_VARIABLES = re.compile(
    r"(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG|NCCL|CCL|TORCH|OMP|SLURM|OMPI_COMM|PMI)_|.*_VISIBLE_DEVICES$"
)


def run(argv: list[str]) -> int:
    """Run ``accel env``.

    Raises:
        ConfigurationError: an option is not known.
    """
    options = parse_options(argv, build_parser())
    facts = {**machine(), **torch_facts(), **configuration(options.get("config_file"))}
    print(json.dumps(facts, indent=2, default=str) if "json" in options else _as_text(facts))
    return 0


def build_parser() -> ConfigParser:
    """Return the parser."""
    description = "Print versions, devices and configuration for a bug report."
    parser = ConfigParser(prog="accel env", description=description, allow_abbrev=False)
    text = "Configuration file to show. Default: the one that accel launch reads."
    parser.add_argument("--config_file", "--config-file", metavar="FILE", default=argparse.SUPPRESS, help=text)
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="Print JSON.")
    return parser


def machine() -> dict[str, Any]:
    """Versions and devices, without torch."""
    import psutil  # `accel --help` imports this module

    versions = {name: _version(name) for name in (*_accel_distributions(), *_LIBRARIES)}
    return {
        **{f"{name} version": version for name, version in versions.items() if version is not None},
        "Platform": platform.platform(),
        "Python version": platform.python_version(),
        "Python executable": sys.executable,
        "CPUs": f"{psutil.cpu_count(logical=False)} cores, {psutil.cpu_count()} threads",
        "System RAM": f"{psutil.virtual_memory().total / _GIB:.2f} GiB",
        "Visible GPUs": find_visible(all_variables()).count,
    }


def torch_facts() -> dict[str, Any]:
    """Version and device of torch, or why it cannot be imported."""
    try:
        import torch

        from accel_state.devices import detect
    except (ImportError, OSError) as error:
        return {"PyTorch": f"cannot be imported: {error}"}
    device = detect()
    return {"PyTorch version": torch.__version__, "PyTorch device": f"{device.name} ({device.device_count()})"}


def configuration(path: str | None) -> dict[str, Any]:
    """Return the configuration file, its errors, and the environment variables of launchers and libraries."""
    given = path if path is not None else read_str("ACCELERATE_CONFIG_FILE")
    file = expand(given) if given is not None else find_default()
    facts: dict[str, Any] = {"Configuration file": str(file) if file is not None else "none"}
    if file is not None:
        try:
            entries = ConfigFile.read(file).entries
            facts["Configuration"] = hide_values({key: item.value for key, item in entries.items() if "." not in key})
            read_config(file)
        except ConfigurationError as error:
            facts["Configuration error"] = hide_in_text(str(error))
    variables = {name: value for name, value in sorted(all_variables().items()) if _VARIABLES.match(name)}
    facts["Environment"] = hide_values(variables)
    return facts


def _accel_distributions() -> list[str]:
    names = {str(dist.metadata["Name"]).lower() for dist in metadata.distributions() if dist.metadata["Name"]}
    return sorted(name for name in names if name == "accel" or name.startswith("accel-"))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _as_text(facts: dict[str, Any]) -> str:
    lines = ["Paste this into your bug report:", ""]
    for name, value in facts.items():
        if isinstance(value, dict):
            lines.append(f"- {name}:{'' if value else ' none'}")
            lines += [f"\t- {key}: {inner}" for key, inner in value.items()]
        else:
            lines.append(f"- {name}: {value}")
    return "\n".join(lines)


COMMAND = Command("print versions, devices and configuration for a bug report", run)
