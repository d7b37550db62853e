"""Tests that are not about the device, or state what holds on a CPU only: they are skipped with the simulated GPU."""

from __future__ import annotations

# Part of a test's id -> why.
EXCEPTIONS: dict[str, str] = {
    "test_accelerators.py::test_the_next_weights_arrive_while": "times copies and products of a real device",
}


def reason_to_skip(nodeid: str) -> str | None:
    """Why a test does not run with the simulated GPU; None if it does."""
    return next((reason for part, reason in EXCEPTIONS.items() if part in nodeid), None)
