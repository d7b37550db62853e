"""What a check found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the verdict.

    Attributes:
        subject: what was looked at, in a word or two.
        state: "ok", "warn" (works, but something should be known) or "fail".
        text: what was found.
        advice: what to do; every finding that failed has it.
    """

    subject: str
    state: str
    text: str
    advice: str = ""

    @property
    def failed(self) -> bool:
        """Whether something does not work."""
        return self.state == "fail"

    def line(self) -> str:
        """For the screen."""
        advice = f"\n        -> {self.advice}" if self.advice else ""
        return f"{self.state:<5} {self.subject:<14} {self.text}{advice}"


Check = Callable[[], Iterator[Finding]]
"""Looks at one thing."""


def run_check(subject: str, check: Check) -> Iterator[Finding]:
    """The findings of a check. One that raises is itself a finding: the others must still be heard."""
    try:
        yield from check()
    except Exception as error:
        text = f"the check itself failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        yield Finding(
            subject, "fail", text, "Report this line, please: a check must not fail, whatever the machine is like."
        )


def ok(subject: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(subject, "ok", text)


def warn(subject: str, text: str, advice: str) -> Finding:
    """Works, but something should be known."""
    return Finding(subject, "warn", text, advice)


def fail(subject: str, text: str, advice: str) -> Finding:
    """Does not work."""
    return Finding(subject, "fail", text, advice)
