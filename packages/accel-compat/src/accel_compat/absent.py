"""Stands for the modules of the reference that accel lacks; see UNAVAILABLE in modules.py for their names."""

from __future__ import annotations

import sys
from collections.abc import Callable

# The commands that modules of the reference run: `python -m accelerate.commands.estimate` is `accel estimate-memory`.
COMMANDS: dict[str, tuple[str, ...]] = {
    "accelerate.commands.accelerate_cli": (),
    "accelerate.commands.config.config": ("config",),
    "accelerate.commands.estimate": ("estimate-memory",),
    "accelerate.commands.merge": ("merge-weights",),
    "accelerate.commands.test": ("test",),
    "accelerate.commands.tpu": ("tpu-config",),
}


def main_of(module: str) -> Callable[[], int]:
    """Return what the function ``main`` of such a module does."""

    def main() -> int:
        from accel_launch.cli import main as run

        return run([*COMMANDS[module], *sys.argv[1:]])

    return main


if __name__ == "__main__":
    raise SystemExit(main_of(__spec__.name)())
