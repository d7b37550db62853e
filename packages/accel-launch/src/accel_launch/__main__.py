"""``python -m accel_launch``: the command ``accel``."""

from __future__ import annotations

import sys

from accel_launch.cli import main

sys.exit(main())
