"""Prefixes of the lines through which ranks report to the doctor, and the variable that limits their time."""

from __future__ import annotations

RESULTS_MARK = "\x1eaccel-doctor-results "
STAGE_MARK = "\x1eaccel-doctor-stage "
TIMEOUT_VARIABLE = "ACCEL_DOCTOR_SECONDS"
