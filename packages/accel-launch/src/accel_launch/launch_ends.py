"""Appends to the files of monitored ranks when the ranks and this launcher end. Torch-free."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError
from accel_state.rank_ends import VARIABLE, Launch, RankFile, read_note

from .launch_plan import LaunchPlan
from .scratch import scratch_directory


@contextlib.contextmanager
def reported_ends(plan: LaunchPlan) -> Iterator[None]:
    """Name this launcher to the monitored ranks that the block starts, and report to their files when they end.

    What starts inside of the block inherits a variable; programs that start ranks on other machines must forward it.
    """
    if not plan.settings["monitor"] and plan.settings["monitor_port"] is None:
        yield
        return
    with scratch_directory() as directory:
        launch = Launch.of_this_process(directory)
        try:
            with patch_environment(**{VARIABLE: launch.encode()}):
                yield
        finally:
            report_ends(directory.iterdir(), time.time(), owns_process=True)


def report_ends(directories: Iterable[Path], ended_at: float, owns_process: bool) -> None:
    """Append to the files of monitored ranks when they ended, and when this launcher does.

    Args:
        directories: where the ranks may have left notes.
        ended_at: when the last rank had ended, in seconds since the epoch.
        owns_process: whether this process ends with the launch.
    """
    files = [file for file in map(read_note, directories) if file is not None]
    _append_ends(files, "exit", ended_at)
    if owns_process:
        atexit.register(lambda: _append_ends(files, "launcher", time.time()))


def _append_ends(files: Sequence[RankFile], kind: str, moment: float) -> None:
    for file in files:
        # A monitor never disturbs a run: its directory may be full, or removed.
        with contextlib.suppress(OSError, ConfigurationError):
            if os.path.exists(file.path):
                file.append_end(kind, moment)
