"""The overhead of sharded training over the same strategy in plain PyTorch, on two processes: steps and checkpoints.

    python benchmarks/bench_fsdp.py [--megabytes 384] [--folder .] [--only steps] [--seconds 20]

Steps: a model of blocks in a usual training loop, once wrapped with FullyShardedDataParallel or fully_shard directly,
and once prepared. The two, and plain PyTorch a second time to show the noise, are interleaved in one process group.
Checkpoints: the weights and AdamW's state, sharded, saved by torch.distributed.checkpoint (with fsync) and by
save_state, which also writes digests and a manifest, and verifies every byte before anything is loaded. Each table
takes about --seconds, with a minimum number of rounds, and is printed when it is measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _measure
import torch
from bench_step import figures_of, plain_epoch, prepared_epoch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEP_TARGET = 1.03
SAVE_TARGET = 1.1
LOAD_TARGET = 1.1
WIDTH, DEPTH, BATCH = 256, 4, 64
STEPS = 8
MOST_ROUNDS, LEAST_ROUNDS = 30, 6
CHECKPOINT_ROUNDS = 9
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "fully_shard")


class Block(nn.Module):
    """A transformer block without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_model(width: int = WIDTH, depth: int = DEPTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(depth)], nn.Linear(width, 4))


def shard(model: nn.Module, strategy: str) -> nn.Module:
    """Apply the strategy in plain PyTorch, with the blocks as units."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if strategy == "fully_shard":
        for unit in (*(module for module in model if isinstance(module, Block)), model):  # type: ignore[union-attr]
            fully_shard(unit)
        return model
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def settings_of(strategy: str) -> dict[str, Any]:
    """The plugin arguments for the same strategy."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    common = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "state_dict_type": "SHARDED_STATE_DICT"}
    return {**common, "fsdp_version": 2} if strategy == "fully_shard" else {**common, "sharding_strategy": strategy}


def accelerator_for(strategy: str) -> Any:
    """An Accelerator with this strategy."""
    from accel import Accelerator, FullyShardedDataParallelPlugin

    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**settings_of(strategy)))


def rounds_in(accelerator: Any, seconds: float, took: float, most: int, least: int) -> int:
    """The number of rounds that fit into a time, given the time of one; equal on all ranks."""
    return int(
        accelerator.process_state.collectives.broadcast_object(min(most, max(least, int(seconds / max(took, 1e-6)))))
    )


def time_steps(strategy: str, seconds: float) -> dict[str, float]:
    """Time the training step of one strategy."""
    accelerator = accelerator_for(strategy)
    data = TensorDataset(torch.randn(2 * STEPS * BATCH, WIDTH), torch.randint(4, (2 * STEPS * BATCH,)))

    def parts(model: nn.Module, sampler: Any = None) -> tuple[Any, ...]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return model, optimizer, scheduler, DataLoader(data, batch_size=BATCH, sampler=sampler)

    def plain() -> Callable[[], None]:
        return plain_epoch(*parts(shard(make_model(), strategy), DistributedSampler(data, shuffle=False)))

    prepared = accelerator.prepare(*parts(make_model()))
    variants = {"raw": plain(), "prepared": prepared_epoch(accelerator, *prepared), "raw again": plain()}
    # Wall-clock time, because the ranks wait for each other.
    _measure.in_turns(variants, 1, clock=time.perf_counter)
    begin = time.perf_counter()
    _measure.in_turns(variants, 1, warm_up=0, clock=time.perf_counter)
    rounds = rounds_in(accelerator, seconds, time.perf_counter() - begin, MOST_ROUNDS, LEAST_ROUNDS)
    figures = figures_of(_measure.in_turns(variants, rounds, warm_up=0, clock=time.perf_counter), STEPS)
    accelerator.free_memory()
    return figures


def plain_save(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Save with torch.distributed.checkpoint and fsync."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer)
    writer = checkpoint.FileSystemWriter(folder, sync_files=True)
    checkpoint.save({"model": weights, "optimizer": state}, storage_writer=writer)


def plain_load(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Load with torch.distributed.checkpoint."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, state = get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": state}, storage_reader=checkpoint.FileSystemReader(folder))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def time_checkpoints(strategy: str, megabytes: int, place: Path, seconds: float) -> dict[str, float]:
    """Time saving and loading with one strategy; the size is that of the full state."""
    accelerator = accelerator_for(strategy)
    width = 1024
    model = make_model(width, max(1, megabytes * 2**20 // (3 * 4 * 4 * width * width)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(2, width)).sum())
    optimizer.step()
    optimizer.zero_grad()
    inner = optimizer.optimizer

    def clean(folder: Path) -> Path:
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()  # so that pending writes do not slow the next variant down
        accelerator.wait_for_everyone()
        return folder

    def turns(variants: dict[str, Callable[[], None]], fresh: bool) -> _measure.Times:
        times: _measure.Times = {name: [] for name in variants}
        turn, until = -1, CHECKPOINT_ROUNDS
        while turn < until:
            started = time.perf_counter()
            for name in list(variants)[:: 1 if turn % 2 else -1]:
                if fresh:
                    clean(place / name)
                begin = time.perf_counter()
                variants[name]()
                accelerator.wait_for_everyone()
                if turn >= 0:
                    times[name].append(time.perf_counter() - begin)
            if turn == 0:
                until = rounds_in(
                    accelerator, seconds / 2, time.perf_counter() - started, CHECKPOINT_ROUNDS, LEAST_ROUNDS - 1
                )
            turn += 1
        return times

    saving = {
        "raw": lambda: plain_save(model, inner, place / "raw"),
        "ours": lambda: accelerator.save_state(str(place / "ours")) and None,
    }
    saved = turns(saving, fresh=True)
    loading = {
        "raw": lambda: plain_load(model, inner, place / "raw"),
        "ours": lambda: accelerator.load_state(str(place / "ours")),
    }
    loaded = turns(loading, fresh=False)
    accelerator.free_memory()
    return {
        "raw_save": statistics.median(saved["raw"]),
        "save": _measure.ratio(saved, "ours"),
        "raw_load": statistics.median(loaded["raw"]),
        "load": _measure.ratio(loaded, "ours"),
    }


def work(megabytes: int, parent: str, only: str, seconds: float) -> None:
    """Measure in this process, which is one of two ranks."""
    from accel_state import PartialState

    torch.set_num_threads(1)
    state = PartialState(cpu=True)

    def tell(kind: str, strategy: str, figures: dict[str, float]) -> None:
        if state.is_main_process:
            _measure.report([kind, strategy, figures])

    if only != "checkpoints":
        for strategy in STRATEGIES:
            tell("steps", strategy, time_steps(strategy, seconds))
    if only != "steps":
        made = tempfile.mkdtemp(prefix="bench-fsdp-", dir=parent) if state.is_main_process else ""
        place = Path(state.collectives.broadcast_object(made))
        try:
            for strategy in ("FULL_SHARD", "fully_shard"):
                tell("checkpoints", strategy, time_checkpoints(strategy, megabytes, place, seconds))
        finally:
            if state.is_main_process:
                shutil.rmtree(place, ignore_errors=True)
    state.destroy_process_group()


def show_steps(strategy: str, figures: dict[str, float]) -> None:
    """Print the table of a step."""
    _measure.heading(f"A step with {strategy} on two processes")
    _measure.row("plain PyTorch", f"{figures['raw']:.0f} us", f"(noise: {figures['noise']:.3f} x)")
    note = f"target: at most {STEP_TARGET:.2f}: {_measure.verdict(figures['ratio'], STEP_TARGET)}"
    _measure.row("accel, relative to plain PyTorch", f"{figures['ratio']:.3f} x", note)


def show_checkpoints(strategy: str, figures: dict[str, float], megabytes: int) -> None:
    """Print the table of saving and loading."""
    _measure.heading(f"A checkpoint of {megabytes} MiB with {strategy} on two processes")
    for what, target in (("save", SAVE_TARGET), ("load", LOAD_TARGET)):
        raw = figures[f"raw_{what}"]
        _measure.row(
            f"torch.distributed.checkpoint: {what}", f"{raw * 1e3:.0f} ms", f"{megabytes / 1024 / raw:.2f} GiB/s"
        )
        note = f"target: at most {target:.2f}: {_measure.verdict(figures[what], target)}"
        _measure.row(f"accel: {what}, relative to torch", f"{figures[what]:.3f} x", note)


def main(megabytes: int, parent: str, only: str, seconds: float) -> None:
    """Print the tables and the verdicts."""
    words = ("--worker", "--megabytes", str(megabytes), "--folder", parent, "--only", only, "--seconds", str(seconds))
    for kind, strategy, figures in _measure.reports(sys.executable, __file__, *words, processes=2, timeout=1800):
        if kind == "steps":
            show_steps(strategy, figures)
        else:
            show_checkpoints(strategy, figures, megabytes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=384, help="size of the state in the checkpoints")
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="where to write (default: the temporary directory)"
    )
    parser.add_argument("--only", choices=("", "steps", "checkpoints"), default="", help="measure only these")
    parser.add_argument("--seconds", type=float, default=20, help="approximate measuring time per table")
    parser.add_argument(
        "--worker", action="store_true", help="measure in this process (used internally for the worker processes)"
    )
    chosen = parser.parse_args()
    (work if chosen.worker else main)(chosen.megabytes, chosen.folder, chosen.only, chosen.seconds)
