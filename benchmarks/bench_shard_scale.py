"""The cost of sharding 100 million samples over 1 to 16,384 ranks. No processes are started.

    python benchmarks/bench_shard_scale.py [--length N] [--batch-size B] [--batches K]

For each world size, the last rank, which skips most samples, draws batches of indices. The table shows microseconds per
batch, the time to the first batch from the middle of the epoch (resuming), and the peak memory allocated by Python. A
shuffled epoch also draws a permutation once, with 4 bytes per sample; the column "first ms" shows its cost.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accel_data import BatchSamplerShard, SeedableRandomSampler
from accel_data.batch_shard import EpochStart
from accel_data.samplers import PermutationSource, random_access_source

WORLDS = (1, 2, 8, 64, 512, 4096, 16_384)


def shard_of_last_rank(sampler: Any, batch_size: int, world: int) -> BatchSamplerShard:
    """The shard of the last rank."""
    return BatchSamplerShard(BatchSampler(sampler, batch_size, False), world, world - 1)


def seconds(function: Callable[[], object]) -> float:
    """The time of a call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def draw(batches: Iterator[Any], count: int) -> int:
    """Draw some batches; returns their number."""
    return sum(1 for _ in islice(batches, count))


def measure(sampler: Any, length: int, batch_size: int, count: int, world: int) -> tuple[float, float, float, int]:
    """Microseconds per batch, milliseconds to the first batch from the middle and from the start, and peak bytes."""
    shard = shard_of_last_rank(sampler, batch_size, world)
    batches = iter(shard)
    first = seconds(lambda: next(batches))
    count = min(count, len(shard) - 1)
    per_batch = min(seconds(lambda: draw(batches, count // 5)) / (count // 5) for _ in range(4))
    middle = length // 2 // shard.step_size * shard.step_size
    shard.begin_at(EpochStart(middle))
    resumed = seconds(lambda: next(iter(shard)))
    tracemalloc.start()
    draw(iter(shard_of_last_rank(sampler, batch_size, world)), min(count, 200))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return per_batch * 1e6, resumed * 1e3, first * 1e3, peak


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=100_000_000, help="samples in the data set")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--batches", type=int, default=2000, help="batches to draw per figure")
    options = parser.parse_args()
    data = range(options.length)
    print(f"{options.length:,} samples, batch size {options.batch_size}, last rank of each world")
    print(f"{'sampler':<12}{'world size':>12}{'us/batch':>12}{'resume ms':>12}{'first ms':>12}{'Python peak KiB':>18}")
    for name, sampler in (
        ("sequential", SequentialSampler(data)),
        ("seedable", SeedableRandomSampler(data, data_seed=0)),
    ):
        for world in WORLDS:
            per_batch, resumed, first, peak = measure(
                sampler, options.length, options.batch_size, options.batches, world
            )
            print(
                f"{name:<12}{world:>12,}{per_batch:>12.2f}{resumed:>12.2f}{first:>12.2f}{peak / 1024:>18.1f}",
                flush=True,
            )
    shuffle(options.length)


def shuffle(length: int) -> None:
    """Print what the order of an epoch takes, and its end, when the generator is left as plain PyTorch leaves it."""
    generator = torch.Generator().manual_seed(0)
    begin = time.process_time()
    source = random_access_source(RandomSampler(range(length), generator=generator))
    assert isinstance(source, PermutationSource)
    drawn = time.process_time()
    source.close()
    closed = time.process_time()
    size = source.permutation.nbytes
    print(f"a shuffle takes {size / length:g} bytes a sample, {size / 2**20:.0f} MiB (target: at most 4)")
    print(f"and {drawn - begin:.2f} s of processor time")
    part = (closed - drawn) / (drawn - begin)
    print(f"the end of a shuffled epoch takes {part:.2f} x the processor time of its begin (target: at most 0.25)")


if __name__ == "__main__":
    main()
