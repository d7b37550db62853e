"""Runs one rank's script as Python itself would, and leaves a report if it fails.

Started by path, as ``python worker.py MODE LAUNCHER_PID TARGET ARGUMENT...``, in whatever environment the script has:
so it uses the standard library alone. The report (failure.json beside torch's error file) lets the launcher say which
rank failed first, and show its traceback last, whether or not the script knows of any launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import ModuleType, TracebackType

RELAY_VARIABLE = "ACCEL_LAUNCH_RELAY"
"""Set by a launcher that gathers what failed from the stderr of all ranks; see :mod:`accel_launch.external_launcher`.
"""

FAILURE_MARK = "\x1eaccel-launch-failure "
"""Begins the line on stderr that tells that launcher of a failure."""

LONGEST_TRACEBACK = 2600

ENCODED = "encoded"
"""Stands for the launcher's pid where the arguments come as one word: a shell on the way would take empty ones and
quotes apart.
"""


def main() -> None:
    """Run the target named on the command line."""
    mode, launcher_pid, target, *args = sys.argv[1:]
    if launcher_pid == ENCODED:
        args = decode(args[0])
    else:
        die_with_launcher(int(launcher_pid))
    sys.argv = [target, *args]
    if mode == "executable":
        execute(target, args)
    print_by_line()
    # Python put the folder of this file first, where python script.py has the script's folder and python -m the current
    # one.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if mode == "module" else os.path.dirname(os.path.realpath(target))
    try:
        (run_module if mode == "module" else run_script)(target)
    except SystemExit as error:
        if error.code not in (None, 0):
            write_report(error, error.code if isinstance(error.code, int) else 1, with_traceback=False)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        error.__traceback__ = strip_own_frames(error.__traceback__)
        write_report(error, 1, with_traceback=True)
        introduce_traceback()
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def decode(word: str) -> list[str]:
    """The arguments in a word made by :func:`encode`."""
    import base64
    import json

    words: list[str] = json.loads(base64.urlsafe_b64decode(word))
    return words


def encode(args: Sequence[str]) -> str:
    """Arguments as one word of letters, digits, - and _, which no shell changes."""
    import base64
    import json

    # Padded with spaces, which JSON allows, rather than with = signs.
    text = json.dumps(list(args))
    return base64.urlsafe_b64encode((text + " " * (-len(text) % 3)).encode()).decode()


def print_by_line() -> None:
    """Hand over what the script prints at the end of each line, also through a pipe.

    In blocks it would come long after the fact; unbuffered, a line is several writes, and those of two ranks mix.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def die_with_launcher(launcher_pid: int) -> None:
    """Ask the kernel for a SIGTERM when the launcher dies in a way that it cannot pass on (kill -9, out of memory)."""
    if sys.platform != "linux":
        return
    import ctypes
    import signal

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != launcher_pid:
        os.kill(os.getpid(), signal.SIGTERM)


def execute(target: str, args: list[str]) -> None:
    """Become an executable that is not Python."""
    import signal

    # Python ignores these for itself; what is not Python expects to be ended by them.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execv(target, [target, *args])
    except OSError as error:
        write_report(error, 126, with_traceback=False)
        sys.exit(f"{target} cannot be started: {error.strerror}")


def run_script(path: str) -> None:
    """Run a file as ``python file`` does: in the module ``__main__``, so that what it defines can be pickled and found
    by spawn.
    """
    import runpy

    if os.path.isdir(path) or (not path.endswith((".py", ".pyw")) and is_zip(path)):
        sys.path[0] = path
        runpy.run_path(path, run_name="__main__")
        return
    import io
    from importlib.machinery import SourceFileLoader

    path = os.path.abspath(path)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    # A module of its own: this one's functions are still needed when the script has ended.
    main_module = ModuleType("__main__")
    main_module.__dict__.update(
        __file__=path,
        __builtins__=__builtins__,
        __cached__=None,
        __loader__=SourceFileLoader("__main__", path),
        __annotations__={},
    )
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)


def run_module(name: str) -> None:
    """Run a module as ``python -m name`` does."""
    import runpy

    runpy.run_module(name, run_name="__main__", alter_sys=True)


def is_zip(path: str) -> bool:
    """Whether Python would run the file as an archive with a ``__main__.py``."""
    import zipfile

    return zipfile.is_zipfile(path)


def strip_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on."""
    own = (OWN_FILE, "runpy.py", "<frozen runpy>")
    frame = traceback
    while frame is not None and frame.tb_frame.f_code.co_filename.endswith(own):
        frame = frame.tb_next
    # Without any frame of the script (a syntax error in it), the traceback says all it can by itself.
    return frame


def write_report(error: BaseException, exit_code: int, *, with_traceback: bool) -> None:
    """Tell the launcher: in failure.json beside torch's error file, or on stderr where the ranks share no files with
    it.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        write_file(
            os.path.join(os.path.dirname(error_file), "failure.json"),
            describe_failure(error, exit_code, with_traceback),
        )
    elif RELAYED:
        report = describe_failure(error, exit_code, with_traceback)
        places = {
            "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        }
        write_line({**report, **places})


def describe_failure(error: BaseException, exit_code: int, with_traceback: bool) -> dict[str, object]:
    """What the launcher is told of a failure."""
    import time
    import traceback

    return {
        "time_ns": time.time_ns(),
        "rank": int(os.environ.get("RANK", "0")),
        "pid": os.getpid(),
        "exit_code": exit_code & 0xFF,
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if with_traceback
        else "",
    }


def write_file(path: str, report: dict[str, object]) -> None:
    """Write a report under a temporary name first, since the launcher may read at any time."""
    import json

    try:
        with open(path + ".tmp", "w", encoding="utf-8", errors="replace") as file:
            json.dump(report, file)
        os.replace(path + ".tmp", path)
    except OSError as problem:
        # A full or vanished disk must not hide the error that is being reported.
        print(f"accel launch: no report could be written to {path}: {problem}", file=sys.stderr)


def write_line(report: dict[str, object]) -> None:
    """Write a report as one marked line, for a launcher that reads the stderr of all ranks."""
    import json
    import socket

    # A pipe keeps a line together only up to 4096 bytes; an error's end says more than its beginning.
    text = str(report["traceback"])
    shortened = (
        text
        if len(text) <= LONGEST_TRACEBACK
        else "Traceback (its beginning is left out):\n  ..." + text[-LONGEST_TRACEBACK:]
    )
    line = FAILURE_MARK + json.dumps({"host": socket.gethostname(), **report, "traceback": shortened}) + "\n"
    sys.stderr.flush()
    os.write(2, line.encode())


def introduce_traceback() -> None:
    """Say whose traceback follows, where no launcher will: each rank was started by somebody else's (mpirun, srun)."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE") or RELAYED or "RANK" not in os.environ:
        return
    import socket

    place = f"local rank {os.environ.get('LOCAL_RANK', '0')} on {socket.gethostname()}, pid {os.getpid()}"
    print(
        f"accel launch: rank {os.environ['RANK']} of {os.environ.get('WORLD_SIZE', '1')} failed ({place}):",
        file=sys.stderr,
    )


# Taken out of the environment: what the script starts is not what the launcher waits for.
RELAYED = bool(__name__ == "__main__" and os.environ.pop(RELAY_VARIABLE, ""))

OWN_FILE = os.path.abspath(__file__)

if __name__ == "__main__":
    main()
