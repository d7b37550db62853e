"""accel-data alone, with loaders of other libraries: no sample lost, none repeated, and an exact resume."""

import importlib.util

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_data import prepare_data_loader


class Stream(IterableDataset):
    """A stream of no library."""

    def __iter__(self):
        return iter(range(22))


def samples(loader) -> list[int]:
    """All samples of a loader, in order."""
    return [int(sample) for batch in loader for sample in batch]


def resumes(make, name: str) -> None:
    """The rest after two batches equals that of an undisturbed epoch."""
    whole = samples(make())
    assert sorted(whole) == list(range(22)), (name, whole)
    first = make()
    iterator = iter(first)
    seen = [int(sample) for _ in range(2) for sample in next(iterator)]
    second = make()
    second.load_state_dict(first.state_dict())
    assert seen + samples(second) == whole, name
    print(f"{name}: nothing lost, exact resume")


def shuffled() -> DataLoader:
    """A loader of torch, with its own generator."""
    return prepare_data_loader(
        DataLoader(range(22), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    )


resumes(shuffled, "DataLoader")
resumes(lambda: prepare_data_loader(DataLoader(Stream(), batch_size=4)), "IterableDataset")
if importlib.util.find_spec("torchdata"):
    from torchdata.nodes import Batcher, IterableWrapper, Loader

    resumes(lambda: prepare_data_loader(Loader(Batcher(IterableWrapper(range(22)), 4, drop_last=False))), "torchdata")
if importlib.util.find_spec("webdataset"):
    import io
    import tarfile

    import webdataset

    with tarfile.open("shard.tar", "w") as archive:
        for number in range(22):
            entry = tarfile.TarInfo(f"{number:04}.cls")
            entry.size = len(str(number))
            archive.addfile(entry, io.BytesIO(str(number).encode()))
    data = webdataset.WebDataset("shard.tar", shardshuffle=False).decode().to_tuple("cls").map(lambda row: row[0])
    assert sorted(samples(prepare_data_loader(DataLoader(data, batch_size=4)))) == list(range(22))
    print("webdataset: nothing lost")
if importlib.util.find_spec("datasets"):
    from datasets import Dataset

    rows = Dataset.from_dict({"x": list(range(22))}).with_format("torch")
    found = [int(x) for batch in prepare_data_loader(DataLoader(rows, batch_size=4)) for x in batch["x"]]
    assert found == list(range(22))
    print("datasets: nothing lost")
