"""``accel launch`` as a function."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accel_state.env import all_variables
from accel_state.errors import ConfigurationError
from accel_state.options.registry import all_options, load_groups
from accel_state.options.resolution import resolve

from .errors import USAGE_ERROR, ScriptFailedError
from .launch_plan import plan_from_args
from .parser import build_parser, parse

# Longer than the time that the launcher gives to its processes.
_END_SECONDS = 40


def launch(
    script: str | os.PathLike[str], args: Sequence[str] = (), *, env: Mapping[str, str] | None = None, **options: Any
) -> int:
    """Start a script as ``accel launch`` does, and wait for it.

    The launcher runs in a process of its own: it neither imports torch here nor changes this process's signal handlers.

    Args:
        script: path of the script; a module name with ``module=True``; an executable with ``no_python=True``.
        args: its arguments.
        env: the variables of the launcher and its processes; by default those of this process.
        **options: any option of ``accel launch``, by its name: ``num_processes=2, mixed_precision="bf16", cpu=True``.

    Returns:
        The exit code of ``accel launch``: 0, or that of the process that failed first (128 + N if signal N ended it),
        or 2 if the script cannot be started.

    Raises:
        ConfigurationError: an option does not exist, or its value is not allowed.
    """
    given = {name: value for name, value in options.items() if value is not None}
    settings = resolve(load_groups(), given, environ={})
    declared = all_options()
    # Command lines are visible to every user of the machine, so secrets go through the environment.
    secrets = {str(declared[name].env): str(settings[name]) for name in given if declared[name].secret}
    public = [declared[name] for name in given if not declared[name].secret]
    flags = [f"{opt.flags[0]}={opt.format(settings[opt.name])}" for opt in public]
    command = [sys.executable, "-m", "accel_launch", "launch", *flags, "--", os.fspath(script), *map(str, args)]
    process = subprocess.Popen(command, env={**(all_variables() if env is None else env), **secrets})
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # The launcher ends its processes first, so it is not killed at once.
        if sys.platform != "win32":  # a console there sends the interrupt to every process
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_SECONDS)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            process.kill()
        raise
    return 128 - code if code < 0 else code


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of ``accel launch`` with the script and its arguments, for :func:`launch_command`.

    Args:
        subparsers: what ``add_subparsers()`` of another parser has returned; the command "launch" is added to it.
    """
    parser = build_parser()
    if subparsers is not None:
        parser = subparsers.add_parser("launch", parents=[parser], conflict_handler="resolve", allow_abbrev=False)

    def parse_known_args(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        # argparse would take the script for the value of an option that may have one, as in `--cpu script.py`.
        try:
            command_line = parse(sys.argv[1:] if args is None else list(args))
        except ConfigurationError as error:
            parser.exit(USAGE_ERROR, f"{parser.prog}: error: {error}\n")  # a parser ends the program
        values = {**dict.fromkeys(all_options()), **command_line.options, "func": launch_command}
        namespace = namespace or argparse.Namespace()
        vars(namespace).update(values)
        namespace.training_script, namespace.training_script_args = command_line.script, command_line.script_args
        return namespace, []

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Start a script as ``accel launch`` does, and wait for it.

    Args:
        args: what the parser of :func:`launch_command_parser` has parsed; options that are None are not set.

    Raises:
        ConfigurationError: an option is not allowed.
        ScriptFailedError: the script failed.
    """
    plan_from_args(args)  # the launcher runs in another process: what it would refuse is raised here
    given = {name: value for name, value in vars(args).items() if name in all_options() and value is not None}
    code = launch(args.training_script, args.training_script_args, **given)
    if code:
        raise ScriptFailedError(code, args.training_script)
