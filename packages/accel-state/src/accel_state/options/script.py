"""The script to launch, and what the launcher prints."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .declaration import OptionGroup, option

_once = functools.partial(option, key=None, env=None)


@dataclass(frozen=True)
class ScriptOptions(OptionGroup):
    """Options of a single launch, which a configuration file cannot set."""

    title = "script"

    config_file: str | None = option(
        key=None,
        metavar="FILE",
        help="YAML or JSON file with values for the options below. Left out, default_config.yaml (or .json) in the "
        "directory accel of $HF_HOME, else of $XDG_CACHE_HOME/huggingface, else of ~/.cache/huggingface, if it exists.",
    )
    module: bool = _once(False, short="-m", help="The script is the name of a module, to run with python -m.")
    no_python: bool = _once(False, help="The script is an executable: do not run it with python.")
    quiet: bool = _once(False, short="-q", help="Print errors and tracebacks only, without the launcher's notes.")
    dry_run: bool = _once(
        False, help="Print what would be started on each machine, with its environment, without starting anything."
    )
    json: bool = _once(False, help="With --dry-run: print the result as JSON.")
