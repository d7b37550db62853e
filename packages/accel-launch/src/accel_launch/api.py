"""``accel launch`` as a function."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accel_state.env import all_variables
from accel_state.options import load_groups, resolve

# A little more than the launcher itself gives to its processes.
_END_SECONDS = 40


def launch(
    script: str | os.PathLike[str], args: Sequence[str] = (), *, env: Mapping[str, str] | None = None, **options: Any
) -> int:
    """Start a script as ``accel launch`` does, and wait for it.

    The launcher runs in a process of its own, so it neither imports torch here nor touches this process's signals.

    Args:
        script: path of the script; a module name with ``module=True``; an executable with ``no_python=True``.
        args: its arguments.
        env: the variables of the launcher and its processes; left out, those of this process.
        **options: any option of ``accel launch``, by its name: ``num_processes=2, mixed_precision="bf16", cpu=True``.

    Returns:
        The exit code of ``accel launch``: 0, or that of the process that failed first (128 + N where it died of signal
        N), or 2 where the script cannot be started.

    Raises:
        ConfigurationError: an option does not exist, or its value is not allowed.
    """
    groups = load_groups()
    given = {name: value for name, value in options.items() if value is not None}
    settings = resolve(groups, given, environ={})
    declared = {opt.name: opt for group in groups for opt in group.options()}
    # A secret on a command line could be seen by every user of the machine.
    secrets = {str(declared[name].env): str(settings[name]) for name in given if declared[name].secret}
    shown = [declared[name] for name in given if not declared[name].secret]
    flags = [f"{opt.flags[0]}={opt.format(settings[opt.name])}" for opt in shown]
    command = [sys.executable, "-m", "accel_launch", "launch", *flags, "--", os.fspath(script), *map(str, args)]
    return _wait(subprocess.Popen(command, env={**(all_variables() if env is None else env), **secrets}))


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # The launcher ends its processes first; to kill it now would take that from it.
        if sys.platform != "win32":  # a console there sends it to every process itself
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_SECONDS)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            process.kill()
        raise
    return 128 - code if code < 0 else code
