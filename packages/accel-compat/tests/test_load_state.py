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

BATCHES = 5


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    install()
    yield
    sys.path.remove(str(shim_path()))


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
