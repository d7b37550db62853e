"""accel-state alone, in ranks of torch.multiprocessing that make their own process group. numpy is not installed."""

import importlib.util
from collections import namedtuple

import torch
import torch.distributed as dist

from accel_state import PartialState, gather, get_free_port, reduce

RANKS = 2
Pair = namedtuple("Pair", "values names")


def work(rank: int, address: str) -> None:
    """A rank of a script that knows torch only, and asks accel-state for the rest."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    state = PartialState(cpu=True)
    found = (state.process_index, state.num_processes, state.local_process_index, state.is_local_main_process)
    assert found == (rank, RANKS, rank, rank == 0), found
    nested = gather(Pair({"x": torch.tensor([rank, rank + 10])}, [torch.full((1, 2), rank)]))
    assert type(nested).__name__ == "Pair"
    assert nested.values["x"].tolist() == [0, 10, 1, 11] and nested.names[0].tolist() == [[0, 0], [1, 1]]
    assert reduce({"loss": torch.tensor(rank + 1.0)}, "mean")["loss"].item() == 1.5
    with state.split_between_processes(list(range(5))) as share:
        assert share == [[0, 1, 2], [3, 4]][rank], share
    with state.main_process_first():
        pass
    assert dist.is_initialized() and dist.get_rank() == rank, "the group is still the script's"
    dist.destroy_process_group()


if __name__ == "__main__":
    assert importlib.util.find_spec("numpy") is None, "accel-state needs no numpy"
    torch.multiprocessing.spawn(work, (f"tcp://127.0.0.1:{get_free_port()}",), nprocs=RANKS)
    print("mp.spawn with a group of its own: ranks, nested collectives, shares of a list")
