"""Values without dimensions in a step with padding: a warning once, and none where nothing is padded."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, set_seed
from accel_data import prepare_data_loader
from accel_state import logging as accel_logging
from accel_state.testing import run_world


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def warnings_of(rows: int, value: str, **options: Any) -> int:
    """How often an epoch warns, of which each step gathers a value."""
    accel_logging._already_warned.clear()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(torch.arange(1.0, rows + 1), batch_size=4))
    messages, logger = Messages(), logging.getLogger("accel.training.gather_for_metrics")
    logger.addHandler(messages)
    for x in loader:
        data = {"mean": x.mean(), "samples": x, "nested": {"losses": [x, x.sum()]}, "none": []}[value]
        accelerator.gather_for_metrics(data)
    logger.removeHandler(messages)
    return sum("without dimensions" in text for text in messages.texts)


def check_warnings() -> None:
    state = Accelerator(cpu=True).process_state
    several = state.num_processes > 1
    for value, dispatch in itertools.product(("mean", "samples", "nested"), (False, True)):
        # 8 samples per step: the last step of 20 has 4, one batch; 14: 6, 4 and 2; 13 has 5; 16 has no such step.
        for rows in (13, 14, 20, 16):
            expected = several and value != "samples" and rows != 16
            if dispatch and rows % 2 == 0:
                expected = False  # divided equally
            label = (value, dispatch, rows)
            assert warnings_of(rows, value, dispatch_batches=dispatch) == (expected and state.is_main_process), label
    assert warnings_of(13, "mean", even_batches=False) == (several and state.is_main_process)


def test_values_of_padded_batches_warn() -> None:
    run_world(check_warnings, 2)


def names_of_an_epoch(rows: int, form: str) -> tuple[list[str], bool]:
    """The names that an epoch gathers, and whether it warned."""
    accel_logging._already_warned.clear()
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader([(float(i), f"n{i}") for i in range(rows)], batch_size=3))
    messages, logger = Messages(), logging.getLogger("accel.training.gather_for_metrics")
    logger.addHandler(messages)
    found: list[str] = []
    for x, names in loader:
        if form == "names":
            found += accelerator.gather_for_metrics(names)
        elif form == "a dictionary per sample":
            each = [{"name": name, "x": one} for name, one in zip(names, x, strict=True)]
            found += [sample["name"] for sample in accelerator.gather_for_metrics(each, use_gather_object=True)]
        elif form == "a dictionary":
            for batch in accelerator.gather_for_metrics({"names": names, "x": x}, use_gather_object=True):
                found += batch["names"]
        else:
            for part in accelerator.gather_for_metrics((list(names), x)):
                found += part if isinstance(part, list) else []
    logger.removeHandler(messages)
    return found, any("one object per sample" in text for text in messages.texts)


def check_names() -> None:
    is_main = Accelerator(cpu=True).is_main_process
    for rows in (10, 12):
        names = [f"n{i}" for i in range(rows)]
        for form in ("names", "a dictionary per sample"):
            assert names_of_an_epoch(rows, form) == (names, False), (rows, form)
        for form in ("a dictionary", "lists and tensors"):
            found, warned = names_of_an_epoch(rows, form)
            assert warned == (is_main and rows == 10), (rows, form)
            assert (found == names) == (rows == 12), (rows, form)


def test_padding_within_objects_is_reported() -> None:
    run_world(check_names, 2)


def test_one_process_has_no_padding() -> None:
    check_warnings()


def test_the_last_step_of_batches_of_different_sizes_counts_as_padded() -> None:
    plain = DataLoader(torch.arange(8), batch_sampler=[[0], [1, 2], [3, 4, 5], [6, 7]])
    loader = prepare_data_loader(plain, num_processes=2, process_index=0, rng_types=[])
    assert [loader.has_padding for _ in loader] == [False, True]
    assert loader.remainder == -1


def draws() -> tuple[float, float]:
    set_seed(5)
    same = torch.rand(()).item()
    set_seed(5, device_specific=True)
    return same, torch.rand(()).item()


def test_seeds_of_processes_differ_where_asked() -> None:
    (same, first), (other, second) = run_world(draws, 2)
    assert same == other == first != second


@pytest.fixture(autouse=True)
def _warns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel_logging, "_already_warned", set())
