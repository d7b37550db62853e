"""The program that every process of ``accel test`` runs."""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import torch

from accel_state import devices
from accel_state.errors import ConfigurationError

from ..accelerator import Accelerator
from .checks import CHECKS
from .device_checks import DEVICE_CHECKS


def main() -> None:
    """Run every check; the first failure ends the run with its traceback."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    accelerator = Accelerator()
    accelerator.print(f"{accelerator.num_processes} process(es), {accelerator.distributed_type}, {accelerator.device}")
    checks = dict(CHECKS)
    if arguments.device is not None:
        _require(accelerator, arguments.device)
        checks = {**DEVICE_CHECKS, **checks}
    for name, check in checks.items():
        begin = time.perf_counter()
        check(accelerator)
        accelerator.wait_for_everyone()
        accelerator.print(f"ok  {name} ({time.perf_counter() - begin:.2f} s)")
    if arguments.report is not None and accelerator.is_main_process:
        arguments.report.write_text(_report(accelerator, list(checks)), encoding="utf-8")
    accelerator.end_training()


def _require(accelerator: Accelerator, name: str) -> None:
    if accelerator.device.type != name:
        found = ", ".join(device.name for device in devices.available())
        raise ConfigurationError(
            f"--device {name}: this process uses {accelerator.device}. Usable here: {found}. Install a build of torch "
            f"with {name} support, or the package that adds it; `accel doctor` says what is missing."
        )


def _report(accelerator: Accelerator, checks: list[str]) -> str:
    """Return a row of docs/hardware.md."""
    backend = accelerator.state.backend or "none"
    processes = f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}"
    where = f"{platform.system()} {platform.machine()}, PyTorch {torch.__version__}, Python {platform.python_version()}"
    return (
        "| device | collectives | run | how |\n| --- | --- | --- | --- |\n"
        f"| {accelerator.device.type}, {processes} | {backend} | yes | "
        f"`accel test --device {accelerator.device.type}`: {', '.join(checks)}; {where} |\n"
    )


if __name__ == "__main__":
    main()
