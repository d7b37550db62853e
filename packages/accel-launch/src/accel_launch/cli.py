"""The command ``accel``: finds a subcommand and passes it the remaining arguments. Torch-free."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from accel_state.errors import ConfigurationError, MissingDependencyError

from .command import COMMANDS
from .errors import fail, suggest

PROGRAM = "accel"
INTERRUPTED = 130

# Commands of packages that may not be installed, and what to install for them.
_DISTRIBUTIONS = {
    "checkpoint": "accel-checkpoint",
    "estimate-memory": "accel-bigmodel",
    "goodput": "accel-monitor",
    "merge-weights": "accel",
    "monitor": "accel-monitor",
    "plan": "accel[plan]",
    "test": "accel",
    "to-fsdp2": "accel",
    "track": "accel-track",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``accel``.

    Args:
        argv: the arguments after the program's name; by default those of this process.

    Returns:
        The exit code: that of the launched script, or 2 for an error in the command line or in a configuration file.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments else "--help"
    if name in ("-h", "--help", "help"):
        return run_command("", [])
    if name in ("-V", "--version"):
        print(f"accel-launch {version()}")
        return 0
    if name not in COMMANDS:
        if name in _DISTRIBUTIONS:
            wanted = shlex.quote(_DISTRIBUTIONS[name])
            return fail(PROGRAM, f"the package of `accel {name}` is not installed here. Run: pip install {wanted}")
        return fail(PROGRAM, f"{name!r} is not a command.{suggest(name, COMMANDS.names())} `accel --help` lists them.")
    code = run_command(name, arguments)
    return _exit(code) if name == "launch" and argv is None else code


def launch_main(argv: Sequence[str] | None = None) -> int:
    """Run ``accel-launch``, short for ``accel launch``."""
    code = run_command("launch", list(sys.argv[1:] if argv is None else argv))
    return _exit(code) if argv is None else code


def config_main(argv: Sequence[str] | None = None) -> int:
    """Run ``accel-config``, short for ``accel config``."""
    return run_command("config", list(sys.argv[1:] if argv is None else argv))


def env_main(argv: Sequence[str] | None = None) -> int:
    """Run ``accel-env``, short for ``accel env``."""
    return run_command("env", list(sys.argv[1:] if argv is None else argv))


def run_command(name: str, arguments: list[str]) -> int:
    """Run one subcommand (empty: show the help); a configuration error becomes one line on stderr and exit code 2."""
    program = f"{PROGRAM} {name}".rstrip()
    # Characters that the terminal cannot show, and input that is not text, must not end the command.
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        code = COMMANDS.load(name).run(arguments) if name else _print_help()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except (ConfigurationError, MissingDependencyError) as error:
        return fail(program, str(error))
    except KeyboardInterrupt as error:
        print(f"\n{program}: interrupted{f': {error}' if str(error) else ''}.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        _discard_output()
        return fail(program, f"{error.filename or 'output'}: {error.strerror or error}.")


def _exit(code: int) -> int:
    """Exit after a launch without finalising torch, which would take a quarter of the time of a short launch."""
    if "torch" in sys.modules:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


def _discard_output() -> None:
    """Drop output that cannot be written (closed pipe, full disk), so that Python's exit does not fail on it again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def version() -> str:
    """Return the version of this distribution."""
    import accel_launch

    return str(vars(accel_launch)["__version__"])


def _print_help() -> int:
    """Print every installed command."""
    names = COMMANDS.names()
    width = max(len(name) for name in names)
    lines = "\n".join(f"  {name:<{width}}  {_summary(name)}" for name in names)
    print(
        f"usage: {PROGRAM} COMMAND [options]\n\n"
        "Start PyTorch scripts on one or many processes and machines.\n\n"
        f"commands:\n{lines}\n\n"
        "options:\n  -h, --help     show this help; `accel COMMAND --help` shows the options of a command\n"
        "  -V, --version  show the version\n"
    )
    return 0


def _summary(name: str) -> str:
    # A broken command of another package must not break the help.
    try:
        return COMMANDS.load(name).summary
    except Exception as error:
        return f"(cannot be loaded: {error})"
