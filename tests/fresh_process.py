"""Runs code as ``python -c`` does, each time in a new process that has imported torch and nothing of the code.

A process is forked from a server that has imported torch, which takes longer than most of what tests of other libraries
do there. The server imports none of these: they set variables, patch others, and keep threads. Unlike a worker of
multiprocessing, a process ends as any interpreter does: it joins its threads, and runs what is registered for the end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any


class Processes:
    """The server; a context manager that ends it.

    Args:
        *modules: what the server imports.
    """

    def __init__(self, *modules: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *modules]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.communicate()  # the end of its input ends it

    def run(
        self, code: str, *words: str, cwd: Path, env: Mapping[str, str], timeout: int
    ) -> subprocess.CompletedProcess[str]:
        """Run code with words as arguments; after ``timeout`` seconds the process is killed by SIGALRM."""
        assert self._server.stdin is not None and self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder, name) for name in ("stdout", "stderr")]
            job = {"code": code, "words": words, "cwd": str(cwd), "env": dict(env), "seconds": timeout}
            self._server.stdin.write(json.dumps({**job, "streams": list(map(str, streams))}) + "\n")
            self._server.stdin.flush()
            status = json.loads(self._server.stdout.readline())
            printed = [stream.read_text(encoding="utf-8") for stream in streams]
        return subprocess.CompletedProcess(["python", "-c", code, *words], status, *printed)


def serve() -> dict[str, Any] | None:
    """Fork for each job, and return it in the new process; None where there are no more."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            job: dict[str, Any] = json.loads(line)
            return job
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def become(job: dict[str, Any]) -> None:
    """Make this process one that was started for the job, and run its code."""
    signal.alarm(job["seconds"])
    for number, path in enumerate((os.devnull, *job["streams"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.argv, sys.path[0] = ["-c", *job["words"]], ""
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(job["code"], "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # what is imported here is not looked at again by each process
    if (given := serve()) is not None:
        become(given)
