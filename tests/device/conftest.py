"""The tests of this folder run with the simulated GPU: ``scripts/test --device simgpu``."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("ACCEL_TEST_DEVICE") == "simgpu" else ["test_*.py"]
