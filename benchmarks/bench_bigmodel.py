"""Big models: loading to the CPU, loading with disk offload, a forward pass from disk, and computing a device map.

    python benchmarks/bench_bigmodel.py [--gigabytes 1.6]

The file stays in the page cache, so the disk is not measured. The reference, if an interpreter has it (see
_measure.py), does the same in its own process with the same file.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _measure
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

WIDTH = 1024
BLOCKS = 48
ON_DISK = 46
MAP_BLOCKS = 5000
LOAD_ROUNDS, DISK_ROUNDS, FORWARD_ROUNDS = 15, 5, 7
# The input of a forward pass is a prompt of 64 tokens.
ROWS = 64

LOAD_TARGET, DISK_TARGET, FORWARD_TARGET, MAP_TARGET = 1.2, 0.2, 1.3, 1.0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Model(nn.Module):
    def __init__(self, width: int, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def width_for(gigabytes: float) -> int:
    """The width at which the blocks have this size; each has 8 * width**2 parameters."""
    return int((gigabytes * 1e9 / 4 / 8 / BLOCKS) ** 0.5) // 16 * 16


def empty(width: int) -> Model:
    with torch.device("meta"):
        return Model(width)


def load_manually(file: str, width: int) -> Model:
    model = empty(width)
    with safe_open(file, framework="pt") as opened:
        model.load_state_dict({name: opened.get_tensor(name) for name in opened.keys()}, assign=True)  # noqa: SIM118
    return model


def device_map() -> dict[str, str]:
    return {f"blocks.{index}": "disk" if index < ON_DISK else "cpu" for index in range(BLOCKS)}


def work(library: str, file: str, width: int) -> None:
    """Measure one library in this process."""
    torch.set_num_threads(1)
    load = importlib.import_module(library).load_checkpoint_and_dispatch
    figures: dict[str, Any] = {}

    times = _measure.in_turns(
        {"raw": lambda: load_manually(file, width), "load": lambda: load(empty(width), file, device_map={"": "cpu"})},
        LOAD_ROUNDS,
        clock=time.perf_counter,
    )
    figures["hand"] = sorted(times["raw"])[LOAD_ROUNDS // 2]
    figures["load"] = _measure.ratio(times, "load")

    with tempfile.TemporaryDirectory() as folder:
        seconds = [
            _timed(lambda number=number: load(empty(width), file, device_map(), offload_folder=f"{folder}/{number}"))
            for number in range(DISK_ROUNDS)
        ]
        figures["disk"] = sorted(seconds)[DISK_ROUNDS // 2]
        figures["written"] = (
            sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) // DISK_ROUNDS
        )
        offloaded = load(empty(width), file, device_map(), offload_folder=f"{folder}/last")
        plain = Model(width)
        plain.load_state_dict(load_manually(file, width).state_dict())
        hidden = torch.randn(1, ROWS, width)
        with torch.no_grad():
            figures["equal"] = torch.allclose(plain(hidden), offloaded(hidden), rtol=1e-4, atol=1e-5)
            forwards = _measure.in_turns(
                {"raw": lambda: plain(hidden), "forward": lambda: offloaded(hidden)},
                FORWARD_ROUNDS,
                clock=time.perf_counter,
            )
    figures["compute"] = sorted(forwards["raw"])[FORWARD_ROUNDS // 2]
    figures["forward"] = _measure.ratio(forwards, "forward")
    figures["map"] = _map_seconds(library)
    _measure.report(figures)


def _timed(action: Callable[[], object]) -> float:
    gc.collect()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _map_seconds(library: str) -> float:
    infer = importlib.import_module(library).infer_auto_device_map
    with torch.device("meta"):
        model = Model(16, MAP_BLOCKS)
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    # Only limits for host and disk: the reference ignores accelerators that the machine does not have.
    return _timed(lambda: infer(model, {"cpu": total // 2}, no_split_module_classes=["Block"]))


def main(gigabytes: float, with_reference: bool) -> None:
    """Print the tables and compare the figures with the targets."""
    width = width_for(gigabytes)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/model.safetensors"
        save_file(Model(width).state_dict(), file, metadata={"format": "pt"})
        libraries = {"accel": _measure.libraries()["accel"], **(_measure.libraries() if with_reference else {})}
        libraries["accel"] = (libraries["accel"][0], "accel_bigmodel")
        found = {
            label: _measure.worker(
                python, __file__, "--library", module, "--file", file, "--width", str(width), timeout=1500
            )
            for label, (python, module) in libraries.items()
        }
        size = Path(file).stat().st_size
    _measure.heading(f"A model of {size / 1e9:.2f} GB in {BLOCKS} blocks, {ON_DISK} of them on disk")
    for label, figures in found.items():
        ours = label == "accel"

        def note(figure: float, target: float, text: str = "", ours: bool = ours) -> str:
            return f"{text}; target: at most {target}: {_measure.verdict(figure, target)}" if ours else text

        _measure.row(
            f"{label}: load to the CPU, relative to safetensors",
            f"{figures['load']:.2f} x",
            note(figures["load"], LOAD_TARGET, f"safetensors {figures['hand'] * 1e3:.1f} ms"),
        )
        _measure.row(
            f"{label}: load with blocks on disk",
            f"{figures['disk']:.3f} s",
            note(figures["disk"], DISK_TARGET, f"writes {figures['written']} bytes"),
        )
        _measure.row(
            f"{label}: forward pass, relative to in memory",
            f"{figures['forward']:.2f} x",
            note(
                figures["forward"],
                FORWARD_TARGET,
                f"in memory {figures['compute']:.2f} s, equal: {figures['equal']}",
            ),
        )
        _measure.row(
            f"{label}: device map of {MAP_BLOCKS} blocks", f"{figures['map']:.2f} s", note(figures["map"], MAP_TARGET)
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.6, help="size of the model (10**9 bytes)")
    parser.add_argument("--without-reference", action="store_true", help="measure only accel")
    parser.add_argument(
        "--library", help="measure this library in this process (used internally for the worker processes)"
    )
    parser.add_argument("--file")
    parser.add_argument("--width", type=int)
    chosen = parser.parse_args()
    work(chosen.library, chosen.file, chosen.width) if chosen.library else main(
        chosen.gigabytes, not chosen.without_reference
    )
