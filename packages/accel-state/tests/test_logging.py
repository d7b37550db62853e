"""Loggers that write by rank."""

from __future__ import annotations

import io
import logging
import time
from pathlib import Path

import pytest

from accel_state.context import isolated
from accel_state.errors import ConfigurationError
from accel_state.logging import MultiProcessAdapter, _already_warned, get_logger
from accel_state.state import PartialState
from accel_state.testing import run_world


class SlowFile(logging.Handler):
    """Appends to a file that all ranks share; the lower the rank, the longer it takes."""

    def __init__(self, path: str, delay: float) -> None:
        super().__init__()
        self.path, self.delay = path, delay

    def emit(self, record: logging.LogRecord) -> None:
        time.sleep(self.delay)
        with Path(self.path).open("a") as file:
            file.write(record.getMessage() + "\n")


def capture(logger: MultiProcessAdapter) -> io.StringIO:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s|%(message)s|%(filename)s:%(lineno)d"))
    logger.logger.addHandler(handler)
    logger.logger.propagate = False
    return stream


def log_everything() -> list[str]:
    logger = get_logger("world", log_level="INFO")
    stream = capture(logger)
    logger.info("main %d", 1)
    logger.info("all %d", 2, main_process_only=False)
    logger.debug("too low", main_process_only=False)
    logger.info("in order", main_process_only=False, in_order=True)
    logger.info("main in order", in_order=True)
    return [line.rsplit("|", 1)[0] for line in stream.getvalue().splitlines()]


def log_in_order(path: str) -> None:
    state = PartialState()
    logger = get_logger("ordered", log_level="INFO" if state.process_index != 1 else "ERROR")
    logger.logger.addHandler(SlowFile(path, 0.1 * (state.num_processes - state.process_index)))
    logger.info("first", main_process_only=False, in_order=True)
    logger.info("second", main_process_only=False, in_order=True)


@pytest.fixture
def name(request):
    """A logger of this test alone, gone afterwards."""
    logger_name = f"test.{request.node.name}"
    with isolated():
        yield logger_name
    logging.Logger.manager.loggerDict.pop(logger_name, None)
    _already_warned.clear()


def test_each_rank_writes_what_it_should():
    ranks = run_world(log_everything, 3)
    assert ranks[0] == [
        "INFO|[RANK 0] main 1",
        "INFO|[RANK 0] all 2",
        "INFO|[RANK 0] in order",
        "INFO|[RANK 0] main in order",
    ]
    for rank in (1, 2):
        assert ranks[rank] == [f"INFO|[RANK {rank}] all 2", f"INFO|[RANK {rank}] in order"]


def test_in_order_waits_for_the_ranks_before_and_a_silent_rank_holds_nobody_up(tmp_path):
    path = tmp_path / "log"
    run_world(log_in_order, 3, str(path))
    assert path.read_text().splitlines() == ["[RANK 0] first", "[RANK 2] first", "[RANK 0] second", "[RANK 2] second"]


def test_a_logger_can_be_made_but_not_used_before_the_state(name):
    logger = get_logger(name)
    stream = capture(logger)
    for call in (logger.info, logger.warning, logger.warning_once, lambda text: logger.log(logging.ERROR, text)):
        with pytest.raises(RuntimeError, match=r"PartialState\(\).*Accelerator\(\)"):
            call("too early")
    PartialState(cpu=True)
    logger.warning_once("too early")
    assert "too early" in stream.getvalue(), "what raised must not count as said"


def test_the_callers_line_is_reported(name):
    PartialState(cpu=True)
    logger = get_logger(name, "DEBUG")
    stream = capture(logger)
    logger.info("a")
    logger.log(logging.INFO, "b")
    logger.warning_once("c")
    logger.info("d", main_process_only=False, in_order=True)
    lines = Path(__file__).read_text().splitlines()
    first = next(number for number, line in enumerate(lines, 1) if line.strip() == 'logger.info("a")')
    assert [line.rsplit("|", 1)[1] for line in stream.getvalue().splitlines()] == [
        f"{Path(__file__).name}:{first + n}" for n in range(4)
    ]


def test_exceptions_and_values_go_through(name):
    PartialState(cpu=True)
    logger = get_logger(name, "INFO")
    stream = capture(logger)
    try:
        raise ValueError("inner")
    except ValueError:
        logger.exception("caught %s", "it")
    assert "[RANK 0] caught it" in stream.getvalue()
    assert "ValueError: inner" in stream.getvalue()


def test_a_warning_is_given_once(name):
    PartialState(cpu=True)
    stream = capture(get_logger(name))
    for _ in range(3):
        get_logger(name).warning_once("slow path %s", "x")
    get_logger(name).warning_once("slow path %s", "y")
    assert [line.split("|")[1] for line in stream.getvalue().splitlines()] == [
        "[RANK 0] slow path x",
        "[RANK 0] slow path y",
    ]


@pytest.mark.parametrize(
    ("argument", "variable", "level"),
    [
        ("INFO", None, "INFO"),
        (None, "ERROR", "ERROR"),
        ("debug", "ERROR", "DEBUG"),
        (None, None, "NOTSET"),
        (None, "", "NOTSET"),
    ],
)
def test_the_level_comes_from_the_argument_then_the_variable(name, monkeypatch, argument, variable, level):
    root = logging.getLogger().level
    if variable is None:
        monkeypatch.delenv("ACCELERATE_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("ACCELERATE_LOG_LEVEL", variable)
    assert logging.getLevelName(get_logger(name, argument).logger.level) == level
    assert logging.getLogger().level == root
    assert logging.getLogger(name).handlers == []


def test_an_unknown_level_is_named(name, monkeypatch):
    with pytest.raises(ConfigurationError, match="log_level='LOUD'.*DEBUG, INFO"):
        get_logger(name, "LOUD")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "QUIET")
    with pytest.raises(ConfigurationError, match="ACCELERATE_LOG_LEVEL='QUIET'"):
        get_logger(name)
