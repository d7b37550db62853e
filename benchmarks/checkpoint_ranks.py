"""Saving and loading on 1, 2 and 4 ranks, relative to torch.distributed.checkpoint.

    python benchmarks/checkpoint_ranks.py [--ranks 1 2 4] [--megabytes 384] [--rounds 7] [--folder .]

The state is a model and AdamW, sharded by FSDP 2 where there are several ranks. Both libraries collect the state from
the same model, write it with fsync to the same file system, and load it into the same model. accel also writes and
compares digests, a manifest, and the states of random number generators, and renames what is complete; "without
digests and fsync" is the same save with both taken away, against torch's with sync_files=False.

"blocked" is the time until a save in the background lets the loop go on. "training" is the speed of a loop of small
layers on every rank while such a save is written, relative to the loop without one. Every rank has a process that
writes, so where there are more of them than processors, the loop loses processor time to both libraries alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _measure
import _undigested
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel_state.testing import run_world

WIDTH = 1024


class Places:
    """A directory for each save, of which old ones are deleted outside of what is timed."""

    def __init__(self, folder: str) -> None:
        self.folder, self.count = folder, 0

    def next(self, kind: str) -> str:
        self.count += 1
        return f"{self.folder}/{kind}-{self.count}"


def trained(accelerator: Accelerator, megabytes: int) -> tuple[Any, Any]:
    """A prepared model and optimizer whose states have this size together."""
    layers = max(2, megabytes * 2**20 // (3 * 4 * WIDTH * WIDTH))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, WIDTH)).mean())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def speed(goes_on: Callable[[int], bool]) -> float:
    """Steps a second of a loop that needs the interpreter all the time."""
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(40)])
    inputs, steps, begin = torch.randn(8, 32), 0, time.perf_counter()
    while goes_on(steps):
        model(inputs).sum().backward()
        steps += 1
    return steps / (time.perf_counter() - begin)


class Torch:
    """The same with torch.distributed.checkpoint."""

    def __init__(self, model: Any, optimizer: Any, places: Places) -> None:
        self.model, self.optimizer, self.places = model, optimizer, places
        self.last, self.future = "", None

    def state(self) -> dict[str, Any]:
        weights, averages = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": averages}

    def save(self, synced: bool = True) -> None:
        self.last = self.places.next("torch")
        target = dcp.FileSystemWriter(self.last, sync_files=synced)
        dcp.save(self.state(), storage_writer=target)

    def begin(self) -> None:
        target = dcp.FileSystemWriter(self.places.next("torch"))
        kind = AsyncCheckpointerType.PROCESS
        self.future = dcp.async_save(self.state(), storage_writer=target, async_checkpointer_type=kind)

    def running(self) -> bool:
        return not self._done().done()

    def wait(self) -> None:
        self._done().result()

    def _done(self) -> Any:
        found: Any = self.future
        return getattr(found, "upload_completion", found)

    def load(self) -> None:
        state = self.state()
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.last))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Accel:
    """Saving and loading with the Accelerator."""

    def __init__(self, accelerator: Accelerator, places: Places) -> None:
        self.accelerator, self.places, self.last = accelerator, places, ""

    def save(self) -> None:
        self.last = self.places.next("accel")
        self.accelerator.save_state(self.last)

    def begin(self) -> None:
        self.accelerator.save_state(self.places.next("accel"), blocking=False)

    def running(self) -> bool:
        return self.accelerator.save_in_flight

    def wait(self) -> None:
        self.accelerator.wait_for_save()

    def load(self) -> None:
        self.accelerator.load_state(self.last)


def measure(megabytes: int, rounds: int, folder: str) -> dict[str, float]:
    """The figures of one rank; times are until all ranks have ended."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT") if several else None
    accelerator = Accelerator(cpu=True, **({"fsdp_plugin": plugin} if plugin else {}))
    model, optimizer = trained(accelerator, megabytes)
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # torch's process asks for one
    places = Places(folder)
    ours = Accel(accelerator, places)
    theirs = Torch(accelerator.unwrap_model(model), optimizer.optimizer, places)

    def together(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            call()
            accelerator.wait_for_everyone()

        return run

    def bare() -> None:
        with _undigested.saving():
            ours.save()

    def unchecked() -> None:
        with _undigested.loading():
            ours.load()

    def clean() -> None:
        if accelerator.is_main_process:
            for path in Path(folder).iterdir():
                if str(path) not in (ours.last, theirs.last):
                    for file in sorted(path.rglob("*"), reverse=True):
                        file.unlink() if file.is_file() else file.rmdir()
                    path.rmdir()
        os.sync()
        accelerator.wait_for_everyone()

    def in_turns(variants: dict[str, Callable[[], object]], after: Callable[[str], None] = lambda name: None) -> Any:
        times: _measure.Times = {name: [] for name in variants}
        names = list(variants)
        for turn in range(-2, rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                clean()
                begin = time.perf_counter()
                variants[name]()
                took = time.perf_counter() - begin
                after(name)
                if turn >= 0:
                    times[name].append(took)
        return times

    saving = in_turns(
        {
            "torch": together(theirs.save),
            "accel": together(ours.save),
            "torch, not synced": together(lambda: theirs.save(synced=False)),
            "accel, bare": together(bare),
        }
    )
    theirs.save()
    ours.save()
    loading = in_turns(
        {"torch": together(theirs.load), "accel": together(ours.load), "accel, unchecked": together(unchecked)}
    )
    waits = {"torch": theirs.wait, "accel": ours.wait}
    blocked = in_turns({"torch": theirs.begin, "accel": ours.begin}, lambda name: waits[name]())
    figures = {
        "save": _measure.ratio(saving, "accel", "torch"),
        "bare": _measure.ratio(saving, "accel, bare", "torch, not synced"),
        "save_share": _measure.ratio(saving, "accel, bare", "accel"),
        "load": _measure.ratio(loading, "accel", "torch"),
        "unchecked": _measure.ratio(loading, "accel, unchecked", "torch"),
        "blocked": _measure.ratio(blocked, "accel", "torch"),
        "seconds": statistics.median(saving["torch"]),
        "load_seconds": statistics.median(loading["torch"]),
        "blocked_seconds": statistics.median(blocked["torch"]),
    }
    for name, one in (("training", ours), ("torch_training", theirs)):
        figures[name] = training(one, rounds, clean)
    accelerator.end_training()
    if not several:
        dist.destroy_process_group()
    return figures


def training(one: Any, rounds: int, clean: Callable[[], None]) -> float:
    """The speed of a loop while a save is written, relative to the same loop without one: the median of rounds."""
    speed(lambda steps: steps < 50)
    ratios = []
    for _ in range(rounds):
        clean()
        before = speed(lambda steps: steps < 200)
        one.begin()
        during = speed(lambda steps: one.running())
        one.wait()
        clean()
        after = speed(lambda steps: steps < 200)
        ratios.append(2 * during / (before + after))
    return statistics.median(ratios)


def show(ranks: int, megabytes: int, figures: dict[str, float]) -> None:
    """Print the figures of a number of ranks."""
    _measure.heading(
        f"{megabytes} MiB on {ranks} rank{'s' if ranks > 1 else ''}, relative to torch.distributed.checkpoint"
    )

    def target(name: str) -> str:
        return f"target: at most 1.00: {_measure.verdict(figures[name], 1.0)}"

    _measure.row("torch: save, load, blocked", f"{figures['seconds'] * 1e3:.0f} ms", "{:.0f} ms, {:.0f} ms".format(
        figures["load_seconds"] * 1e3, figures["blocked_seconds"] * 1e3))  # fmt: skip
    share = 1 - figures["save_share"]
    _measure.row("save", f"{figures['save']:.3f} x", f"of which digests and fsync: {share:.0%}")
    _measure.row("save without digests and fsync", f"{figures['bare']:.3f} x", target("bare"))
    share = 1 - figures["unchecked"] / figures["load"]
    _measure.row("load", f"{figures['load']:.3f} x", f"of which comparing digests: {share:.0%}")
    _measure.row("load without comparing digests", f"{figures['unchecked']:.3f} x", target("unchecked"))
    _measure.row("blocked by a save in the background", f"{figures['blocked']:.3f} x", target("blocked"))
    _measure.row("training during a save", f"{figures['training']:.3f} x", f"torch: {figures['torch_training']:.3f} x")


def main(ranks: list[int], megabytes: int, rounds: int, parent: str) -> None:
    """Measure each number of ranks and print the tables."""
    for count in ranks:
        with tempfile.TemporaryDirectory(prefix="checkpoint-ranks-", dir=parent) as folder:
            found = run_world(measure, count, megabytes, rounds, folder, timeout=1800)
        # Ranks wait for each other; the loops are their own.
        figures = dict(found[0])
        for name in ("training", "torch_training", "blocked"):
            figures[name] = statistics.mean(one[name] for one in found)
        show(count, megabytes, figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--megabytes", type=int, default=384, help="size of the whole state")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to write")
    chosen = parser.parse_args()
    main(chosen.ranks, chosen.megabytes, chosen.rounds, chosen.folder)
