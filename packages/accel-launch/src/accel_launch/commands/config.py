"""``accel config``: create, update and show configuration files."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel_state.command import Command
from accel_state.errors import ConfigurationError
from accel_state.options.config_file import default_path, find_default
from accel_state.options.registry import all_options, load_groups
from accel_state.options.resolution import Resolution, resolve
from accel_state.secrets import HIDDEN, hide, hide_in_text

from ..config.read import given_path, load_settings, read_config
from ..config.update import update_file
from ..config.write import basic_values, check_file_name, nest, write_file
from ..errors import suggest
from ..parser import ConfigParser, parse_options

USAGE = "accel config [default | update | show] [options]"
_DESCRIPTIONS = {
    "": "Create a configuration file by answering questions about this machine and the training.",
    "default": "Write a configuration file for all GPUs of this machine, or for its CPU.",
    "update": "Rename old keys of a configuration file and add missing ones; values stay the same.",
    "show": "Print every setting and its source. Options of accel launch show what they would change.",
}


def run(argv: list[str]) -> int:
    """Run ``accel config``.

    Raises:
        ConfigurationError: an error in the command line or in a file, or a file cannot be written.
    """
    if argv and not argv[0].startswith("-"):
        if argv[0] not in ACTIONS:
            raise ConfigurationError(
                f"{argv[0]!r} is not a subcommand of accel config.{suggest(argv[0], list(ACTIONS))} Usage: {USAGE}."
            )
        return ACTIONS[argv[0]](argv[1:])
    return _ask(argv)


def build_parser(action: str = "") -> ConfigParser:
    """Return the parser of ``accel config``, or of its subcommand ``action``: "default", "update" or "show"."""
    prog = f"accel config {action}".strip()
    parser = ConfigParser(prog=prog, description=_DESCRIPTIONS[action], allow_abbrev=False)
    text = (
        "Configuration file (.yaml, .yml or .json). Default: accel/default_config.yaml in $HF_HOME, in "
        "$XDG_CACHE_HOME/huggingface, or in ~/.cache/huggingface, whichever is set first."
    )
    parser.add_argument("--config_file", "--config-file", metavar="FILE", default=argparse.SUPPRESS, help=text)
    if action == "":
        parser.usage = USAGE
        parser.epilog = (
            "default: write a file without questions. update: bring a file up to date. show: print every setting."
        )
    elif action == "default":
        choices = all_options()["mixed_precision"].choices or ()
        parser.add_argument(
            "--mixed_precision",
            "--mixed-precision",
            metavar="{" + ",".join(choices) + "}",
            default="no",
            help="(default: no)",
        )
    elif action == "show":
        parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="Print JSON.")
        for group in load_groups():
            group.add_to_parser(parser, leave_out=("config_file", "json"))
    return parser


def _ask(argv: list[str]) -> int:
    """Run the questionnaire."""
    from ..questionnaire.flow import MenuPrompts, TextPrompts, ask_all, complete, is_terminal

    path = given_path(parse_options(argv, build_parser())) or default_path()
    check_file_name(path)
    prompts = MenuPrompts() if is_terminal() else TextPrompts()
    known = _known(path, prompts.confirm)
    while True:
        try:
            answers = ask_all(prompts.ask, known)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{path} was not written") from None
        try:
            content = nest(complete(answers, known))
            break
        except ConfigurationError as error:
            print(f"These answers contradict each other: {error}")
            if not prompts.confirm("Answer again, with your answers as defaults?"):
                raise
            known = {**known, **answers}
    write_file(path, content)
    print(f"Configuration saved in {path}")
    return 0


def _known(path: Path, confirm: Callable[[str], bool]) -> dict[str, Any]:
    """Values of the existing file, which become the defaults of the questions."""
    from ..questionnaire.flow import known_values

    existing = path if os.path.exists(path) else (find_default() if path == default_path() else None)
    if existing is None:
        return {}
    try:
        settings = resolve(load_groups(), {}, environ={}, config=read_config(existing))
    except ConfigurationError as error:
        print(f"The existing file cannot be used: {error}")
        if existing == path and not confirm("Replace it with a new one?"):
            raise
        return {}
    return known_values(settings)


def _default(argv: list[str]) -> int:
    """Run ``accel config default``."""
    options = parse_options(argv, build_parser("default"))
    path = given_path(options) or default_path()
    values = basic_values(options["mixed_precision"])
    if os.path.exists(path):
        raise ConfigurationError(
            f"{path} exists already. Update it with `accel config update`, or name another file with --config_file."
        )
    write_file(path, nest(values))
    print(f"Configuration saved in {path}")
    return 0


def _update(argv: list[str]) -> int:
    """Run ``accel config update``."""
    given = given_path(parse_options(argv, build_parser("update")))
    source = given or find_default()
    if source is None:
        raise ConfigurationError(
            f"there is no configuration file at {default_path()}. Create one with `accel config` or `accel config "
            "default`."
        )
    target = given or default_path()
    for note in update_file(source, target):
        print(note)
    print(f"Configuration updated in {target}")
    return 0


def _show(argv: list[str]) -> int:
    """Run ``accel config show``."""
    options = parse_options(argv, build_parser("show"))
    as_json = bool(options.pop("json", False))
    settings = load_settings(options)
    print(json.dumps(_as_mapping(settings), indent=2) if as_json else _as_table(settings))
    return 0


def _as_mapping(settings: Resolution) -> dict[str, Any]:
    shown = {}
    for name, setting in settings.settings.items():
        is_hidden = setting.option.secret and setting.value is not None
        value = HIDDEN if is_hidden else hide(name, setting.value)
        shown[name] = {"value": value, "source": setting.source.value, "where": hide_in_text(setting.where)}
    return {"settings": shown, "notes": list(settings.notes())}


def _as_table(settings: Resolution) -> str:
    lines = []
    width = max(len(name) for name in settings.settings)
    for group in settings.groups:
        lines.append(f"{group.title}{'' if settings.is_enabled(group) else ' (not in use)'}")
        for opt in group.options():
            setting = settings.settings[opt.name]
            value = "-" if setting.value is None else opt.shown(setting.value)
            value = hide(opt.name, value)
            lines.append(f"  {opt.name:<{width}}  {value or '-':<20}  {hide_in_text(setting.where)}")
        lines.append("")
    return "\n".join([*lines, *(f"note: {note}" for note in settings.notes())]).rstrip()


ACTIONS: Mapping[str, Callable[[list[str]], int]] = {"default": _default, "update": _update, "show": _show}

COMMAND = Command("create, update and show configuration files", run)
