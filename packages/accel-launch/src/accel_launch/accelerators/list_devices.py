"""A program that prints the number of devices, the variable that selects among them, and their name, as JSON.

Of the first kind that torch finds and the launcher cannot count by itself: CUDA's devices are counted without torch,
and the runtimes of XLA and of TPUs start processes in ways of their own.
"""

from __future__ import annotations

import json

from accel_state import devices

from .plug_in import MARK

_COUNTED = ("xla", "tpu", "cuda", "mps", "cpu")


def main() -> None:
    """Print a line, if there are such devices."""
    for device in devices.available():
        if device.name not in _COUNTED:
            print(MARK + json.dumps([device.device_count(), device.visible_devices_variable, device.name]))
            return


if __name__ == "__main__":
    main()
