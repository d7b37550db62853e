"""What it costs that the numbers do not depend on the number of processes: a step, relative to DDP.

    python benchmarks/bench_elastic.py

A transformer with dropout and a convolutional network, on processes of one machine over gloo. DDP computes each
process's part of the global batch in one forward pass; elastic loaders compute it in logical shards, with and without
`deterministic_reduction`. The figures are medians over five rounds, in which the variants take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import _measure
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROUNDS = 5
STEPS = 4
SHARDS = 8
DIVIDES_TARGET = 1.15
OTHERWISE_TARGET = 1.3


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        heads = self.inputs(self.before_attention(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1)
        hidden = hidden + self.outputs(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.mlp(self.before_mlp(hidden))


class Transformer(nn.Module):
    """GPT-2's shape, with 0.9 million parameters."""

    def __init__(self, words: int = 256, width: int = 128, layers: int = 4, length: int = 64) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(layers)])
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(tokens) + self.positions))


def transformer(samples: int) -> tuple[nn.Module, TensorDataset]:
    """The model and its data."""
    tokens = torch.randint(256, (samples, 64))
    return Transformer(), TensorDataset(tokens, tokens.roll(-1, 1))


def conv(samples: int) -> tuple[nn.Module, TensorDataset]:
    """The model and its data."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 64, 10))
    return model, TensorDataset(torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,)))


MODELS: dict[str, Callable[[int], tuple[nn.Module, TensorDataset]]] = {"transformer": transformer, "conv net": conv}
# Samples of a global batch: a multiple of every number of processes measured, so that DDP has equal parts.
BATCH = {"transformer": 96, "conv net": 192}


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy over the last dimension."""
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def plain(name: str, world: int) -> Callable[[], None]:
    """A function that runs some steps of raw DDP."""
    model, data = MODELS[name](STEPS * BATCH[name])
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(data, batch_size=BATCH[name] // world, sampler=DistributedSampler(data, shuffle=False))

    def run() -> None:
        for inputs, targets in loader:
            loss_of(wrapped, inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def elastic(name: str, deterministic: bool) -> Callable[[], None]:
    """A function that runs the same steps with an elastic loader."""
    from accel import Accelerator, DataLoaderConfiguration
    from accel_state import AcceleratorState

    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(elastic=True, logical_shards=SHARDS, data_seed=0),
        deterministic_reduction=deterministic,
    )
    model, data = MODELS[name](STEPS * BATCH[name])
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4), DataLoader(data, batch_size=BATCH[name])
    )

    def run() -> None:
        for inputs, targets in loader:
            accelerator.backward(loss_of(model, inputs, targets))
            optimizer.step()
            optimizer.zero_grad()

    return run


def work(name: str) -> None:
    """Measure one model in this process, which is one of several."""
    from accel_state import PartialState

    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    variants = {
        "raw": plain(name, state.num_processes),
        "elastic": elastic(name, False),
        "deterministic": elastic(name, True),
    }
    # Wall-clock time, because the ranks wait for each other.
    times = _measure.in_turns(variants, ROUNDS, warm_up=1, clock=time.perf_counter)
    if state.is_main_process:
        figures = {variant: statistics.median(seconds) / STEPS for variant, seconds in times.items()}
        ratios = {variant: _measure.ratio(times, variant) for variant in ("elastic", "deterministic")}
        _measure.report({"seconds": figures, "ratios": ratios})
    state.destroy_process_group()


def main(worlds: list[int]) -> None:
    """Print the table and compare the figures with the targets."""
    import sys

    for world in worlds:
        divides = SHARDS % world == 0
        target = DIVIDES_TARGET if divides else OTHERWISE_TARGET
        _measure.heading(f"{SHARDS} logical shards on {world} processes{'' if divides else ' (not a divisor)'}")
        for name in MODELS:
            found = _measure.worker(sys.executable, __file__, "--model", name, processes=world, timeout=900)
            _measure.row(f"{name}, raw DDP", f"{found['seconds']['raw'] * 1e3:.0f} ms")
            for variant, figure in found["ratios"].items():
                note = f"target: at most {target:.2f}: {_measure.verdict(figure, target)}"
                _measure.row(f"{name}, {variant}", f"{figure:.3f} x", note if variant == "deterministic" else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, help="measure this model here (used for the worker processes)")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4], help="numbers of processes")
    arguments = parser.parse_args()
    work(arguments.model) if arguments.model else main(arguments.worlds)
