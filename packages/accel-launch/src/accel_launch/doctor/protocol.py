"""What the doctor and its processes say to each other: lines of their output that begin with these."""

from __future__ import annotations

FINDINGS_MARK = "\x1eaccel-doctor-findings "
STAGE_MARK = "\x1eaccel-doctor-stage "
TIMEOUT_VARIABLE = "ACCEL_DOCTOR_SECONDS"
