"""A pytest plugin: tests run with the device in ``ACCEL_TEST_DEVICE`` in the place of the CPU.

``scripts/test --device NAME`` loads it. With the simulated GPU, a test during which an access was not ordered fails.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from device_exceptions import reason_to_skip, refusal

NAME = os.environ["ACCEL_TEST_DEVICE"]
if NAME == "simgpu":
    os.environ.setdefault("SIMGPU_DEVICES", "4")  # for tests with four ranks
    import torch_simgpu

if NAME == "cuda":
    from accel_state import testing

    _preload = testing.preload

    def preload_without_transformers(*modules: str) -> None:
        """Transformers imports torchao if it is installed, which starts CUDA: forked ranks could not use it then."""
        _preload(*(name for name in modules if not name.startswith(("transformers", "preloaded_deepspeed"))))

    testing.preload = preload_without_transformers

_reports = Path(tempfile.mkdtemp(prefix="simgpu-")) / "races"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "expects_races: the program under test races on purpose")
    os.environ["SIMGPU_REPORT"] = str(_reports)  # also of the processes that a test starts


def pytest_unconfigure() -> None:
    _reports.unlink(missing_ok=True)
    _reports.parent.rmdir()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := reason_to_skip(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=f"on a device: {reason}"))


@pytest.fixture(autouse=True)
def has_no_races(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test during which an access was not ordered, in this process or in one that it started."""
    _reports.write_text("")
    yield
    if NAME == "simgpu" and torch_simgpu.module.is_initialized():
        for index in range(torch_simgpu.module.device_count()):
            torch_simgpu.module.synchronize(index)  # the next test finds no copies of this one
        torch_simgpu.module.clear_races()  # nor the races that this one expects
    races = _reports.read_text().splitlines()
    if races and request.node.get_closest_marker("expects_races") is None:
        pytest.fail(f"{len(races)} races: " + "; ".join(list(dict.fromkeys(races))[:5]), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A test that the device refuses must end with the words of the refusal."""
    report: Any = yield
    words = refusal(item.nodeid) if report.when == "call" and not report.skipped else None
    if words is not None:
        was_refused = call.excinfo is not None and words in str(call.excinfo.value)
        report.outcome = "passed" if was_refused else "failed"
        if was_refused:
            report.user_properties.append(("refused", words))
        elif call.excinfo is None:
            report.longrepr = f"passed, though it was expected to be refused with {words!r}"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table: how many tests ran and were equal or refused, and why others did not run."""
    passed, failed = (terminalreporter.getreports(kind) for kind in ("passed", "failed"))
    refused = Counter(text for report in passed for name, text in report.user_properties if name == "refused")
    skipped = Counter(report.longrepr[2] for report in terminalreporter.getreports("skipped"))
    equal, different = len(passed) - refused.total(), len(failed)
    terminalreporter.section(f"on {NAME}")
    terminalreporter.write_line(f"| tests run | {len(passed) + different} |\n| equal | {equal} |")
    terminalreporter.write_line(f"| different | {different} |")
    for words, count in refused.most_common():
        terminalreporter.write_line(f"| refused: {words} | {count} |")
    for reason, count in skipped.most_common():
        terminalreporter.write_line(f"| skipped: {reason.removeprefix('Skipped: ')} | {count} |")
