"""The command ``accel``: finds a subcommand in the registry and hands it the rest of the command line. Torch-free."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence

from accel_state.errors import ConfigurationError, MissingDependencyError

from .commands.registry import COMMANDS
from .suggestions import suggest

PROGRAM = "accel"
USAGE_ERROR = 2
INTERRUPTED = 130


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
        return _guarded(PROGRAM, _print_help)
    if name in ("-V", "--version"):
        print(f"accel-launch {version()}")
        return 0
    if name not in COMMANDS:
        return fail(PROGRAM, f"{name!r} is not a command.{suggest(name, COMMANDS.names())} `accel --help` lists them.")
    code = run_command(name, arguments)
    return _leave(code) if name == "launch" and argv is None else code


def launch_main(argv: Sequence[str] | None = None) -> int:
    """Run ``accel-launch``, which is ``accel launch``."""
    code = run_command("launch", list(sys.argv[1:] if argv is None else argv))
    return _leave(code) if argv is None else code


def config_main(argv: Sequence[str] | None = None) -> int:
    """Run ``accel-config``, which is ``accel config``."""
    return run_command("config", list(sys.argv[1:] if argv is None else argv))


def env_main(argv: Sequence[str] | None = None) -> int:
    """Run ``accel-env``, which is ``accel env``."""
    return run_command("env", list(sys.argv[1:] if argv is None else argv))


def run_command(name: str, arguments: list[str]) -> int:
    """Run one subcommand; a wrong option, variable or file becomes one line on stderr and the exit code 2."""
    return _guarded(f"{PROGRAM} {name}", lambda: COMMANDS.load(name).run(arguments))


def _leave(code: int) -> int:
    """End this process after a launch, without taking torch apart piece by piece: that is a quarter of the time of a
    short one.
    """
    if "torch" in sys.modules:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


def _guarded(program: str, action: Callable[[], int]) -> int:
    _accept_any_text()
    try:
        code = action()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except (ConfigurationError, MissingDependencyError) as error:
        return fail(program, str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        _drop_output()
        return fail(program, f"{error.filename or 'output'}: {error.strerror or error}.")


def _accept_any_text() -> None:
    """Show what the terminal has no letters for as numbers, and read bytes that are no text, rather than end over
    either.
    """
    for stream, how in ((sys.stdout, "backslashreplace"), (sys.stdin, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=how)


def _drop_output() -> None:
    """What cannot be written (the reader has left, as in `accel env | head`, or the disk is full) must not fail again
    at the end.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(program: str, message: str) -> int:
    """Print one line to stderr, and return the exit code of a usage error."""
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE_ERROR


def version() -> str:
    """The version of this distribution."""
    import accel_launch

    return str(vars(accel_launch)["__version__"])


def _print_help() -> int:
    print(help_text())
    return 0


def help_text() -> str:
    """What ``accel --help`` prints: every command, also those of other packages."""
    names = COMMANDS.names()
    width = max(len(name) for name in names)
    lines = "\n".join(f"  {name:<{width}}  {_summary(name)}" for name in names)
    return (
        f"usage: {PROGRAM} COMMAND [options]\n\nStart PyTorch scripts on one or many processes, on one or many "
        "machines.\n\n"
        f"commands:\n{lines}\n\n"
        "options:\n  -h, --help     show this text, or with a command its options\n  -V, --version  show the version\n"
    )


def _summary(name: str) -> str:
    # A broken command of some other package must not take the help of all the others with it.
    try:
        return COMMANDS.load(name).summary
    except Exception as error:
        return f"(cannot be loaded: {error})"
