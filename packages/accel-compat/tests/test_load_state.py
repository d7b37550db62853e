"""Scripts written for Accelerate move their loaders themselves after load_state; natively the loaders continue."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel.utils import DataLoaderConfiguration, set_seed
from accel_compat import install, shim_path
from accel_state.testing import run_world

BATCHES = 5


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    install()
    yield
    sys.path.remove(str(shim_path()))
    # Classes say that they are of the module "accelerate" now, which ranks of later tests could not import.
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0].startswith("accel_") or name.partition(".")[0] == "accel":
            for kind in [value for value in vars(module).values() if isinstance(value, type)]:
                if kind.__module__.partition(".")[0] == "accelerate":
                    kind.__module__ = name


def construct(package: str) -> Callable[..., Any]:
    """What makes an Accelerator in a module that imports it from a package."""
    namespace: dict[str, Any] = {"__name__": f"script_of_{package}"}
    exec(f"from {package} import Accelerator\ndef make(**options): return Accelerator(**options)", namespace)
    return namespace["make"]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10.0)[:, None])


def prepared(package: str, order: str) -> tuple[Any, DataLoader[Any]]:
    set_seed(7)
    config = DataLoaderConfiguration(use_seedable_sampler=order == "seedable")
    accelerator = construct(package)(cpu=True, dataloader_config=config)
    data: Any = Stream() if order == "stream" else torch.arange(10.0)[:, None]
    shuffle = None if order == "stream" else order != "plain"
    return accelerator, accelerator.prepare(DataLoader(data, batch_size=2, shuffle=shuffle))


def interrupted(package: str, order: str, at: int | None, directory: Path) -> list[list[float]]:
    """The batches of two epochs; ``at``: save and stop after that many."""
    accelerator, loader = prepared(package, order)
    seen = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            seen.append(batch.flatten().tolist())
            if len(seen) == at:
                accelerator.save_state(directory)
                return seen
    return seen


def resumed(package: str, order: str, idiom: str, at: int, directory: Path) -> list[list[float]]:
    """The batches that a script sees which loads the state and leaves out batches as an idiom says."""
    accelerator, loader = prepared(package, order)
    accelerator.load_state(directory)
    start, done = divmod(at, BATCHES)
    seen = []
    for epoch in range(start, 2):
        loader.set_epoch(epoch)
        batches: Any = loader
        if epoch == start and idiom == "skip":
            batches = accelerator.skip_first_batches(loader, done)
        if epoch == start and idiom == "islice":
            batches = itertools.islice(loader, done, None)
        for step, batch in enumerate(batches):
            if epoch == start and idiom == "continue" and step < done:
                continue
            seen.append(batch.flatten().tolist())
    return seen


@pytest.mark.parametrize("order", ["plain", "seedable", "random", "stream"])
@pytest.mark.parametrize("at", range(1, 10))
def test_the_idioms_of_resuming(order: str, at: int, tmp_path: Path) -> None:
    whole = interrupted("accelerate", order, None, tmp_path)
    assert interrupted("accelerate", order, at, tmp_path / "state") == whole[:at]
    for idiom in ("skip", "continue", "islice"):
        assert resumed("accelerate", order, idiom, at, tmp_path / "state") == whole[at:], idiom
    begin = at - at % BATCHES
    assert resumed("accelerate", order, "none", at, tmp_path / "state") == whole[begin:], "the epoch is repeated"
    for idiom in ("skip", "none"):
        assert resumed("accel", order, idiom, at, tmp_path / "state") == whole[at:], "natively nothing is repeated"


def test_resume_continues_at_the_position(tmp_path: Path) -> None:
    whole = interrupted("accelerate", "random", None, tmp_path)
    interrupted("accelerate", "random", 3, tmp_path / "checkpoints" / "checkpoint_0")
    from accel.utils import ProjectConfiguration

    set_seed(7)
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = construct("accelerate")(cpu=True, project_config=project)
    loader = accelerator.prepare(DataLoader(torch.arange(10.0)[:, None], batch_size=2, shuffle=True))
    assert accelerator.resume()
    assert [batch.flatten().tolist() for batch in loader] == whole[3:BATCHES]


EPOCHS = 3
Seen = list[tuple[list[float], float]]


class Run:
    """Epochs of a loop that draws a random number in each step, as dropout does."""

    def __init__(self, order: str, workers: int = 0, package: str = "accelerate") -> None:
        set_seed(7)
        config = DataLoaderConfiguration(use_seedable_sampler=order == "seedable")
        self.accelerator = construct(package)(cpu=True, dataloader_config=config)
        generator = torch.Generator().manual_seed(3) if order == "generator" else None
        rows = torch.arange(10.0 * self.accelerator.num_processes)[:, None]
        loader = DataLoader(rows, batch_size=2, shuffle=order != "plain", num_workers=workers, generator=generator)
        self.loader: Any = self.accelerator.prepare(loader)

    def train(self, start: int, done: int = 0, idiom: str = "none", save: tuple[int, int, Any] | None = None) -> Seen:
        """What is seen from a batch of an epoch on, which an idiom of resuming reaches; ``save``: where and to what."""
        seen: Seen = []
        for epoch in range(start, EPOCHS):
            resumes = epoch == start and idiom != "none"
            batches: Any = self.loader
            if resumes and idiom == "skip":
                batches = self.accelerator.skip_first_batches(self.loader, done)
            if resumes and idiom == "islice":
                batches = itertools.islice(self.loader, done, None)
            for step, batch in enumerate(batches):
                if resumes and idiom == "continue" and step < done:
                    continue
                seen.append((batch.flatten().tolist(), torch.rand(()).item()))
                if save is not None and save[:2] == (epoch, step + 1) and step + 1 < BATCHES:
                    self.accelerator.save_state(save[2])
                    return seen
            if save is not None and save[:2] == (epoch, BATCHES):
                self.accelerator.save_state(save[2])
                return seen
        return seen


def compare_resumed(order: str, workers: int, at: list[tuple[int, int]], idioms: list[str], directory: Path) -> None:
    whole = Run(order, workers).train(0)
    for epoch, done in at:
        run, state = Run(order, workers), directory / f"{order}-{workers}-{epoch}-{done}"
        assert run.train(0, save=(epoch, done, state)) == whole[: epoch * BATCHES + done]
        start, left_out = (epoch + 1, 0) if done == BATCHES else (epoch, done)
        expected = whole[epoch * BATCHES + done :]
        for idiom in idioms if left_out else ["none", *idioms]:
            for resumed_run in (run, Run(order, workers)):
                resumed_run.accelerator.load_state(state)
                found = resumed_run.train(start, left_out, idiom)
                label = (order, workers, epoch, done, idiom, "same object" if resumed_run is run else "new object")
                assert found == expected, label


STEPS = [(epoch, done) for epoch in range(2) for done in range(1, BATCHES + 1)]
"""Every step of two epochs; the last of an epoch is saved after the loop."""
IDIOMS = ["skip", "islice", "continue"]
ORDERS = ["plain", "random", "seedable", "generator"]


@pytest.mark.parametrize("order", ORDERS)
def test_states_of_every_step_continue_as_the_uninterrupted_run(order: str, tmp_path: Path) -> None:
    compare_resumed(order, 0, STEPS, IDIOMS, tmp_path)


@pytest.mark.parametrize("order", ["random", pytest.param("seedable", marks=pytest.mark.slow)])  # the same path
def test_states_between_epochs_continue_with_workers(order: str, tmp_path: Path) -> None:
    compare_resumed(order, 2, [(0, BATCHES), (1, 2)], ["skip"], tmp_path)


def compare_in_a_world(directory: str) -> None:
    install()
    for order in ORDERS:
        compare_resumed(order, 0, [(0, 2), (0, BATCHES), (1, BATCHES)], IDIOMS, Path(directory))


@pytest.mark.slow  # the tests above, on two processes
def test_states_of_two_processes_continue_as_the_uninterrupted_run(tmp_path: Path) -> None:
    run_world(compare_in_a_world, 2, str(tmp_path))


def test_an_epoch_of_a_script_for_accelerate_has_the_order_of_plain_pytorch() -> None:
    found = Run("random").train(0)
    set_seed(7)
    loader = DataLoader(torch.arange(10.0)[:, None], batch_size=2, shuffle=True)
    assert found == [(batch.flatten().tolist(), torch.rand(()).item()) for _ in range(EPOCHS) for batch in loader]
