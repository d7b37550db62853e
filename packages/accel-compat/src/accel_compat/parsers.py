"""The functions of the reference's commands: the parser of each, and what runs the command that was parsed."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from accel_launch.command import COMMANDS

__all__ = [
    "config_command", "config_command_parser", "default_command_parser", "default_config_command", "env_command",
    "env_command_parser", "estimate_command", "estimate_command_parser", "get_config_parser", "merge_command",
    "merge_command_parser", "test_command", "test_command_parser", "to_fsdp2_command", "to_fsdp2_command_parser",
    "tpu_command_launcher", "tpu_command_parser", "update_command_parser", "update_config_command",
]  # fmt: skip

_ARGUMENTS = "accel_arguments"


def _parser(subparsers: Any, name: str, module: str, function: str, command: Any, *action: str) -> Any:
    """Return a parser of accel that remembers what it parses, which its command then runs with.

    Args:
        subparsers: what ``add_subparsers()`` of another parser has returned; the command is added to it. Or None.
        name: the name under which it is added.
        module: where accel builds the parser.
        function: the function there; ``action`` are its arguments.
        command: what the parsed arguments have as ``func``.
    """
    parser: argparse.ArgumentParser = getattr(importlib.import_module(module), function)(*action)
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


def _run(args: argparse.Namespace, command: str, *words: str) -> None:
    """Run a command of accel with the arguments that were parsed; those of this process if none were given."""
    import sys

    given = getattr(args, _ARGUMENTS, None)
    code = COMMANDS.load(command).run([*words, *(sys.argv[1:] if given is None else given)])
    if code:
        raise SystemExit(code)


def config_command(args: argparse.Namespace) -> None:
    """Run ``accel config``."""
    _run(args, "config")


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of ``accel config``."""
    return _parser(subparsers, "config", "accel_launch.commands.config", "build_parser", config_command)


get_config_parser = config_command_parser


def default_config_command(args: argparse.Namespace) -> None:
    """Run ``accel config default``."""
    _run(args, "config", "default")


def default_command_parser(subparsers: Any = None, parents: Any = None) -> argparse.ArgumentParser:
    """Return the parser of ``accel config default``."""
    module = "accel_launch.commands.config"
    return _parser(subparsers, "default", module, "build_parser", default_config_command, "default")


def update_config_command(args: argparse.Namespace) -> None:
    """Run ``accel config update``."""
    _run(args, "config", "update")


def update_command_parser(subparsers: Any = None, parents: Any = None) -> argparse.ArgumentParser:
    """Return the parser of ``accel config update``."""
    return _parser(
        subparsers, "update", "accel_launch.commands.config", "build_parser", update_config_command, "update"
    )


def env_command(args: argparse.Namespace) -> None:
    """Run ``accel env``."""
    _run(args, "env")


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of ``accel env``."""
    return _parser(subparsers, "env", "accel_launch.commands.env", "build_parser", env_command)


def estimate_command(args: argparse.Namespace) -> None:
    """Run ``accel estimate-memory``."""
    _run(args, "estimate-memory")


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of ``accel estimate-memory``."""
    return _parser(subparsers, "estimate-memory", "accel_bigmodel.estimate.command", "parser", estimate_command)


def merge_command(args: argparse.Namespace) -> None:
    """Run ``accel merge-weights``."""
    _run(args, "merge-weights")


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of ``accel merge-weights``."""
    return _parser(subparsers, "merge-weights", "accel.commands.merge_weights", "build_parser", merge_command)


def test_command(args: argparse.Namespace) -> None:
    """Run ``accel test``."""
    _run(args, "test")


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028
    """Return the parser of ``accel test``."""
    return _parser(subparsers, "test", "accel.self_test.command", "build_parser", test_command)


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Run ``accel to-fsdp2``."""
    _run(args, "to-fsdp2")


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of ``accel to-fsdp2``."""
    return _parser(subparsers, "to-fsdp2", "accel.commands.to_fsdp2", "build_parser", to_fsdp2_command)


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run ``accel tpu-config``."""
    _run(args, "tpu-config")


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of ``accel tpu-config``."""
    return _parser(subparsers, "tpu-config", "accel_launch.commands.tpu_config", "build_parser", tpu_command_launcher)
