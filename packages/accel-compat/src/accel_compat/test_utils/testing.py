"""The helpers of ``accelerate.test_utils`` that other libraries' test suites use."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
import unittest
from collections.abc import Callable, Sequence
from typing import Any

from accel_state import devices
from accel_state import env as environment

__all__ = [
    "DEFAULT_LAUNCH_COMMAND", "SubprocessCallException", "device_count", "execute_subprocess_async", "get_backend",
    "get_launch_command", "memory_allocated_func", "require_cpu", "require_cuda", "require_multi_device",
    "require_non_cpu", "require_single_device", "run_command", "slow", "torch_device",
]  # fmt: skip


class SubprocessCallException(Exception):
    """A command failed; the message has its output."""


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return this machine's accelerator (or "cpu"), their number, and a function for the memory in use."""
    device = devices.detect()
    if device.name == "cpu":
        return "cpu", 1, lambda: 0
    return device.name, device.device_count(), device.memory_allocated


torch_device: str
device_count: int
memory_allocated_func: Callable[[], int]
torch_device, device_count, memory_allocated_func = get_backend()


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return the words of ``accelerate launch`` with options: ``num_processes=2``, or True for a switch."""
    command = [sys.executable, "-m", "accel_launch", "launch"]
    for name, value in kwargs.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            command.append(f"--{name}={value}")
    return command


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)


def run_command(command: Sequence[str], return_stdout: bool = False, env: dict[str, str] | None = None) -> str | None:
    """Run a command; its output is returned where asked for.

    Raises:
        SubprocessCallException: it failed.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SubprocessCallException(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout if return_stdout else None


def execute_subprocess_async(cmd: Sequence[str], env: dict[str, str] | None = None, timeout: float = 180) -> str:
    """Run a command, show its output as it comes, and return it.

    Raises:
        SubprocessCallException: it failed.
        TimeoutError: it took more than ``timeout`` seconds.
    """

    async def run() -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *map(str, cmd), env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        stdout = process.stdout
        assert stdout is not None
        lines = []

        async def read() -> int:
            async for line in stdout:
                lines.append(line.decode(errors="replace"))
                print(lines[-1], end="")
            return await process.wait()

        try:
            code = await asyncio.wait_for(read(), timeout)
            return code, "".join(lines)
        except BaseException:
            process.kill()
            await process.wait()
            raise

    try:
        code, output = asyncio.run(run())
    except asyncio.TimeoutError as error:  # a class of its own in Python 3.10
        raise TimeoutError(f"{shlex.join(map(str, cmd))} took more than {timeout} seconds") from error
    if code:
        raise SubprocessCallException(f"{shlex.join(map(str, cmd))} ended with {code}:\n{output}")
    return output


def slow(test: Any) -> Any:
    """Skip a test unless RUN_SLOW is set."""
    is_set = environment.parse_flag_from_env("RUN_SLOW", False)
    return unittest.skipUnless(is_set, "slow: set RUN_SLOW=1")(test)


def require_cpu(test: Any) -> Any:
    """Skip a test on a machine with an accelerator."""
    return unittest.skipUnless(torch_device == "cpu", "for machines without an accelerator")(test)


def require_non_cpu(test: Any) -> Any:
    """Skip a test on a machine without an accelerator."""
    return unittest.skipUnless(torch_device != "cpu", "needs an accelerator")(test)


def require_cuda(test: Any) -> Any:
    """Skip a test on a machine without a CUDA device."""
    return unittest.skipUnless(torch_device == "cuda", "needs CUDA")(test)


def require_single_device(test: Any) -> Any:
    """Skip a test unless there is exactly one accelerator."""
    return unittest.skipUnless(torch_device != "cpu" and device_count == 1, "needs one accelerator")(test)


def require_multi_device(test: Any) -> Any:
    """Skip a test unless there are several accelerators."""
    return unittest.skipUnless(torch_device != "cpu" and device_count > 1, "needs several accelerators")(test)
