"""What a resumed run is handed: exactly the rest of what the uninterrupted run was, whatever the loader and wherever it
stopped.

A case is a loader and a place to stop. The uninterrupted run saves there and goes on; the resumed one is a fresh
Accelerator, with other random numbers before the load, that reads the state from the disk. Compared are the batches on
every rank, every random number that the data set drew in them (in worker processes too), and those that the loop drew
between them, as dropout does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from accel import Accelerator, DataLoaderConfiguration
from accel_state import AcceleratorState
from accel_state.random import set_seed

EPOCHS = 3


def sample(index: int) -> torch.Tensor:
    """An id, and a number from each generator, as augmentation draws them."""
    return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


class Samples(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return sample(index)


class Stream(IterableDataset):
    """Each worker reads samples of its own; optionally in an order drawn from python's generator."""

    def __init__(self, length: int, shuffled: bool = False) -> None:
        self.length = length
        self.shuffled = shuffled

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(self.length))
        if self.shuffled:
            random.Random(int(torch.randint(1000, ()))).shuffle(order)
        info = get_worker_info()
        if info is not None:
            order = order[info.id :: info.num_workers]
        return map(sample, order)


class Sources(Stream):
    """A stream whose sources can be divided among the ranks."""

    def __init__(self, length: int, numbers: list[int] | None = None) -> None:
        super().__init__(length)
        self.numbers = list(range(length)) if numbers is None else numbers
        self.num_shards = 4

    def shard(self, num_shards: int, index: int) -> Sources:
        return Sources(self.length, self.numbers[index::num_shards])

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        return map(sample, self.numbers if info is None else self.numbers[info.id :: info.num_workers])


class Positioned(IterableDataset):
    """A stream that knows its position, and can be entered there."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.position = 0
        self.loaded = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.loaded:
            self.position = 0
        self.loaded = False
        while self.position < self.length:
            self.position += 1
            yield sample(self.position - 1)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
        self.loaded = True


class FromNumpy(Sampler):
    """A user's sampler, which draws its order from the process's own generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(self.length).tolist())

    def __len__(self) -> int:
        return self.length


class ByEpoch(FromNumpy):
    """A user's sampler, whose order depends on its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.RandomState(self.epoch).permutation(self.length).tolist())


class Buckets(Sampler):
    """A user's batch sampler, with batches of any size."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.length, generator=self.generator).tolist()
        while order:
            size = 1 + int(torch.randint(3, (), generator=self.generator))
            yield order[:size]
            order = order[size:]

    def __len__(self) -> int:
        return self.length


MAP_KINDS = [
    "sequential",
    "shuffle",
    "generator",
    "seedable",
    "weighted",
    "subset",
    "numpy",
    "by-epoch",
    "random-batches",
    "buckets",
    "items",
]
STREAM_KINDS = ["stream", "shuffled-stream", "sources", "declared", "positioned"]


@dataclass(frozen=True)
class Case:
    """A loader, and after how many steps of the whole run it stops."""

    kind: str
    length: int
    batch_size: int
    stop: int
    workers: int = 0
    persistent: bool = False
    dispatch: bool = False
    split: bool = False
    even: bool = True
    drop_last: bool = False
    stateful: bool = False

    @property
    def loses_worker_generators(self) -> bool:
        """torchdata enters such a stream in its workers by itself, with fresh generators (documented)."""
        return self.stateful and self.workers > 0 and self.kind == "positioned"

    @property
    def is_map(self) -> bool:
        return self.kind in MAP_KINDS or self.kind == "distributed"


def sampling(case: Case, data: Samples) -> dict[str, Any]:
    """Arguments of the loader that make the order."""
    n, batching = case.length, {"batch_size": case.batch_size, "drop_last": case.drop_last}
    if case.kind in ("shuffle", "seedable"):
        return {**batching, "shuffle": True}
    if case.kind == "generator":
        return {**batching, "shuffle": True, "generator": torch.Generator().manual_seed(3)}
    if case.kind == "random-batches":
        return {"batch_sampler": BatchSampler(RandomSampler(data), case.batch_size, case.drop_last)}
    if case.kind == "buckets":
        return {"batch_sampler": Buckets(n)}
    if case.kind == "items":
        return {"batch_size": None, "shuffle": True}
    if case.kind == "distributed":
        world = Accelerator(cpu=True)
        return {
            **batching,
            "sampler": DistributedSampler(data, world.num_processes, world.process_index, drop_last=case.drop_last),
        }
    samplers = {
        "sequential": lambda: None,
        "weighted": lambda: WeightedRandomSampler([1.0 + i % 3 for i in range(n)], n),
        "subset": lambda: SubsetRandomSampler(range(n)),
        "numpy": lambda: FromNumpy(n),
        "by-epoch": lambda: ByEpoch(n),
    }
    return {**batching, "sampler": samplers[case.kind]()}


def plain_loader(case: Case) -> DataLoader[Any]:
    workers: dict[str, Any] = {"num_workers": case.workers, "persistent_workers": case.persistent}
    if case.workers:
        # What Linux has by default; in the ranks of run_world it is another one, which imports torch for every worker.
        workers["multiprocessing_context"] = "fork"
    if case.is_map:
        data = Samples(case.length)
        return DataLoader(data, **sampling(case, data), **workers)
    stream: Any = {
        "stream": Stream,
        "shuffled-stream": lambda length: Stream(length, True),
        "sources": Sources,
        "declared": Sources,
        "positioned": Positioned,
    }[case.kind](case.length)
    if case.kind == "declared":
        world = Accelerator(cpu=True)
        stream = stream.shard(world.num_processes, world.process_index)
        stream.already_sharded = True
    return DataLoader(stream, batch_size=case.batch_size, drop_last=case.drop_last, **workers)


class Run:
    """A training loop without a model: what it is handed, and what it draws."""

    def __init__(self, case: Case, seed: int) -> None:
        AcceleratorState._reset_state()
        set_seed(seed, device_specific=True)
        config = DataLoaderConfiguration(
            dispatch_batches=case.dispatch,
            split_batches=case.split,
            even_batches=case.even,
            use_seedable_sampler=case.kind == "seedable",
            use_stateful_dataloader=case.stateful,
        )
        self.accelerator = Accelerator(cpu=True, dataloader_config=config)
        self.loader = self.accelerator.prepare(plain_loader(case))
        self.steps: list[Any] = []
        self.epochs: list[int] = []

    def go(self, case: Case, stop: int = -1, folder: Path | None = None) -> Run:
        """Run to the end, and save after ``stop`` steps."""
        while self.loader.iteration < EPOCHS:
            for batch in self.loader:
                drawn = (torch.rand(()).item(), np.random.rand(), random.random())
                padding = self.loader.real_samples
                # A rank without data left repeats its last batch, which counts for nothing, without reading it anew.
                only_ids = (padding == 0 and not case.is_map) or case.loses_worker_generators
                values = batch[..., 0].tolist() if only_ids else batch.tolist()
                self.steps.append((values, padding, self.accelerator.gradient_state.end_of_dataloader, drawn))
                self.epochs.append(self.loader.iteration)
                if len(self.steps) == stop:
                    self.accelerator.save_state(folder)
                if self.accelerator.num_processes > 1:
                    # What a backward pass does: no rank is a step ahead of another.
                    self.accelerator.wait_for_everyone()
        return self


def check(case: Case, folder: Path) -> list[str]:
    """Compare the two runs, and tell what is wrong with the resumed one."""
    folder = folder / "state"
    whole = Run(case, seed=1).go(case, case.stop, folder)
    if case.stop > len(whole.steps):
        return []
    resumed = Run(case, seed=77)
    resumed.accelerator.load_state(folder)
    resumed.go(case)
    wrong = [
        f"step {case.stop + 1 + n}: {a} instead of {b}"
        for n, (a, b) in enumerate(zip_longest(resumed.steps, whole.steps[case.stop :]))
        if a != b
    ]
    if resumed.epochs != whole.epochs[case.stop :]:
        wrong.append(f"epochs {resumed.epochs} instead of {whole.epochs[case.stop :]}")
    if case.is_map and case.workers == 0 and case.kind != "items" and not case.dispatch:
        handed_out = sum(len(batch) for batch, *_ in resumed.steps)
        if resumed.loader.dataset.reads != handed_out:
            wrong.append(f"{resumed.loader.dataset.reads} samples were read to hand out {handed_out}")
    return [f"{case} on rank {resumed.accelerator.process_index}: {text}" for text in wrong]


@st.composite
def cases(draw: st.DrawFn, world: int, workers: int, stateful: bool = False) -> Case:
    """Any loader that can be built."""
    kind = draw(st.sampled_from([*MAP_KINDS, *(["distributed"] if world > 1 else []), *STREAM_KINDS]))
    dispatch = draw(st.booleans()) and kind not in ("declared", "distributed")
    split = draw(st.booleans()) and kind not in ("buckets", "items")
    size = draw(st.integers(1, 3))
    case = Case(
        kind,
        length=draw(st.integers(world * 2, 30)),
        batch_size=size * world if split else size,
        stop=draw(st.integers(1, 30)),
        workers=workers,
        persistent=workers > 0 and draw(st.booleans()),
        dispatch=dispatch,
        split=split,
        even=draw(st.booleans()),
        drop_last=draw(st.booleans()) and kind not in ("buckets", "items"),
        stateful=stateful,
    )
    # Ranks without a batch leave their loop before the others, who meet at the end of each step.
    assume(case.even or world == 1 or dispatch or kind in ("sources", "declared"))
    return case


def drawn(strategy: st.SearchStrategy[Case], count: int) -> list[Case]:
    """Cases for a world of processes, which share one process group."""
    found: list[Case] = []

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def check_all(found: list[Case], folder: str) -> list[str]:
    """In each rank of a world."""
    return [wrong for number, case in enumerate(found) for wrong in check(case, Path(folder) / str(number))]
