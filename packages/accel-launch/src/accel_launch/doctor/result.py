"""Results of checks, and the lines through which ranks report them to the doctor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from accel_state.secrets import hide_in_text


@dataclass(frozen=True)
class CheckResult:
    """One line of the output."""

    subject: str  # what was checked, in one or two words
    state: str  # "ok", "warn" or "fail"
    text: str  # the result
    advice: str = ""  # what to do; never empty for a failure

    @property
    def failed(self) -> bool:
        """True if the check failed."""
        return self.state == "fail"

    def line(self) -> str:
        """Return the result as text, with secrets hidden."""
        advice = f"\n        -> {self.advice}" if self.advice else ""
        return hide_in_text(f"{self.state:<5} {self.subject:<14} {self.text}{advice}")


Check = Callable[[], Iterator[CheckResult]]
"""Yields the results of one check."""


def run_check(subject: str, check: Check) -> Iterator[CheckResult]:
    """Yield the results of a check; an exception becomes a result too, so that the remaining checks run."""
    try:
        yield from check()
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        text = f"the check raised {type(error).__name__}: {reason}"
        yield fail(subject, text, "This is a bug in accel-launch: please report this line.")


def ok(subject: str, text: str) -> CheckResult:
    """Return a check that passed."""
    return CheckResult(subject, "ok", text)


def warn(subject: str, text: str, advice: str) -> CheckResult:
    """Return a check that passed, with something the user should know."""
    return CheckResult(subject, "warn", text, advice)


def fail(subject: str, text: str, advice: str) -> CheckResult:
    """Return a check that failed."""
    return CheckResult(subject, "fail", text, advice)


RESULTS_MARK = "\x1eaccel-doctor-results "
STAGE_MARK = "\x1eaccel-doctor-stage "
TIMEOUT_VARIABLE = "ACCEL_DOCTOR_SECONDS"
