"""``accel config``: answer questions, or write, update and show a configuration file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options import Resolution, ScriptOptions, default_path, find_default, load_groups, resolve
from accel_state.options.config_file import expand

from ..config.read import load_settings, read_config
from ..config.update import update_file
from ..config.write import basic_values, declared, nest, write_file
from ..parser import ConfigParser, parse_options
from ..suggestions import suggest
from .base import Command

USAGE = "accel config [default | update | show] [options]"


def run(argv: list[str]) -> int:
    """Run ``accel config``.

    Raises:
        ConfigurationError: the command line or a file is wrong, or a file cannot be written.
    """
    if argv and not argv[0].startswith("-"):
        if argv[0] not in PARTS:
            raise ConfigurationError(
                f"{argv[0]!r} is not a part of accel config.{suggest(argv[0], list(PARTS))} Usage: {USAGE}."
            )
        return PARTS[argv[0]](argv[1:])
    return _ask(argv)


def _parser(part: str, description: str) -> ConfigParser:
    parser = ConfigParser(prog=f"accel config{' ' + part if part else ''}", description=description, allow_abbrev=False)
    text = "The file (.yaml, .yml or .json). Left out, default_config.yaml in the folder accel of $HF_HOME, else of "
    text += "$XDG_CACHE_HOME/huggingface, else of ~/.cache/huggingface."
    parser.add_argument("--config_file", "--config-file", metavar="FILE", default=argparse.SUPPRESS, help=text)
    return parser


def _named(options: Mapping[str, Any]) -> Path | None:
    """The file that the command line or the environment names."""
    path = resolve([ScriptOptions], {name: text for name, text in options.items() if name == "config_file"})[
        "config_file"
    ]
    return None if path is None else expand(path)


def _target(options: Mapping[str, Any]) -> Path:
    return _named(options) or default_path()


def _ask(argv: list[str]) -> int:
    """The questionnaire."""
    from ..questionnaire.flow import ask_all, complete
    from ..questionnaire.prompts import MenuPrompts, TextPrompts, is_terminal

    parser = _parser(
        "", "Answer questions about this machine and the training; only what follows from the answers so far is asked."
    )
    parser.usage, parser.epilog = (
        USAGE,
        "default writes a file without asking; update brings one up to date; show prints every setting.",
    )
    path = _target(parse_options(argv, parser))
    nest_check(path)
    prompts = MenuPrompts() if is_terminal() else TextPrompts()
    known = _known(path, prompts.confirm)
    while True:
        answers = ask_all(prompts.ask, known)
        try:
            content = nest(complete(answers, known))
            break
        except ConfigurationError as error:
            print(f"These answers do not go together: {error}")
            if not prompts.confirm("Answer again (what you said is filled in)?"):
                raise
            known = {**known, **answers}
    write_file(path, content)
    print(f"Configuration saved in {path}")
    return 0


def nest_check(path: Path) -> None:
    """Refuse a file name that cannot be written, before anything is asked.

    Raises:
        ConfigurationError: it ends in nothing that is a configuration file.
    """
    from ..config.write import to_text

    to_text(path, {})


def _known(path: Path, confirm: Callable[[str], bool]) -> dict[str, Any]:
    """What the file that will be replaced holds, to be proposed."""
    from ..questionnaire.flow import known_values

    found = path if os.path.exists(path) else (find_default() if path == default_path() else None)
    if found is None:
        return {}
    try:
        settings = resolve(load_groups(), {}, environ={}, config=read_config(found))
    except ConfigurationError as error:
        print(f"The present file cannot be used: {error}")
        if found == path and not confirm("Replace it by a new one?"):
            raise
        return {}
    return known_values(settings)


def _default(argv: list[str]) -> int:
    """``accel config default``."""
    parser = _parser("default", "Write a file for this machine: all its GPUs, or its CPU where there is none.")
    choices = declared()["mixed_precision"].choices or ()
    parser.add_argument(
        "--mixed_precision",
        "--mixed-precision",
        metavar="{" + ",".join(choices) + "}",
        default="no",
        help="(default: no)",
    )
    options = parse_options(argv, parser)
    path = _target(options)
    values = basic_values(options["mixed_precision"])
    if os.path.exists(path):
        raise ConfigurationError(
            f"{path} exists already. `accel config update` brings it up to date; --config_file names another file."
        )
    write_file(path, nest(values))
    print(f"Configuration saved in {path}")
    return 0


def _update(argv: list[str]) -> int:
    """``accel config update``."""
    parser = _parser(
        "update", "Write a file's old keys as they are called today, and add the keys that it lacks; its values stay."
    )
    options = parse_options(argv, parser)
    named = _named(options)
    source = named or find_default()
    if source is None:
        raise ConfigurationError(
            f"there is no configuration file yet at {default_path()}. `accel config` or `accel config default` makes "
            "one."
        )
    target = named or default_path()
    for note in update_file(source, target):
        print(note)
    print(f"Configuration updated in {target}")
    return 0


def _show(argv: list[str]) -> int:
    """``accel config show``."""
    parser = _parser(
        "show",
        "Print every setting and where it comes from; options of accel launch may be given, to see what they change.",
    )
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="Print JSON.")
    for group in load_groups():
        group.add_to_parser(parser, leave_out=("config_file", "json"))
    options = parse_options(argv, parser)
    as_json = bool(options.pop("json", False))
    settings = load_settings(options)
    print(json.dumps(_as_mapping(settings), indent=2) if as_json else _as_table(settings))
    return 0


def _as_mapping(settings: Resolution) -> dict[str, Any]:
    return {
        "settings": {
            name: {
                "value": "(hidden)" if setting.option.secret and setting.value is not None else setting.value,
                "source": setting.source.value,
                "where": setting.where,
            }
            for name, setting in settings.settings.items()
        },
        "notes": list(settings.notes()),
    }


def _as_table(settings: Resolution) -> str:
    lines = []
    width = max(len(name) for name in settings.settings)
    for group in settings.groups:
        state = "" if settings.is_enabled(group) else " (not in use)"
        lines.append(f"{group.title}{state}")
        for opt in group.options():
            setting = settings.settings[opt.name]
            value = "-" if setting.value is None else opt.shown(setting.value)
            lines.append(f"  {opt.name:<{width}}  {value or '-':<20}  {setting.where}")
        lines.append("")
    return "\n".join([*lines, *(f"note: {note}" for note in settings.notes())]).rstrip()


PARTS: Mapping[str, Callable[[list[str]], int]] = {"default": _default, "update": _update, "show": _show}

COMMAND = Command("answer questions, or write, update and show a configuration file", run)
