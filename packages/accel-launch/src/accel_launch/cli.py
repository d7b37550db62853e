"""The command ``accel``: finds a subcommand in the registry and hands it the rest of the command line. Torch-free."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from accel_state.errors import ConfigurationError, MissingDependencyError

from .commands.registry import COMMANDS

PROGRAM = "accel"
USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``accel``.

    Args:
        argv: the arguments after the program's name; left out, those of this process.

    Returns:
        The exit code: that of the launched script, or 2 where the command line or a configuration file is wrong.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if name in ("-V", "--version"):
        print(f"accel-launch {version()}")
        return 0
    if name not in COMMANDS:
        return fail(PROGRAM, f"{name!r} is not a command.{suggest(name, COMMANDS.names())} `accel --help` lists them.")
    return run_command(name, arguments)


def launch_main(argv: Sequence[str] | None = None) -> int:
    """Run ``accel-launch``, which is ``accel launch``."""
    return run_command("launch", list(sys.argv[1:] if argv is None else argv))


def run_command(name: str, arguments: list[str]) -> int:
    """Run one subcommand; a wrong option, variable or file becomes one line on stderr and the exit code 2."""
    try:
        return COMMANDS.load(name).run(arguments)
    except (ConfigurationError, MissingDependencyError) as error:
        return fail(f"{PROGRAM} {name}", str(error))
    except KeyboardInterrupt:
        return 130


def fail(program: str, message: str) -> int:
    """Print one line to stderr, and return the exit code of a usage error."""
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE_ERROR


def suggest(name: str, known: Sequence[str]) -> str:
    """A question that offers the known name that is close, if there is one."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]}?" if close else ""


def version() -> str:
    """The version of this distribution."""
    import accel_launch

    return str(vars(accel_launch)["__version__"])


def help_text() -> str:
    """What ``accel --help`` prints: every command, also those of other packages."""
    names = COMMANDS.names()
    width = max(len(name) for name in names)
    lines = "\n".join(f"  {name:<{width}}  {_summary(name)}" for name in names)
    return (
        f"usage: {PROGRAM} COMMAND [options]\n\nStart PyTorch scripts on one or many processes, on one or many machines.\n\n"
        f"commands:\n{lines}\n\n"
        "options:\n  -h, --help     show this text, or with a command its options\n  -V, --version  show the version\n"
    )


def _summary(name: str) -> str:
    # A broken command of some other package must not take the help of all the others with it.
    try:
        return COMMANDS.load(name).summary
    except Exception as error:
        return f"(cannot be loaded: {error})"
