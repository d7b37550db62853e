"""What planning a sharded save costs: bytes that each rank sends, and CPU time, against torch.distributed.checkpoint.

    python benchmarks/checkpoint_scale.py [--real 2 4 8] [--simulated 256 1024 4096] [--tensors 300]

The state has sharded tensors, a third as many plain ones, and the settings of an optimizer. Real ranks are processes
with gloo. Simulated ones are one process with torch's fake process group, which plays rank 0: it plans its own part,
and makes the metadata of all ranks. Target: at most 4 KB sent and 0.2 s of CPU a rank, and 20 s for the metadata.
"""

from __future__ import annotations

import argparse
import pickle
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from accel_checkpoint.sharded.metadata import parse_metadata
from accel_checkpoint.sharded.writer import shard_state
from accel_state import PartialState
from accel_state.testing import run_world


class Counted:
    """Collectives that count the bytes that this rank gives them."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.sent = inner, 0
        self.rank, self.world_size = inner.rank, inner.world_size

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._inner, name)

        def call(value: Any, *args: Any) -> Any:
            self.sent += value.nbytes if isinstance(value, torch.Tensor) else len(pickle.dumps(value))
            return function(value, *args)

        return call


class Alone:
    """The collectives of rank 0 among ranks that all have the same."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """The largest of equal values is the value."""
        del op
        return tensor


def state_of(world: int, tensors: int) -> dict[str, Any]:
    """A state of which each rank has two rows of each sharded tensor."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    names = [f"layers.{number}.weight" for number in range(tensors)]
    sharded = {}
    for name in names:
        sharded[name] = DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)], run_check=False)
    steps = {name: torch.tensor(1.0) for name in names[::3]}
    return {"model": sharded, "steps": steps, "param_groups": [{"lr": 0.1, "params": names}]}


def planned(state: dict[str, Any], collectives: Any) -> tuple[int, float, Any]:
    """Bytes sent, seconds of CPU, and what writes the metadata."""
    counted = Counted(collectives)
    begin = time.process_time()
    _, finalize = shard_state(state, "s", counted)
    return counted.sent, time.process_time() - begin, finalize


def torch_planned(state: dict[str, Any]) -> tuple[int, float]:
    """The same for the plans that torch's planner exchanges: its own to rank 0, and on rank 0 those of all."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    begin = time.process_time()
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=dist.get_rank() == 0)
    plan = planner.create_local_plan()
    plans: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(plan, plans)
    sent = len(pickle.dumps(plan))
    if plans is not None:
        global_plans, _ = planner.create_global_plan(plans)
        sent = sum(len(pickle.dumps(item)) for item in global_plans[1:])
    return sent, time.process_time() - begin


def real(tensors: int) -> dict[str, Any]:
    """What one of several processes measures."""
    process = PartialState()
    state = state_of(process.num_processes, tensors)
    shard_state(state, "s", process.collectives)  # the first call imports and connects
    first, second = planned(state, process.collectives), planned(state, process.collectives)
    theirs = torch_planned(state)
    return {"first": first[:2], "second": second[:2], "torch": theirs}


def simulated(world: int, tensors: int) -> tuple[int, float, float, float, float]:
    """Bytes and CPU of rank 0's plan, CPU and MiB of the metadata of all ranks, and CPU of reading it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    state = state_of(world, tensors)
    planned(state, Alone(world))
    sent, seconds, finalize = planned(state, Alone(world))
    begin = time.process_time()
    from accel_checkpoint.gc_pause import without_collection

    with without_collection():
        content = pickle.dumps(finalize.keywords["make"]())
    taken = time.process_time() - begin
    begin = time.process_time()
    parse_metadata(content, "metadata")
    reading = time.process_time() - begin
    dist.destroy_process_group()
    return sent, seconds, taken, len(content) / 2**20, reading


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=int, nargs="*", default=[2, 4, 8], help="numbers of processes")
    parser.add_argument("--simulated", type=int, nargs="*", default=[256, 1024, 4096], help="numbers of ranks")
    parser.add_argument("--tensors", type=int, default=300, help="sharded tensors")
    options = parser.parse_args()
    print("| ranks | | bytes sent, most of any rank | CPU ms, most of any rank |\n| ---: | --- | ---: | ---: |")
    for world in options.real:
        results = run_world(real, world, options.tensors, timeout=280)
        for name in ("first", "second", "torch"):
            sent = max(result[name][0] for result in results)
            milliseconds = 1e3 * max(result[name][1] for result in results)
            print(f"| {world} | {name} | {sent:,} | {milliseconds:.0f} |", flush=True)
    print("\n| simulated ranks | bytes sent | CPU ms of a rank | metadata, once: CPU s | MiB | reading it: CPU s |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for world in options.simulated:
        sent, seconds, taken, size, reading = simulated(world, options.tensors)
        row = f"{seconds * 1e3:.0f} | {taken:.1f} | {size:.0f} | {reading:.1f}"
        print(f"| {world:,} | {sent} | {row} |", flush=True)


if __name__ == "__main__":
    main()
