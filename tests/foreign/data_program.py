"""accel-data alone, with loaders of other libraries: no sample lost, none repeated, and an exact resume."""

import functools
import importlib.util
import io
import os
import tarfile

import torch
import torch.distributed as dist
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


def split_samples(rank: int, address: str, folder: str) -> None:
    """On one of two ranks: the samples of four shards that webdataset or torchdata splits among the ranks itself."""
    import webdataset
    from torch.utils.data import DistributedSampler
    from torchdata.nodes import Batcher, Loader, SamplerWrapper

    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    shards = [f"{folder}/{number}.tar" for number in range(4)]
    loaders = [Loader(Batcher(SamplerWrapper(DistributedSampler(range(24))), 3))]
    for splitter in (webdataset.split_by_node, functools.partial(webdataset.split_by_node)):
        data = webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=splitter)
        data = data.decode().to_tuple("cls").map(lambda row: row[0])
        loaders += [DataLoader(data, batch_size=3), webdataset.WebLoader(data, batch_size=3)]
    for loader in loaders:
        gathered = [None, None]
        dist.all_gather_object(gathered, samples(prepare_data_loader(loader)))
        assert sorted([*gathered[0], *gathered[1]]) == list(range(24)), gathered
    dist.destroy_process_group()


def write_shard(name: str, numbers: range) -> None:
    """A shard of webdataset with a number in each sample."""
    with tarfile.open(name, "w") as archive:
        for number in numbers:
            entry = tarfile.TarInfo(f"{number:04}.cls")
            entry.size = len(str(number))
            archive.addfile(entry, io.BytesIO(str(number).encode()))


def main() -> None:
    """Run what is installed."""
    resumes(shuffled, "DataLoader")
    resumes(lambda: prepare_data_loader(DataLoader(Stream(), batch_size=4)), "IterableDataset")
    if importlib.util.find_spec("torchdata"):
        from torchdata.nodes import Batcher, IterableWrapper, Loader

        resumes(
            lambda: prepare_data_loader(Loader(Batcher(IterableWrapper(range(22)), 4, drop_last=False))), "torchdata"
        )
    if importlib.util.find_spec("webdataset"):
        import webdataset

        write_shard("shard.tar", range(22))
        data = webdataset.WebDataset("shard.tar", shardshuffle=False).decode().to_tuple("cls").map(lambda row: row[0])
        assert sorted(samples(prepare_data_loader(DataLoader(data, batch_size=4)))) == list(range(22))
        print("webdataset: nothing lost")
        if importlib.util.find_spec("torchdata"):
            for shard in range(4):
                write_shard(f"{shard}.tar", range(6 * shard, 6 * shard + 6))
            store = f"file://{os.getcwd()}/store"
            torch.multiprocessing.spawn(split_samples, (store, os.getcwd()), nprocs=2)
            print("split among two ranks by webdataset, by torchdata: nothing lost, none repeated")
    if importlib.util.find_spec("datasets"):
        from datasets import Dataset

        rows = Dataset.from_dict({"x": list(range(22))}).with_format("torch")
        found = [int(x) for batch in prepare_data_loader(DataLoader(rows, batch_size=4)) for x in batch["x"]]
        assert found == list(range(22))
        print("datasets: nothing lost")


if __name__ == "__main__":
    main()
