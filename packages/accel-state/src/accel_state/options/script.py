"""What is started, and how much the launcher says about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .option import OptionGroup, option


@dataclass(frozen=True)
class ScriptOptions(OptionGroup):
    """Options of one call of the launcher: no configuration file sets them."""

    title: ClassVar[str] = "script"

    config_file: str | None = option(
        None,
        kind=str,
        env="ACCELERATE_CONFIG_FILE",
        key=None,
        metavar="FILE",
        help="YAML or JSON file with values for the options below. Left out, default_config.yaml (or .json) is read, "
        "if it exists, from "
        "the folder accel in $HF_HOME, else in $XDG_CACHE_HOME/huggingface, else in ~/.cache/huggingface.",
    )
    module: bool = option(
        False, kind=bool, short="-m", key=None, help="The script is a module name, run as by python -m."
    )
    no_python: bool = option(
        False, kind=bool, key=None, help="The script is an executable of any kind: do not put python before it."
    )
    quiet: bool = option(
        False, kind=bool, short="-q", key=None, help="No notes from the launcher; errors and tracebacks only."
    )
    dry_run: bool = option(
        False,
        kind=bool,
        key=None,
        help="Print what each machine would start, with its environment, and start nothing.",
    )
    json: bool = option(False, kind=bool, key=None, help="With --dry-run: print it as JSON.")
