"""Runs one rank's script as Python would, and reports a failure to the launcher.

Started through start_worker.py, as ``python start_worker.py MODE LAUNCHER_PID TARGET ARGUMENT...``, in the script's
environment, so it uses the standard library only. The report, failure.json next to torch's error file, tells the
launcher which rank failed first, and with which traceback.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False  # each import here takes every rank longer than all the rest of this file
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import NoReturn

RELAY_VARIABLE = "ACCEL_LAUNCH_RELAY"
"""Set by a launcher that reads failures from the stderr of the ranks; see :mod:`accel_launch.external_launcher`."""

FAILURE_MARK = "\x1eaccel-launch-failure "
"""Prefix of a line on stderr that reports a failure to that launcher."""

MAX_TRACEBACK = 2600

ENCODED = "encoded"
"""Stands for the launcher's pid if the arguments are encoded in one word, to protect them from shells on the way."""


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
    # The first entry is this file's directory; Python has the script's there, or with -m the current directory. With -I
    # and -P it has neither; Python 3.10 sets no safe_path.
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = os.getcwd() if mode == "module" else os.path.dirname(os.path.realpath(target))
    try:
        (run_module if mode == "module" else run_script)(target)
    except SystemExit as error:
        if error.code not in (None, 0):
            exit_code = error.code if isinstance(error.code, int) else 1
            write_report(error, exit_code, with_traceback=False)
            if has_process_group():
                sys.last_value = error  # as after other errors: what runs at exit does not wait for other ranks
                if not isinstance(error.code, int):
                    print(error.code, file=sys.stderr)
                exit_without_teardown(exit_code)
        else:
            end()
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        error.__traceback__ = strip_own_frames(error.__traceback__)
        write_report(error, 1, with_traceback=True)
        introduce_traceback()
        sys.last_value = error
        first = first_with_this_error()
        if first is None:
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            run_hook_silently(error)
            print(f"[rank{os.environ.get('RANK')}]: the same error as on rank {first}", file=sys.stderr)
        if has_process_group():
            exit_without_teardown(1)
        sys.exit(1)
    else:
        end()


def decode(word: str) -> list[str]:
    """Return the arguments in a word made by :func:`encode`."""
    import base64
    import json

    args: list[str] = json.loads(base64.urlsafe_b64decode(word))
    return args


def encode(args: Sequence[str]) -> str:
    """Arguments as one word of letters, digits, - and _, which no shell changes."""
    import base64
    import json

    # Padded with spaces, which JSON allows, instead of = signs.
    text = json.dumps(list(args))
    return base64.urlsafe_b64encode((text + " " * (-len(text) % 3)).encode()).decode()


def print_by_line() -> None:
    """Flush stdout after each line: blocks would arrive late, and unbuffered writes of two ranks mix within a line."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def die_with_launcher(launcher_pid: int) -> None:
    """Have the kernel send SIGTERM when the launcher dies without forwarding a signal (SIGKILL, out of memory)."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig, sigterm = 1, 15  # in place of signal.SIGTERM: importing the module takes longer than the call
    _prctl(pr_set_pdeathsig, sigterm)
    if os.getppid() != launcher_pid:
        os.kill(os.getpid(), sigterm)


def _prctl(option: int, value: int) -> None:
    """Make the system call of this name."""
    try:
        # The module below ctypes, whose own import takes longer than the rest of a rank's start.
        import _ctypes

        function = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]  # None: what is loaded
        call = _ctypes.call_function
    except AttributeError:
        import ctypes

        ctypes.CDLL(None).prctl(option, value)
    else:
        call(function, (option, value))


def execute(target: str, args: list[str]) -> None:
    """Become an executable."""
    import signal

    # Python ignores these; other programs expect to be ended by them.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execv(target, [target, *args])
    except OSError as error:
        write_report(error, 126, with_traceback=False)
        sys.exit(f"{target} cannot be started: {error.strerror}")


def run_script(path: str) -> None:
    """Run a file like ``python file``: in the module ``__main__``, where pickle and spawn find its definitions."""
    if os.path.isdir(path) or (not path.endswith((".py", ".pyw")) and _is_zip(path)):
        import runpy

        sys.path[0] = path
        runpy.run_path(path, run_name="__main__")
        return
    import io

    path = os.path.abspath(path)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    # A new module: the functions of this one are needed after the script has ended.
    main_module = type(sys)("__main__")
    main_module.__dict__.update(
        __file__=path,
        __builtins__=__builtins__,
        __cached__=None,
        __loader__=SOURCE_LOADER("__main__", path),
        __annotations__={},
    )
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)


def _is_zip(path: str) -> bool:
    import zipfile

    return zipfile.is_zipfile(path)


def run_module(name: str) -> None:
    """Run a module like ``python -m name``."""
    import runpy

    runpy.run_module(name, run_name="__main__", alter_sys=True)


def show_interrupt(interrupt: KeyboardInterrupt) -> None:
    """Print where the first rank of this machine was interrupted; the other ranks were interrupted with it."""
    # A collective may have failed because another rank was interrupted first.
    interrupt.__context__ = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        interrupt.__traceback__ = strip_own_frames(interrupt.__traceback__)
        sys.excepthook(type(interrupt), interrupt, interrupt.__traceback__)
    sys.excepthook = lambda *_: None


def has_process_group() -> bool:
    """Return True if the script has left its process group open."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def exit_without_teardown(exit_code: int) -> NoReturn:
    """End the process as Python would, up to the teardown of the interpreter.

    During the teardown, a thread of the process group that needs the GIL, to release a tensor, aborts the process: exit
    code 134 instead of the script's.
    """
    import contextlib
    import gc
    import io
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joins threads; ends thread pools
        atexit._run_exitfuncs()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    # Files that the script did not close would lose their last lines. type(): __class__ may run code of a proxy.
    for item in gc.get_objects():
        if issubclass(type(item), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(Exception):  # closed, or its device is full
                item.flush()
    os._exit(exit_code & 0xFF)


def strip_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the script's first frame on; None for a syntax error in the script."""
    own = (OWN_FILE, "runpy.py", "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename.endswith(own):
        traceback = traceback.tb_next
    return traceback


def end() -> None:
    """Report that the script has ended without an error; with its process group open, end the process, too."""
    note_end()
    if has_process_group():
        exit_without_teardown(0)


def note_end() -> None:
    """Tell the launcher that the script has ended without an error: Python's teardown may take longer than others do
    to fail in a collective with this rank.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        # Without json, whose import takes longer than most of what this file does.
        write_file(os.path.join(os.path.dirname(error_file), "ended.json"), f'{{"pid": {os.getpid()}}}')


def write_report(error: BaseException, exit_code: int, *, with_traceback: bool) -> None:
    """Report to the launcher: in failure.json next to torch's error file, or on stderr if no files are shared."""
    import json
    import time
    import traceback

    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file and not RELAYED:
        return
    lines = traceback.format_exception(type(error), error, error.__traceback__) if with_traceback else []
    report: dict[str, object] = {
        "time_ns": time.time_ns(),
        "rank": int(os.environ.get("RANK", "0")),
        "pid": os.getpid(),
        "exit_code": exit_code & 0xFF,
        "traceback": "".join(lines),
    }
    if error_file:
        report["stderr"] = stderr_identity()
        write_file(os.path.join(os.path.dirname(error_file), "failure.json"), json.dumps(report))
        return
    local_rank, world_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    write_line({**report, "local_rank": local_rank, "world_size": world_size})


def stderr_identity() -> list[int]:
    """Return the device and inode of this process's stderr, which ranks on one screen share; empty if it is closed."""
    try:
        status = os.fstat(2)
    except OSError:
        return []
    return [status.st_dev, status.st_ino]


def first_with_this_error() -> int | None:
    """Return the rank of this machine that reported the same traceback before and shows it on the same screen."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return None
    import glob
    import json

    here = os.path.dirname(error_file)
    reports = []
    for path in glob.glob(os.path.join(glob.escape(os.path.dirname(here)), "*", "failure.json")):
        try:
            with open(path, encoding="utf-8") as file:
                report = json.load(file)
        except (OSError, ValueError):
            continue
        reports.append((report["time_ns"], report["rank"], report["pid"], report["traceback"], report["stderr"]))
    own = [report for report in reports if report[2] == os.getpid()]
    if not own or not own[0][4]:
        return None
    alike = [report for report in reports if report[3:] == own[0][3:] and report < own[0]]
    return min(alike)[1] if alike else None


def run_hook_silently(error: BaseException) -> None:
    """Run the hook for exceptions without its output: a tracker's marks the run as failed."""
    import contextlib
    import io

    with contextlib.redirect_stderr(io.StringIO()):
        sys.excepthook(type(error), error, error.__traceback__)


def write_file(path: str, report: str) -> None:
    """Write a report atomically: the launcher may read it at any time."""
    try:
        with open(path + ".tmp", "w", encoding="utf-8", errors="replace") as file:
            file.write(report)
        os.replace(path + ".tmp", path)
    except OSError as problem:
        # A full disk must not hide the error that is being reported.
        print(f"accel launch: the failure report {path} cannot be written: {problem}", file=sys.stderr)


def write_line(report: dict[str, object]) -> None:
    """Write a report to stderr as one marked line."""
    import json
    import socket

    # Writes to a pipe are atomic up to 4096 bytes; the end of a traceback says more than its beginning.
    text = str(report["traceback"])
    if len(text) > MAX_TRACEBACK:
        text = "Traceback (its beginning is left out):\n  ..." + text[-MAX_TRACEBACK:]
    line = FAILURE_MARK + json.dumps({"host": socket.gethostname(), **report, "traceback": text}) + "\n"
    sys.stderr.flush()
    os.write(2, line.encode())


def introduce_traceback() -> None:
    """Print the rank before its traceback, if no launcher of this package will (ranks of plain mpirun or srun)."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE") or RELAYED or "RANK" not in os.environ:
        return
    import socket

    where = f"local rank {os.environ.get('LOCAL_RANK', '0')} on {socket.gethostname()}, pid {os.getpid()}"
    rank, world_size = os.environ["RANK"], os.environ.get("WORLD_SIZE", "1")
    print(f"accel launch: rank {rank} of {world_size} failed ({where}):", file=sys.stderr)


# Removed from the environment: processes that the script starts are not ranks.
RELAYED = bool(__name__ == "__main__" and os.environ.pop(RELAY_VARIABLE, ""))

# importlib.machinery.SourceFileLoader, without an import of the module.
SOURCE_LOADER = type(globals()["__loader__"])

OWN_FILE = os.path.abspath(__file__)

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt as interrupt:
        show_interrupt(interrupt)
        raise
