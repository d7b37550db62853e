"""Starts the processes that check a machine, or a cluster, together, and tells what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from ..interpreter import python_command
from .protocol import FINDINGS_MARK, STAGE_MARK, TIMEOUT_VARIABLE
from .result import Finding, fail, ok

_MODULE = "accel_launch.doctor.ranks"
_SHOWN_LINES = 12


def check_group(options: Sequence[str], environ: Mapping[str, str], seconds: float) -> Iterator[Finding]:
    """What processes started by ``accel launch OPTIONS`` find.

    Args:
        options: words of the command line.
        environ: variables of the launcher.
        seconds: how long they may take.
    """
    command = python_command("-m", "accel_launch", "launch", "--quiet", *options, "-m", _MODULE)
    variables = {**environ, TIMEOUT_VARIABLE: str(max(int(seconds), 1))}
    process = subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        output, errors = _end(process)
        yield fail("processes", f"did not end within {seconds:g} s: {_stages(output)}", _advice(options))
        return
    except BaseException:
        _end(process)
        raise
    found = [line.removeprefix(FINDINGS_MARK) for line in output.split("\n") if line.startswith(FINDINGS_MARK)]
    if not found:
        said = "\n        ".join(["", *errors.strip().splitlines()[-_SHOWN_LINES:]])
        yield fail(
            "processes", f"failed with exit code {process.returncode}: {_stages(output)}{said}", _advice(options)
        )
        return
    yield from (Finding(**fields) for fields in json.loads(found[0]))
    if process.returncode:
        last = (errors.strip().splitlines() or [""])[-1]
        yield fail(
            "processes",
            f"ended with exit code {process.returncode} after all checks: {last}",
            "Run `accel launch --debug` on a small script.",
        )
    else:
        yield ok("processes", "started, and ended in order")


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.terminate()
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


def _stages(output: str) -> str:
    """How far each rank came."""
    last: dict[str, str] = {}
    for line in output.split("\n"):  # splitlines() would also end lines at the marks
        if line.startswith(STAGE_MARK):
            rank, _, stage = line.removeprefix(STAGE_MARK).partition(" ")
            last[rank] = stage
    if not last:
        return "no process came as far as to say anything"
    return ", ".join(f"rank {rank}: {stage}" for rank, stage in sorted(last.items(), key=lambda item: int(item[0])))


def _advice(options: Sequence[str]) -> str:
    if any("num_machines" in word for word in options):
        return (
            "Is the doctor running on every machine, with the same --main_process_ip and --main_process_port, and "
            "can each reach them?"
        )
    return (
        "What the processes said is above. GLOO_SOCKET_IFNAME=lo keeps them on this machine; `accel launch "
        "--debug` shows the agent's log."
    )
