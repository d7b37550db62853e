"""One rank of :func:`accel_state.testing.run_world`: what runs in the forked process."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import io
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

# A signal that no test is likely to use for itself. macOS has no real-time signals.
DUMP_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGUSR2)


class Descriptor:
    """A file descriptor that is handed to another process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, state: Any) -> None:
        self.number = state.detach()


@dataclass(frozen=True)
class Job:
    """A function and its arguments, in a form that another process can find and unpack.

    Attributes:
        module: name of the function's module.
        file: of the module, or None where it has none.
        qualname: of the function in its module.
        arguments: pickled; unpacked only when the module is loaded, since they may use its classes.
        start_state: bring PartialState up first.
    """

    module: str
    file: str | None
    qualname: str
    arguments: bytes
    start_state: bool

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...], start_state: bool) -> Job:
        """Describe a call.

        Raises:
            ConfigurationError: the function is not at the top of a module, so no other process can find it.
        """
        module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
        if module is None or "<" in qualname or _resolve(sys.modules.get(module), qualname) is not fn:
            raise ConfigurationError(
                f"{fn!r} cannot run in another process: give a function defined at the top of a module"
            )
        file = getattr(sys.modules[module], "__file__", None)
        # Where the file is a script, multiprocessing loads it in the rank under this name.
        name = "__mp_main__" if module == "__main__" else module
        return cls(name, os.path.abspath(file) if file else None, qualname, pickle.dumps(args), start_state)

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function and its arguments, in the process that shall call it."""
        module = sys.modules.get(self.module) or self._import()
        return _resolve(module, self.qualname), pickle.loads(self.arguments)

    def _import(self) -> Any:
        if self.file is None:
            return importlib.import_module(self.module)
        # By its file and not by its name: pytest's importlib mode gives test modules names that cannot be imported, and
        # two # packages may both have a test_state. Classes of the module still pickle by the name that the caller
        # knows them by.
        spec = importlib.util.spec_from_file_location(self.module, self.file)
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
    job: Job,
    environment: dict[str, str],
    results: Connection,
    go: Connection,
    dump: Descriptor,
    stdout: Descriptor,
    stderr: Descriptor,
) -> None:
    """Run the job, send what came of it, and leave without the interpreter's own exit.

    gloo's threads race with the interpreter's shutdown and abort the process now and then; nothing is left to do there
    anyway.
    """
    code = 1
    try:
        _prepare(environment, dump, stdout, stderr)
        code = _run(job, results, go)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepare(environment: dict[str, str], dump: Descriptor, stdout: Descriptor, stderr: Descriptor) -> None:
    # A group of its own, so that the caller can also kill what this rank starts.
    os.setpgid(0, 0)
    os.dup2(stdout.number, 1)
    os.dup2(stderr.number, 2)
    # One write a line, so that the lines of several ranks do not mix.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    os.environ.clear()
    os.environ.update(environment)
    # Keeps a reference to the file, which stays open for the life of the process.
    faulthandler.register(DUMP_SIGNAL, file=dump.number, all_threads=True)
    threading.Thread(target=_leave_with_parent, name="parent-watch", daemon=True).start()
    import torch

    torch.set_num_threads(1)
    # What the server has imported lives as long as the rank: collections need not look at it, nor copy the pages it is
    # on.
    gc.freeze()


def _leave_with_parent() -> None:
    """Kill this rank and what it started as soon as the process that called run_world is gone."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


def _run(job: Job, results: Connection, go: Connection) -> int:
    try:
        value = pickle.dumps(_call(job))
    except BaseException as error:
        # Everything: a test that ends by SystemExit or KeyboardInterrupt has failed as well.
        results.send_bytes(pickle.dumps(("traceback", _format(error))))
        return 1
    results.send_bytes(pickle.dumps(("result", value)))
    _wait_until_all_have_finished(go)
    _destroy_process_group()
    return 0


def _call(job: Job) -> Any:
    fn, args = job.load()
    if job.start_state:
        from .state import PartialState

        PartialState(cpu=True)
    return fn(*args)


def _wait_until_all_have_finished(go: Connection) -> None:
    # Rank 0 serves the store that the others may still use, and a closed connection would fail a collective in
    # progress.
    try:
        go.recv_bytes()
    except EOFError:
        os._exit(1)


def _destroy_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        # Models that DDP wrapped hold the group, and are often part of a reference cycle.
        gc.collect()
        dist.destroy_process_group()


def _format(error: BaseException) -> str:
    """The traceback, without the frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def is_whole_dump(text: str) -> bool:
    """Whether a report of faulthandler has come to its end: to the outermost frame of the main thread, which is its
    last.
    """
    last = text.rstrip("\n").rpartition("\n")[2]
    return text.endswith("\n") and (last.endswith(" in <module>") or last.strip() == "...")


def readable_dump(text: str) -> str:
    """A report of faulthandler without the threads and frames that belong to this machinery."""
    threads = [thread.strip("\n") for thread in re.split(r"\n(?=(?:Current t|T)hread 0x)", text)]
    shown = [kept for thread in threads if "_leave_with_parent" not in thread if (kept := _user_frames(thread))]
    return "\n\n".join(shown)


def _user_frames(thread: str) -> str:
    lines = [line for line in thread.splitlines() if line.startswith("  File ")]
    own = next((index for index, line in enumerate(lines) if f'"{__file__}"' in line), len(lines))
    return "\n".join(lines[:own] or lines[:1])
