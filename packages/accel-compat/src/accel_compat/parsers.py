"""The functions of the reference's commands: the parser of each, and what runs the command that was parsed."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any, Final

from accel_launch.command import COMMANDS

__all__ = [
    "config_command", "config_command_parser", "default_command_parser", "default_config_command", "env_command",
    "env_command_parser", "estimate_command", "estimate_command_parser", "get_config_parser", "merge_command",
    "merge_command_parser", "test_command", "test_command_parser", "to_fsdp2_command", "to_fsdp2_command_parser",
    "tpu_command_launcher", "tpu_command_parser", "update_command_parser", "update_config_command",
]  # fmt: skip

_ARGUMENTS = "accel_arguments"
_CONFIG = "accel_launch.commands.config"

Runs = Callable[[argparse.Namespace], None]
Parses = Callable[..., argparse.ArgumentParser]


def _runs(command: str, *words: str) -> Runs:
    """Return the function that runs a command of accel; ``words`` come before the arguments."""

    def run(args: argparse.Namespace) -> None:
        """Run the command with the arguments that were parsed; those of this process if none were given."""
        given = getattr(args, _ARGUMENTS, None)
        code = COMMANDS.load(command).run([*words, *(sys.argv[1:] if given is None else given)])
        if code:
            raise SystemExit(code)

    return run


def _parses(command: Runs, name: str, module: str, function: str = "build_parser", *words: str) -> Parses:
    """Return the function that returns a command's parser.

    Args:
        command: what the parsed arguments have as ``func``.
        name: the name under which it is added to another parser.
        module: where accel builds the parser.
        function: the function there; ``words`` are its arguments.
    """

    def parser_of(subparsers: Any = None, parents: Any = None) -> argparse.ArgumentParser:
        """Return the command's parser, which remembers what it parses, and what its command then runs with.

        Args:
            subparsers: what ``add_subparsers()`` of another parser has returned; the command is added to it. Or None.
            parents: accepted for compatibility.
        """
        parser: argparse.ArgumentParser = getattr(importlib.import_module(module), function)(*words)
        if subparsers is not None:
            parser = subparsers.add_parser(name, parents=[parser], conflict_handler="resolve", allow_abbrev=False)
        parse_known_args = parser.parse_known_args

        def remember(args: Any = None, namespace: Any = None) -> Any:
            parsed, unknown = parse_known_args(args, namespace)
            setattr(parsed, _ARGUMENTS, None if args is None else list(args))
            return parsed, unknown

        parser.parse_known_args = remember  # type: ignore[method-assign]
        parser.set_defaults(func=command)
        return parser

    return parser_of


config_command: Final = _runs("config")
config_command_parser: Final = _parses(config_command, "config", _CONFIG)
get_config_parser: Final = config_command_parser
default_config_command: Final = _runs("config", "default")
default_command_parser: Final = _parses(default_config_command, "default", _CONFIG, "build_parser", "default")
update_config_command: Final = _runs("config", "update")
update_command_parser: Final = _parses(update_config_command, "update", _CONFIG, "build_parser", "update")
env_command: Final = _runs("env")
env_command_parser: Final = _parses(env_command, "env", "accel_launch.commands.env")
estimate_command: Final = _runs("estimate-memory")
estimate_command_parser: Final = _parses(
    estimate_command, "estimate-memory", "accel_bigmodel.estimate.command", "parser"
)
merge_command: Final = _runs("merge-weights")
merge_command_parser: Final = _parses(merge_command, "merge-weights", "accel.commands.merge_weights")
test_command: Final = _runs("test")
test_command_parser: Final = _parses(test_command, "test", "accel.self_test.command")
to_fsdp2_command: Final = _runs("to-fsdp2")
to_fsdp2_command_parser: Final = _parses(to_fsdp2_command, "to-fsdp2", "accel.commands.to_fsdp2")
tpu_command_launcher: Final = _runs("tpu-config")
tpu_command_parser: Final = _parses(tpu_command_launcher, "tpu-config", "accel_launch.commands.tpu_config")
