"""Starts processes that check a machine, or a cluster, together, and collects their results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from ..entrypoint import python_command
from ..network.agreement import FACTS_VARIABLE
from ..remedies import remedy
from .result import RESULTS_MARK, STAGE_MARK, TIMEOUT_VARIABLE, CheckResult, fail, ok

_MODULE = "accel_launch.doctor.ranks"
_SHOWN_LINES = 12


def check_group(
    options: Sequence[str], environ: Mapping[str, str], seconds: float, facts: Mapping[str, str] | None = None
) -> Iterator[CheckResult]:
    """Yield the results of processes that ``accel launch OPTIONS`` starts, once the machines agree on the facts."""
    compared = {FACTS_VARIABLE: json.dumps(facts)} if facts else {}
    process = subprocess.Popen(
        python_command("-m", "accel_launch", "launch", "--quiet", *options, "-m", _MODULE),
        env={**environ, TIMEOUT_VARIABLE: str(max(int(seconds), 1)), **compared},
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
        waited = [line for line in errors.splitlines() if line.startswith("accel launch: ")]
        quoted = "".join(f"\n        {line}" for line in waited[-1:])
        yield fail(
            "processes", f"not finished after {seconds:g} s: {_stages(output)}{quoted}", _advice(options, errors)
        )
        return
    except BaseException:
        _end(process)
        raise
    reports = [line.removeprefix(RESULTS_MARK) for line in output.split("\n") if line.startswith(RESULTS_MARK)]
    if not reports:
        quoted = "\n        ".join(["", *errors.strip().splitlines()[-_SHOWN_LINES:]])
        text = f"failed with exit code {process.returncode}: {_stages(output)}{quoted}"
        yield fail("processes", text, _advice(options, errors))
        return
    yield from (CheckResult(**fields) for fields in json.loads(reports[0]))
    if process.returncode:
        last = (errors.strip().splitlines() or [""])[-1]
        text = f"exited with code {process.returncode} after all checks: {last}"
        yield fail("processes", text, "Run `accel launch --debug` with a small script.")
    else:
        yield ok("processes", "started and exited cleanly")


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.terminate()
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


def _stages(output: str) -> str:
    """Return the last stage of each rank."""
    last: dict[int, str] = {}
    for line in output.split("\n"):  # splitlines() would also split at the marks
        if line.startswith(STAGE_MARK):
            rank, _, stage = line.removeprefix(STAGE_MARK).partition(" ")
            last[int(rank)] = stage
    return ", ".join(f"rank {rank}: {stage}" for rank, stage in sorted(last.items())) or "no process has started"


def _advice(options: Sequence[str], errors: str) -> str:
    if known := remedy(errors):
        return known
    if any("num_machines" in option for option in options):
        return (
            "Run the doctor on every machine with the same --main_process_ip and --main_process_port, and check that "
            "each machine can reach them."
        )
    return (
        "See the output of the processes above. GLOO_SOCKET_IFNAME=lo restricts them to this machine; `accel launch "
        "--debug` shows the agent's log."
    )
