"""Draws a forward of a model with blocks on the disk, from a trace: docs/guides/forward-timeline.svg.

    python docs/timeline.py [output.svg]

The file is dropped from the page cache first. Spans are those that this run measures; one core computes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import OffloadedWeightsLoader, init_empty_weights, load_checkpoint_and_dispatch

WIDTH, BLOCKS, IN_MEMORY, ROWS = 2048, 10, 3, 96
OUTPUT = Path(__file__).parent / "guides" / "forward-timeline.svg"

Span = tuple[str, int, float, float]  # what, block, begin, end
spans: list[Span] = []


class Linear(nn.Linear):
    """A linear layer that records when it computes; its weights are there by then."""

    block = -1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        result = super().forward(inputs)
        spans.append(("compute", self.block, begin, time.perf_counter()))
        return result


class Block(nn.Module):
    """Two matrices."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = Linear(WIDTH, WIDTH, bias=False), Linear(WIDTH, WIDTH, bias=False)
        self.up.block = self.down.block = number

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


class Model(nn.Module):
    """Some blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number) for number in range(BLOCKS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def record_reading() -> None:
    """Record every reading of offloaded weights, and the thread that it happens in."""
    read_many: Callable[..., Mapping[str, torch.Tensor]] = OffloadedWeightsLoader.read_many

    def recorded(self: OffloadedWeightsLoader, keys: Iterable[str], *args: Any, **kwargs: Any) -> Any:
        names = list(keys)
        begin = time.perf_counter()
        result = read_many(self, names, *args, **kwargs)
        what = "wait" if threading.current_thread() is threading.main_thread() else "read"
        spans.append((what, int(names[0].split(".")[1]), begin, time.perf_counter()))
        return result

    OffloadedWeightsLoader.read_many = recorded  # type: ignore[method-assign]


def trace() -> list[Span]:
    """Return the spans of the first forward, with the file dropped from the page cache."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file(Model().state_dict(), file)
        with init_empty_weights():
            model = Model()
        disk = {f"blocks.{number}": "disk" for number in range(IN_MEMORY, BLOCKS)}
        load_checkpoint_and_dispatch(model, file, device_map={"": "cpu", **disk})
        record_reading()
        hidden = torch.randn(ROWS, WIDTH)
        with torch.no_grad():
            for block in range(IN_MEMORY):  # those in memory have been read before
                model.blocks[block](hidden)
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            spans.clear()
            model(hidden)
    return list(spans)


COLORS = {"compute": "#3b7dd8", "read": "#e08a2e", "wait": "#c0392b"}
LANES = {"compute": 70, "read": 130}
LEFT, RIGHT, HEIGHT, BAR = 110, 20, 240, 34


def draw(measured: list[Span]) -> str:
    """Return the picture of some spans."""
    first = min(begin for _, _, begin, _ in measured)
    total = max(end for *_, end in measured) - first
    width = 900
    scale = (width - LEFT - RIGHT) / total
    size = WIDTH * WIDTH * 4 * 2 / 1e6
    title = f"A forward of {BLOCKS} blocks of {size:.0f} MB: {IN_MEMORY} in memory, {BLOCKS - IN_MEMORY} on the disk"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
        f'<text x="10" y="26" font-size="15">{escape(title)}</text>',
        f'<text x="10" y="{LANES["compute"] + 22}">the forward</text>',
        f'<text x="10" y="{LANES["read"] + 22}">thread</text>',
    ]
    legend = {"compute": "computes", "read": "reads the next block", "wait": "reads a block that was not read ahead"}
    for number, (what, text) in enumerate(legend.items()):
        x = LEFT + 170 * number
        parts.append(f'<rect x="{x}" y="{HEIGHT - 22}" width="12" height="12" fill="{COLORS[what]}"/>')
        parts.append(f'<text x="{x + 18}" y="{HEIGHT - 12}">{text}</text>')
    labelled: set[tuple[str, int]] = set()
    for what, block, begin, end in sorted(measured, key=lambda span: span[2]):
        lane = LANES["read" if what == "read" else "compute"]
        x, length = LEFT + (begin - first) * scale, max((end - begin) * scale, 1.0)
        parts.append(
            f'<rect x="{x:.1f}" y="{lane}" width="{length:.1f}" height="{BAR}" fill="{COLORS[what]}" stroke="white"/>'
        )
        if (what, block) not in labelled:
            labelled.add((what, block))
            parts.append(f'<text x="{x + 3:.1f}" y="{lane + 22}" fill="white">{block}</text>')
    step = next(step for step in (5, 10, 20, 50, 100, 200, 500, 1000, 5000) if total * 1e3 / step <= 10)
    for tick in range(0, int(total * 1e3) + 1, step):
        x = LEFT + tick / 1e3 * scale
        parts.append(f'<line x1="{x:.1f}" y1="50" x2="{x:.1f}" y2="180" stroke="#cccccc"/>')
        parts.append(f'<text x="{x:.1f}" y="200" text-anchor="middle">{tick}</text>')
    parts.append('<text x="10" y="200">milliseconds</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    measured = trace()
    output.write_text(draw(measured), encoding="utf-8")
    busy = {what: sum(end - begin for kind, _, begin, end in measured if kind == what) for what in COLORS}
    print(output.name, {what: f"{seconds * 1e3:.0f} ms" for what, seconds in busy.items()})
