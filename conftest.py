"""Applies to every test of the workspace: tiers, an order with a seed, and checks for leaks."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers

# No deadlines, since a busy machine must not fail a test, and the same examples on every run; --hypothesis-seed looks
# for new ones. The conftest.py of a package may refine the profile.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", settings.get_profile("search"), derandomize=True)
settings.load_profile("suite")
# Hypothesis also draws constants from the modules that happen to be loaded, which differ with the order of the tests.
providers._get_local_constants = lambda: providers._local_constants

# Variables that pytest sets around every phase and that libraries set on first use.
_FOREIGN_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "KMP_INIT_AT_FORK",  # Intel's OpenMP, through scikit-learn
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",  # the first torch.compile of a process
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
    "CUBLAS_WORKSPACE_CONFIG",  # set_seed(deterministic=True) on a GPU
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
# Seconds that threads and processes which are already ending are given to finish.
_SECONDS_TO_END = 30.0
# How accel reports that a feature needs a newer torch.
_NEEDS_NEWER_TORCH = re.compile(r"[^\n]*needs (?:a newer torch than|torch 2\.\d+ or newer)[^\n]*")
# Property tests of the fast tier run this many examples; --all runs as many as the test asks for.
_FAST_EXAMPLES = 25
# Factor of the limits of time of tests, and of the worlds that they start: CI's machines can be slow.
_PATIENCE = float(os.environ.get("ACCEL_TEST_PATIENCE", "1"))
# Seconds since 1970 after which no test begins; scripts/test --minutes sets it.
_UNTIL = float(os.environ.get("ACCEL_TEST_UNTIL", "inf"))
_NOT_RUN = "not run: the time for tests was over (scripts/test --minutes)"
# The file into which scripts/pytest_retry.py wants the outcomes written.
_RESULTS = os.environ.get("ACCEL_TEST_RESULTS")
# The order of the fast tier. A fixed one, so that two runs of a commit are the same check.
_FAST_TIER_SEED = 0
# What a worker computes once for the tests of a file.
_SHARED = re.compile(r"""scope=["'](module|class|session)|^@(functools\.)?(lru_)?cache\b""", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too, and every example of hypothesis")
    parser.addoption(
        "--order-seed",
        type=int,
        default=None,
        help=f"seed of the order of the tests (default: {_FAST_TIER_SEED}, and a new one each time with --all)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.order_seed is None:
        chosen = random.SystemRandom().randrange(10**6) if config.option.all else _FAST_TIER_SEED
        config.option.order_seed = getattr(config, "workerinput", {}).get("order_seed", chosen)
    heed_signals()
    if _PATIENCE != 1:
        from accel_state import testing

        collect = testing._collect
        testing._collect = lambda ranks, timeout: collect(ranks, _longer(timeout))
        _make_patient("communicate", 2)
        _make_patient("wait", 1)
    if config.getoption("--hypothesis-seed", None) is not None:
        settings.load_profile("search")
    # Tests run in an empty directory (below); the failures that hypothesis remembers must outlive it.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(config.rootpath / ".hypothesis"))


def _longer(seconds: float) -> float:
    """Multiply a limit of time; shorter ones are those of tests in which a process hangs."""
    return seconds * (_PATIENCE if seconds >= 30 else 1)


def _make_patient(name: str, place: int) -> None:
    """Multiply the limits that tests give to the programs that they start."""
    method = getattr(subprocess.Popen, name)

    @functools.wraps(method)
    def patient(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place and args[place] is not None:
            args = (*args[:place], _longer(args[place]), *args[place + 1 :])
        elif kwargs.get("timeout") is not None:
            kwargs["timeout"] = _longer(kwargs["timeout"])
        return method(*args, **kwargs)

    setattr(subprocess.Popen, name, patient)


def heed_signals() -> None:
    """Restore the signals that a run in the background (``nohup``, or ``&`` in a script) inherits as ignored."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All workers of pytest-xdist must see the same order."""
    node.workerinput["order_seed"] = node.config.option.order_seed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With the slow tests: hand out the tests of a file one by one where they share nothing, so that no worker ends
    alone with a long file. The fast tier goes by file.
    """
    if config.option.dist != "loadfile" or not _runs_all(config):
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneByOne(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return nodeid if _is_divisible(config.rootpath / file) else file

    return OneByOne(config, log)


@functools.cache
def _is_divisible(file: Path) -> bool:
    """Whether a file has slow tests, and no value that several of its tests share."""
    source = file.read_text(encoding="utf-8")
    return "mark.slow" in source and not _SHARED.search(source)


def pytest_report_header(config: pytest.Config) -> str:
    return f"order: --order-seed {config.option.order_seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tier and shuffle: files, then the tests of each file. Slow tests come first, those of files that one
    worker runs as a whole at the head, so that no worker ends alone. With a limit of time, which only some of the tests
    fit into, each is as likely to be among them as any other.
    """
    _keep_tier(config, items)
    dice = random.Random(config.option.order_seed)
    position = {item.nodeid: dice.random() for item in sorted(items, key=lambda item: item.nodeid)}
    files = {path: dice.random() for path in sorted({item.path for item in items})}
    slow = {item.nodeid for item in items if item.get_closest_marker("slow") is not None}
    weights = Counter(item.path for item in items if item.nodeid in slow and not _is_divisible(item.path))

    def place(item: pytest.Item) -> tuple[float, ...]:
        if math.inf > _UNTIL:
            return (position[item.nodeid] if _is_divisible(item.path) else files[item.path], position[item.nodeid])
        is_slow = item.nodeid in slow
        return (not is_slow, -weights[item.path] if is_slow else 0, files[item.path], position[item.nodeid])

    items.sort(key=place)
    if _PATIENCE != 1:
        for item in items:
            item.add_marker(pytest.mark.timeout(_limit_of(item) * _PATIENCE), append=False)


def _limit_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    limit = float(item.config.getini("timeout"))
    return limit if marker is None else float(marker.kwargs.get("timeout", (*marker.args, limit)[0]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > _UNTIL:
        pytest.skip(_NOT_RUN)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Take what is imported here, and stays, out of garbage collection: each one that accel or a test asks for would
    look at all of it, for a third of a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _freeze()
        gc.enable()


_frozen_modules = 0


def _freeze() -> None:
    """Take everything that exists out of garbage collection, if much was imported since the last time."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 200:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the examples and documented commands that ran, with their times, and count the tests that did not run."""
    if _RESULTS:
        _write_results(terminalreporter, Path(_RESULTS))
    skipped = [report.nodeid for report in terminalreporter.getreports("skipped") if _NOT_RUN in str(report.longrepr)]
    if skipped:
        ran = sum(len(terminalreporter.getreports(outcome)) for outcome in ("passed", "failed", "error"))
        terminalreporter.section(f"the time for tests was over: {ran} ran, {len(skipped)} did not")
    reports = terminalreporter.getreports("passed")
    runs = [text for report in reports for name, text in report.user_properties if name == "documented run"]
    if runs:
        terminalreporter.section("examples and documented commands")
        for line in sorted([*runs, *_commands_run_by(reports)], reverse=True):
            terminalreporter.write_line(line)


def _write_results(terminalreporter: Any, file: Path) -> None:
    failed: dict[str, str] = {}
    for report in [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]:
        sections = [f"{title}\n{content}" for title, content in report.sections]
        failed[report.nodeid] = "\n".join([*filter(None, [failed.get(report.nodeid)]), report.longreprtext, *sections])
    passed = {report.nodeid: "" for report in terminalreporter.getreports("passed") if report.nodeid not in failed}
    file.write_text(json.dumps({"failed": failed, "passed": passed}), encoding="utf-8")


def _commands_run_by(reports: list[Any]) -> Iterator[str]:
    """The documented commands that tests of their own have run, with the time of all of these tests."""
    from documented_commands import ELSEWHERE, entry  # in tests/, which is on the path when pytest has started
    from documents import all_commands

    for command in all_commands():
        test = entry(ELSEWHERE, command)
        seconds = [
            report.duration for report in reports if test and f"{report.nodeid}:".startswith((f"{test}:", f"{test}["))
        ]
        if seconds:
            yield f"{sum(seconds):6.1f} s  {command.block}: {command.line} (by {test})"


def _runs_all(config: pytest.Config) -> bool:
    """--all, a marker expression, or tests named one by one select for themselves."""
    return config.option.all or bool(config.option.markexpr) or any("::" in argument for argument in config.args)


def _keep_tier(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out of the fast tier, and those that measure time out of every tier: they run alone."""
    if any("::" in argument for argument in config.args) or "timing" in config.option.markexpr:
        return
    left_out = ("timing",) if _runs_all(config) else ("timing", "slow")
    others = [item for item in items if any(map(item.get_closest_marker, left_out))]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if not any(map(item.get_closest_marker, left_out))]
    for item in () if _runs_all(config) else items:
        function = getattr(item, "function", None)
        if is_hypothesis_test(function) and (chosen := _settings_of(function)).max_examples > _FAST_EXAMPLES:
            function._hypothesis_internal_use_settings = settings(chosen, max_examples=_FAST_EXAMPLES)


def _settings_of(function: Any) -> settings:
    return getattr(function, "_hypothesis_internal_use_settings", None) or settings.default


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """On a torch that is older than some feature requires, skip the tests in which accel says so."""
    report = yield
    if report.failed and call.excinfo is not None and "torch" in sys.modules:
        said = _NEEDS_NEWER_TORCH.search(str(call.excinfo.value))
        if said is not None and tuple(map(int, sys.modules["torch"].__version__.split(".")[:2])) < (2, 13):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {said[0].strip()}")
    return report


@pytest.fixture(scope="session")
def _empty_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cwd")


@pytest.fixture(autouse=True)
def leaves_nothing_behind(_empty_directory: Path) -> Iterator[None]:
    """Fail a test that leaves an environment variable, a process group, a log handler, a thread or a file behind."""
    os.chdir(_empty_directory)
    variables = dict(os.environ)
    handlers = _handlers()
    threads = set(threading.enumerate())
    yield
    leaks = [
        *_changed_variables(variables),
        *_process_groups(),
        *(f"the log handler {handler}" for handler in _handlers() if handler not in handlers),
        *_threads_since(threads),
        *_stray_files(_empty_directory),
    ]
    if leaks:
        pytest.fail("left behind: " + "; ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def leaves_no_process_behind() -> Iterator[None]:
    """Fail a test file that leaves a process running; per file, since listing processes takes milliseconds."""
    _freeze()  # between two files: what a fixture of a file holds must stay collectable
    before = set(_processes())
    yield
    left = _wait_until_gone(lambda: [process for process in _processes() if process not in before])
    described = [_describe(process) for process in left]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if left:
        pytest.fail(f"left behind: {described}", pytrace=False)


def _processes() -> list[psutil.Process]:
    """Descendants of this process, except helpers that are kept for its lifetime: of multiprocessing, of torch's
    compiler, of forks.py, and the one that writes checkpoints in the background.
    """
    here = psutil.Process()
    found = []
    for process in here.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            servers = (word for word in words if "from multiprocessing." in word or word.endswith("/tests/forks.py"))
            is_helper = process.ppid() == here.pid and any(servers)
            is_helper |= any(word.endswith("_inductor/compile_worker/__main__.py") for word in words)
            is_helper |= process.ppid() == here.pid and "accel_checkpoint.save_worker" in words
            if not is_helper and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"process {process.pid}, which has ended since"


def _changed_variables(before: dict[str, str]) -> list[str]:
    after = dict(os.environ)
    changed = [
        key
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in _FOREIGN_VARIABLES
    ]
    messages = [f"the environment variable {key} ({before.get(key)!r} -> {after.get(key)!r})" for key in changed]
    for key in changed:  # restored, so that only the test at fault fails
        os.environ.pop(key, None)
        if key in before:
            os.environ[key] = before[key]
    return messages


def _process_groups() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["a torch.distributed process group"]


def _handlers() -> list[logging.Handler]:
    # pytest adds its capturing handlers to the root logger around every phase.
    return [handler for handler in logging.getLogger().handlers if not type(handler).__module__.startswith("_pytest")]


def _threads_since(before: set[threading.Thread]) -> list[str]:
    # Daemon threads belong to pools that libraries keep for the whole process.
    left = _wait_until_gone(
        lambda: [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    )
    return [f"the thread {thread.name}" for thread in left]


def _stray_files(folder: Path) -> list[str]:
    messages = [] if Path.cwd() == folder else [f"the working directory {Path.cwd()}"]
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # removed in the meantime
            path.rename(folder.parent / f"stray-{time.monotonic_ns()}-{path.name}")
            messages.append(f"the file {path.name} in the working directory")
    return messages


def _wait_until_gone(find: Callable[[], list]) -> list:
    if find():
        # a loader's iterator ends its workers, and a pool its threads, when it is collected: later if it is part of a
        # cycle
        gc.collect()
    deadline = time.monotonic() + _SECONDS_TO_END
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
