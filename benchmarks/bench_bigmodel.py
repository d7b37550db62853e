"""Big models against plain torch on the same mapped files: load and first forward, peak memory, forwards from the disk.

    python benchmarks/bench_bigmodel.py [--gigabytes 1.6]

The model has 48 blocks of two square matrices; the input has one row (a step of generation) or 64 (a prompt). Five
interleaved rounds, and the median of the ratios within a round. "Cached" files are in the page cache; for "cold" ones
it is dropped before each forward, and the raw figure is reading the file in large pieces. The reference, if an
interpreter has it (see _measure.py), does the same with the same file.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _measure
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

BLOCKS, ON_DISK = 48, 46
# With max_memory for so many blocks, two of which stay in memory.
BUDGET_BLOCKS = 6
MAP_BLOCKS = 5000
ROUNDS = 5
ROWS = (1, 64)
RAW = "raw"
PIECE = 16 * 2**20

FIRST_TARGET, PEAK_TARGET, CACHED_TARGET, COLD_TARGET, MAP_TARGET = 1.2, 1.05, 1.15, 0.9, 1.0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


class Model(nn.Module):
    def __init__(self, width: int, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def width_for(gigabytes: float) -> int:
    """The width at which the blocks have this size; each has 2 * width**2 parameters."""
    return int((gigabytes * 1e9 / 4 / 2 / BLOCKS) ** 0.5) // 16 * 16


def empty(width: int) -> Model:
    with torch.device("meta"):
        return Model(width)


def load_raw(file: str, width: int) -> Model:
    model = empty(width)
    with safe_open(file, framework="pt") as opened:
        model.load_state_dict({name: opened.get_tensor(name) for name in opened.keys()}, assign=True)  # noqa: SIM118
    return model


def loader(library: str, file: str, width: int) -> Callable[..., nn.Module]:
    """A function that loads the model with a library, by a device map."""
    if library == RAW:
        return lambda device_map: load_raw(file, width)
    load = importlib.import_module(library).load_checkpoint_and_dispatch
    folder = f"{file}.offload"
    return lambda device_map, **options: load(
        empty(width), file, device_map=device_map, offload_folder=folder, **options
    )


def on_disk(count: int = ON_DISK) -> dict[str, str]:
    return {f"blocks.{index}": "disk" if index < count else "cpu" for index in range(BLOCKS)}


def inputs(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


def memory(key: str) -> int:
    """Bytes of this process: VmRSS, or VmHWM, the largest since :func:`reset_peak`."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) * 1024


def reset_peak() -> int:
    """Start a new measurement of the peak; returns the present size."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


# What one process measures; each reports figures by number of rows.


def first(library: str, file: str, width: int) -> dict[str, Any]:
    """Load to the CPU and the first forward: seconds, and bytes at the peak."""
    load = loader(library, file, width)
    figures = {}
    for rows in ROWS:
        hidden = inputs(rows, width)
        torch.nn.functional.linear(hidden, torch.ones(width, width))  # the math library starts up
        before = reset_peak()
        begin = time.perf_counter()
        model = load({"": "cpu"})
        model(hidden)
        figures[str(rows)] = {"seconds": time.perf_counter() - begin, "peak": memory("VmHWM") - before}
        del model
    return figures


def cached(library: str, file: str, width: int) -> dict[str, Any]:
    """Forwards with most blocks on the disk, next to those of raw torch in the same process."""
    load = loader(library, file, width)
    plain = load_raw(file, width)
    models = {"cached": load(on_disk())}
    if library != _measure.REFERENCE_MODULE:
        budget = BUDGET_BLOCKS * sum(weight.nbytes for weight in plain.blocks[0].parameters())
        models["bounded"] = load(on_disk(), max_memory={"cpu": budget})
    figures: dict[str, Any] = {}
    for rows in ROWS:
        hidden = inputs(rows, width)
        figures[str(rows)] = found = {}
        for name, model in models.items():
            before = reset_peak()
            equal = torch.allclose(plain(hidden), model(hidden), rtol=1e-4, atol=1e-5)
            found[f"{name} equal"] = equal
            found[f"{name} resident"] = memory("VmHWM") - before
            variants = {RAW: partial(plain, hidden), "disk": partial(model, hidden)}
            times = _measure.in_turns(variants, ROUNDS, clock=time.perf_counter)
            found[name], found[RAW] = _measure.ratio(times, "disk"), statistics.median(times[RAW])
    return figures


def cold(library: str, file: str, width: int) -> dict[str, Any]:
    """Bandwidth of the first forward of a model on the disk, relative to reading the file."""
    load = loader(library, file, width)
    figures = {}
    for rows in ROWS:
        hidden = inputs(rows, width)
        ratios, bandwidths = [], []
        for turn in range(ROUNDS):
            seconds = {}
            for name in (RAW, "disk") if turn % 2 else ("disk", RAW):
                action = partial(_read, file) if name == RAW else partial(load(on_disk(BLOCKS)), hidden)
                _measure.drop_from_page_cache(Path(file).parent)
                begin = time.perf_counter()
                action()
                seconds[name] = time.perf_counter() - begin
                del action  # pages that a model has mapped would stay in memory
                gc.collect()
            ratios.append(seconds[RAW] / seconds["disk"])
            bandwidths.append(os.path.getsize(file) / seconds[RAW])
        figures[str(rows)] = {"cold": statistics.median(ratios), RAW: statistics.median(bandwidths)}
    return figures


def _read(file: str) -> None:
    buffer = memoryview(bytearray(PIECE))
    with open(file, "rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass


def device_map(library: str, file: str, width: int) -> dict[str, Any]:
    """Seconds to compute a device map of many blocks."""
    infer = importlib.import_module(library).infer_auto_device_map
    with torch.device("meta"):
        model = Model(16, MAP_BLOCKS)
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    gc.collect()
    begin = time.perf_counter()
    # Only limits for host and disk: the reference ignores accelerators that the machine does not have.
    infer(model, {"cpu": total // 2}, no_split_module_classes=["Block"])
    return {"seconds": time.perf_counter() - begin}


PARTS = {"first": first, "cached": cached, "cold": cold, "map": device_map}


def note(figure: float, target: float, ours: bool, text: str = "", at_least: bool = False) -> str:
    if not ours:
        return text
    met = "met" if (figure >= target if at_least else figure <= target) else "missed"
    return f"{text}{'; ' if text else ''}target: at {'least' if at_least else 'most'} {target}: {met}"


def main(gigabytes: float, with_reference: bool, only: list[str]) -> None:
    """Print the tables and compare the figures with the targets."""
    width = width_for(gigabytes)
    libraries = {"accel": _measure.libraries()["accel"], **(_measure.libraries() if with_reference else {})}
    libraries["accel"] = (libraries["accel"][0], "accel_bigmodel")
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/model.safetensors"
        save_file(Model(width).state_dict(), file, metadata={"format": "pt"})
        size = Path(file).stat().st_size
        _measure.heading(f"A model of {size / 1e9:.2f} GB in {BLOCKS} blocks")

        def measure(part: str, label: str) -> Any:
            python, module = libraries.get(label, (libraries["accel"][0], RAW))
            words = ("--part", part, "--library", module, "--file", file, "--width", str(width))
            return _measure.worker(python, __file__, *words, timeout=1500)

        if "first" in only:
            rounds = [{label: measure("first", label) for label in (RAW, *libraries)} for _ in range(ROUNDS)]
            for rows in map(str, ROWS):
                _print_first(rows, rounds, list(libraries))
        for label in libraries:
            if "cached" in only:
                _print_cached(label, measure("cached", label), width)
            # Accelerate 1.15 cannot load one file with every layer on the disk: safetensors gets "disk" as the device.
            if "cold" in only and label == "accel":
                for rows, found in measure("cold", label).items():
                    text = f"raw reading {found[RAW] / 1e9:.2f} GB/s"
                    text = note(found["cold"], COLD_TARGET, True, text, at_least=True)
                    _measure.row(f"{label}: bandwidth of a cold forward, {rows} rows", f"{found['cold']:.2f} x", text)
            if "map" in only:
                seconds = measure("map", label)["seconds"]
                text = note(seconds, MAP_TARGET, label == "accel")
                _measure.row(f"{label}: device map of {MAP_BLOCKS} blocks", f"{seconds:.2f} s", text)


def _print_first(rows: str, rounds: list[dict[str, Any]], labels: list[str]) -> None:
    for label in labels:
        ours = label == "accel"
        seconds = statistics.median(found[label][rows]["seconds"] / found[RAW][rows]["seconds"] for found in rounds)
        peak = statistics.median(found[label][rows]["peak"] / found[RAW][rows]["peak"] for found in rounds)
        raw = statistics.median(found[RAW][rows]["seconds"] for found in rounds)
        raw_peak = statistics.median(found[RAW][rows]["peak"] for found in rounds)
        text = note(seconds, FIRST_TARGET, ours, f"raw {raw:.3f} s")
        _measure.row(f"{label}: load and first forward, {rows} rows", f"{seconds:.2f} x", text)
        text = note(peak, PEAK_TARGET, ours, f"raw {raw_peak / 1e9:.2f} GB")
        _measure.row(f"{label}: peak memory of it, {rows} rows", f"{peak:.2f} x", text)


def _print_cached(label: str, figures: dict[str, Any], width: int) -> None:
    for rows, found in figures.items():
        text = f"raw {found[RAW]:.3f} s, equal: {found['cached equal']}"
        text = note(found["cached"], CACHED_TARGET, label == "accel", text)
        _measure.row(f"{label}: cached forward, {ON_DISK} on disk, {rows} rows", f"{found['cached']:.2f} x", text)
        if "bounded" in found:
            budget = BUDGET_BLOCKS * 8 * width**2
            text = f"resident {found['bounded resident'] / 1e9:.2f} GB of {budget / 1e9:.2f}"
            text += f", equal: {found['bounded equal']}"
            _measure.row(f"{label}: within max_memory, {rows} rows", f"{found['bounded']:.2f} x", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.6, help="size of the model (10**9 bytes)")
    parser.add_argument("--without-reference", action="store_true", help="measure only accel")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts of the table")
    parser.add_argument("--part", choices=PARTS, help="measure this in this process (used internally, as what follows)")
    parser.add_argument("--library")
    parser.add_argument("--file")
    parser.add_argument("--width", type=int)
    chosen = parser.parse_args()
    if chosen.part:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        _measure.report(PARTS[chosen.part](chosen.library, chosen.file, chosen.width))
    else:
        main(chosen.gigabytes, not chosen.without_reference, chosen.only)
