"""What a big model costs before its weights are read: building it without values, and loading a small one.

    python benchmarks/bigmodel_start.py

Processor time of building 1,600 blocks in ``init_empty_weights``, against the reference if an interpreter has it (see
_measure.py). The first load of a small model with a device map in a process, against torch's: its processor time, the
modules that it imports, and its full garbage collections, each of which takes longer than the load. Medians of
processes that take turns.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import sys
import tempfile
import time
from typing import Any

import _measure
import torch
from safetensors.torch import load_file, save_file
from torch import nn

BLOCKS, ROUNDS = 1600, 7
EMPTY_TARGET, LOAD_TARGET = 1.0, 0.010
RAW = "torch"


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def build(blocks: int) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(blocks)))


def empty(library: str, _: str) -> dict[str, float]:
    """Processor seconds to build many blocks without values."""
    context = importlib.import_module(library).init_empty_weights
    seconds = []
    for _turn in range(3):
        gc.collect()
        begin = time.process_time()
        with context():
            build(BLOCKS)
        seconds.append(time.process_time() - begin)
    return {"seconds": min(seconds)}


def small(library: str, file: str) -> dict[str, float]:
    """Processor seconds of the first load of a small model in this process, and what happens besides."""
    load = None if library == RAW else importlib.import_module(library).load_checkpoint_and_dispatch
    collections: list[int] = []
    gc.callbacks.append(lambda phase, info: collections.append(info["generation"]) if phase == "start" else None)
    with torch.device("meta"):
        model = build(2)
    modules = len(sys.modules)
    collections.clear()
    begin = time.process_time()
    if load is None:
        model.load_state_dict(load_file(file), assign=True)
    else:
        load(model, file, device_map={"": "cpu"})
    seconds = time.process_time() - begin
    return {"seconds": seconds, "modules": len(sys.modules) - modules, "full": collections.count(2)}


PARTS = {"empty": empty, "small": small}


def main() -> None:
    """Print the table and compare the figures with the targets."""
    libraries = {**_measure.libraries(), "accel": (sys.executable, "accel_bigmodel")}
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/model.safetensors"
        save_file(build(2).state_dict(), file, metadata={"format": "pt"})

        def measure(part: str, python: str, library: str) -> Any:
            return _measure.worker(python, __file__, "--part", part, "--library", library, "--file", file)

        rounds = [{label: measure("empty", *where) for label, where in libraries.items()} for _ in range(ROUNDS)]
        loads = {**libraries, RAW: (sys.executable, RAW)}
        loads.pop("reference", None)  # Accelerate 1.15 needs a process group for such a load with PyTorch 2.13
        small_rounds = [{label: measure("small", *where) for label, where in loads.items()} for _ in range(ROUNDS)]
    _measure.heading(f"{BLOCKS} blocks without values, and the first load of a small model (processor time)")
    for label in libraries:
        seconds = statistics.median(found[label]["seconds"] for found in rounds)
        _measure.row(f"{label}: init_empty_weights", f"{seconds * 1000:.0f} ms")
    if "reference" in libraries:
        ratio = statistics.median(found["accel"]["seconds"] / found["reference"]["seconds"] for found in rounds)
        text = f"target: at most {EMPTY_TARGET}: {_measure.verdict(ratio, EMPTY_TARGET)}"
        _measure.row("accel: init_empty_weights, to the reference", f"{ratio:.2f} x", text)
    for label in loads:
        seconds, modules, full = (
            statistics.median(found[label][name] for found in small_rounds) for name in ("seconds", "modules", "full")
        )
        text = f"{modules:.0f} modules imported, {full:.0f} full garbage collections"
        _measure.row(f"{label}: first load of a small model", f"{seconds * 1000:.1f} ms", text)
    over = statistics.median(found["accel"]["seconds"] - found[RAW]["seconds"] for found in small_rounds)
    text = f"target: at most {LOAD_TARGET * 1000:.0f} ms: {_measure.verdict(over, LOAD_TARGET)}"
    _measure.row("accel: first load of a small model, over torch's", f"{over * 1000:.1f} ms", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, help="measure this in this process (used internally)")
    parser.add_argument("--library")
    parser.add_argument("--file")
    chosen = parser.parse_args()
    if chosen.part:
        torch.set_num_threads(1)
        _measure.report(PARTS[chosen.part](chosen.library, chosen.file))
    else:
        main()
