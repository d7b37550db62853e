"""One rank of :func:`accel_state.testing.run_world`: the code that runs in the forked process."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process, reduction
from multiprocessing.connection import Connection, wait
from typing import Any

from .errors import ConfigurationError

# A signal that tests do not use. macOS has no real-time signals.
DUMP_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGUSR2)


class Descriptor:
    """A file descriptor that is duplicated when it is pickled for another process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, state: Any) -> None:
        self.number = state.detach()


@dataclass(frozen=True)
class RankJob:
    """A function (by module, file and name) and its pickled arguments, which another process can load."""

    module: str
    file: str | None
    qualname: str
    arguments: bytes
    start_state: bool

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...], start_state: bool) -> RankJob:
        """Describe a call; raises ConfigurationError unless the function is at module level."""
        module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
        if module is None or "<" in qualname or _resolve(sys.modules.get(module), qualname) is not fn:
            raise ConfigurationError(f"{fn!r} cannot run in another process: pass a module-level function")
        file = getattr(sys.modules[module], "__file__", None)
        # multiprocessing loads the main script in the rank under this name.
        name = "__mp_main__" if module == "__main__" else module
        return cls(name, os.path.abspath(file) if file else None, qualname, pickle.dumps(args), start_state)

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Load the function and its arguments."""
        module = sys.modules.get(self.module) or self._import()
        return _resolve(module, self.qualname), pickle.loads(self.arguments)

    def _import(self) -> Any:
        # By file: in pytest's importlib mode, names of test modules cannot be imported, and two packages may both have
        # a test_state. Classes of the module are still pickled by the caller's name for it.
        spec = importlib.util.spec_from_file_location(self.module, self.file) if self.file else None
        if spec is None or spec.loader is None:
            return importlib.import_module(self.module)
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return module


def _resolve(module: Any, qualname: str) -> Any:
    value = module
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value


def main(
    job: RankJob,
    environment: dict[str, str],
    results: Connection,
    go: Connection,
    dump: Descriptor,
    stdout: Descriptor,
    stderr: Descriptor,
) -> None:
    """Run the job, send its result, and exit without the interpreter's shutdown, which races with gloo's threads."""
    code = 1
    try:
        _prepare(environment, dump, stdout, stderr)
        code = _run(job, results, go)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepare(environment: dict[str, str], dump: Descriptor, stdout: Descriptor, stderr: Descriptor) -> None:
    os.setpgid(0, 0)  # a new group, so that the caller can also kill what this rank starts
    os.dup2(stdout.number, 1)
    os.dup2(stderr.number, 2)
    # One write per line, so that the lines of several ranks do not mix.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.register(DUMP_SIGNAL, file=dump.number, all_threads=True)
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    # The platform's default, as in a rank of the launcher, not the server: workers of loaders would import torch again.
    multiprocessing.set_start_method(None, force=True)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # garbage collections skip what the server imported, and do not copy its memory pages


def _exit_with_parent() -> None:
    """Kill this rank and what it started when the process that called run_world ends."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


def _run(job: RankJob, results: Connection, go: Connection) -> int:
    try:
        fn, args = job.load()
        if job.start_state:
            from .state import PartialState

            PartialState(cpu=True)
        value = pickle.dumps(fn(*args))
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures too
        results.send_bytes(pickle.dumps(("traceback", _format(error))))
        return 1
    results.send_bytes(pickle.dumps(("result", value)))
    try:
        # Rank 0 hosts the store, and a closed connection fails a collective in progress: wait for the other ranks.
        go.recv_bytes()
    except EOFError:
        os._exit(1)
    _destroy_process_group()
    return 0


def _destroy_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        gc.collect()  # models wrapped by DDP reference the group, often in a cycle
        dist.destroy_process_group()


def _format(error: BaseException) -> str:
    """Return the traceback, without the frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def is_complete_dump(text: str) -> bool:
    """Return True if a stack dump has ended, with the outermost frame of the main thread."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return text.endswith("\n") and (last.endswith(" in <module>") or last.strip() == "...")


def readable_dump(text: str) -> str:
    """Return a stack dump without the threads and frames of this module."""
    threads = [thread.strip("\n") for thread in re.split(r"\n(?=(?:Current t|T)hread 0x)", text)]
    shown = [_user_frames(thread) for thread in threads if "_exit_with_parent" not in thread]
    return "\n\n".join(filter(None, shown))


def _user_frames(thread: str) -> str:
    lines = [line for line in thread.splitlines() if line.startswith("  File ")]
    end = next((index for index, line in enumerate(lines) if f'"{__file__}"' in line), len(lines))
    return "\n".join(lines[:end] or lines[:1])
