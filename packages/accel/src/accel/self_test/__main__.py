"""The program that every process of ``accel test`` runs."""

from __future__ import annotations

import time

from ..accelerator import Accelerator
from .checks import CHECKS


def main() -> None:
    """Run every check; the first failure ends the run with its traceback."""
    accelerator = Accelerator()
    accelerator.print(f"{accelerator.num_processes} process(es), {accelerator.distributed_type}, {accelerator.device}")
    for name, check in CHECKS.items():
        begin = time.perf_counter()
        check(accelerator)
        accelerator.wait_for_everyone()
        accelerator.print(f"ok  {name} ({time.perf_counter() - begin:.2f} s)")
    accelerator.end_training()


if __name__ == "__main__":
    main()
