"""For every test of the workspace: the order is random with a seed that is shown, and a test that leaves something
behind fails.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# A machine that does something else for a second is no reason for a test to fail, and the same examples come each time:
# new ones are # looked for with --hypothesis-seed. Folders of tests add to this profile.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", settings.get_profile("search"), derandomize=True)
settings.load_profile("suite")
# It would draw numbers and texts out of the source of our modules too: of those that are loaded, which are others in
# every order.
providers._get_local_constants = lambda: providers._local_constants

# Set by pytest itself around every phase, by libraries the first time they are used, and never by us.
_VARIABLES_OF_OTHERS = {
    "PYTEST_CURRENT_TEST",
    "KMP_INIT_AT_FORK",  # Intel's OpenMP, through scikit-learn
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",  # the first torch.compile of a process
    "TRITON_CACHE_DIR",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
# For what is ending already; only a test that leaves something behind waits so long.
_SECONDS_TO_END = 30.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order-seed",
        type=int,
        default=None,
        help="seed of the order in which the tests run (default: a new one each time)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.order_seed is None:
        config.option.order_seed = getattr(config, "workerinput", {}).get(
            "order_seed", random.SystemRandom().randrange(10**6)
        )
    heed_signals()
    if config.getoption("--hypothesis-seed", None) is not None:
        settings.load_profile("search")
    # Every test runs in an empty folder (below); what hypothesis remembers of its failures must not be lost with it.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(config.rootpath / ".hypothesis"))


def heed_signals() -> None:
    """Undo what a run in the background (`nohup`, or `&` in a script) hands down: interrupts and hang-ups that are
    ignored.
    """
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


def pytest_report_header(config: pytest.Config) -> str:
    return f"order: --order-seed {config.option.order_seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the files, and the tests inside each; what is slow goes first, so that no worker waits for it at the end."""
    dice = random.Random(config.option.order_seed)
    position = {item.nodeid: dice.random() for item in sorted(items, key=lambda item: item.nodeid)}
    files = {path: dice.random() for path in sorted({str(item.path) for item in items})}
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, files[str(item.path)], position[item.nodeid]))


@pytest.fixture(scope="session")
def _empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cwd")


@pytest.fixture(autouse=True)
def leaves_nothing_behind(_empty_folder: Path) -> Iterator[None]:
    """Fail a test that leaves a variable, a process group, a log handler, a thread or a file in the working folder."""
    os.chdir(_empty_folder)
    variables = dict(os.environ)
    handlers = _handlers()
    threads = set(threading.enumerate())
    yield
    leaks = [
        *_changed_variables(variables),
        *_process_groups(),
        *(f"the log handler {handler}" for handler in _handlers() if handler not in handlers),
        *_threads_since(threads),
        *_stray_files(_empty_folder),
    ]
    if leaks:
        pytest.fail("left behind: " + "; ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def leaves_no_process_behind() -> Iterator[None]:
    """Fail a file whose tests leave a process running. Once a file: listing the processes of a machine takes
    milliseconds.
    """
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
    """Our children and theirs, less the two helpers that multiprocessing keeps for as long as we live."""
    here = psutil.Process()
    found = []
    for process in here.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            is_helper = process.ppid() == here.pid and any(
                "from multiprocessing." in word for word in process.cmdline()
            )
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
        if before.get(key) != after.get(key) and key not in _VARIABLES_OF_OTHERS
    ]
    messages = [f"the environment variable {key} ({before.get(key)!r} -> {after.get(key)!r})" for key in changed]
    for key in changed:  # so that only the test at fault fails
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
    # pytest puts its own capturing handlers on the root logger and takes them off again around every phase.
    return [handler for handler in logging.getLogger().handlers if not type(handler).__module__.startswith("_pytest")]


def _threads_since(before: set[threading.Thread]) -> list[str]:
    # Daemon threads belong to pools that libraries keep for the whole process.
    left = _wait_until_gone(
        lambda: [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    )
    return [f"the thread {thread.name}" for thread in left]


def _stray_files(folder: Path) -> list[str]:
    messages = [] if Path.cwd() == folder else [f"the working folder {Path.cwd()}"]
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # gone by itself
            path.rename(folder.parent / f"stray-{time.monotonic_ns()}-{path.name}")
            messages.append(f"the file {path.name} in the working folder")
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
