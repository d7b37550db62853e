"""Loads and runs a 6 GB model in a process limited to 2 GB; checks that outputs are equal and nothing is written.

    python benchmarks/big_model_limit.py --folder /a/directory/with/6/GB/free

Three processes: one writes the checkpoint (random weights, sharded, one block at a time), one runs the model in memory,
and one runs it from disk with a limit on its address space, which includes mapped files (`ulimit -v`). --gigabytes and
--limit select other sizes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

WIDTH = 2048
BATCH, LENGTH = 2, 16
SHARD_BLOCKS = 8


class Block(nn.Module):
    """A transformer block without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """A sequence of blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def count_blocks(gigabytes: float) -> int:
    with torch.device("meta"):
        size = sum(parameter.numel() * 4 for parameter in Block().parameters())
    return -(-int(gigabytes * 10**9) // size)


def make(folder: Path, blocks: int) -> None:
    """Write the checkpoint, with only a few blocks in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map, shard = {}, {}
    for index in range(blocks):
        torch.manual_seed(index)
        shard.update({f"blocks.{index}.{name}": value for name, value in Block().state_dict().items()})
        if len(shard) == 6 * SHARD_BLOCKS or index == blocks - 1:
            file = f"model-{index:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
            shard = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def inputs() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def run_full(folder: Path, blocks: int) -> None:
    """Run the model in memory with plain PyTorch."""
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = Model(blocks)
    model.to_empty(device="cpu")
    for file in sorted(folder.glob("*.safetensors")):
        model.load_state_dict(load_file(file), strict=False)
    torch.save(_outputs(model), folder / "full.pt")


def run_limited(folder: Path, blocks: int, limit: int) -> None:
    """Run the model from disk with a limit on the address space."""
    from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch

    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    written = _written()
    with init_empty_weights():
        model = Model(blocks)
    begin = time.perf_counter()
    load_checkpoint_and_dispatch(model, folder, device_map={"": "disk"})
    loaded = time.perf_counter()
    outputs = _outputs(model)
    done = time.perf_counter()
    bytes_written = _written() - written
    expected = torch.load(folder / "full.pt")
    equal = all(torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in zip(outputs, expected, strict=True))
    print(
        json.dumps(
            {
                "equal": equal,
                "bytes written": bytes_written,
                "peak address space": _status("VmPeak"),
                "peak resident": _status("VmHWM"),
                "load": loaded - begin,
                "two forwards": done - loaded,
            }
        )
    )


def _outputs(model: nn.Module) -> list[torch.Tensor]:
    """The outputs of a batch, and of a single row."""
    with torch.no_grad():
        return [model(inputs()), model(inputs()[:1, :1])]


def _written() -> int:
    """Bytes that this process has written to disk."""
    return int(Path("/proc/self/io").read_text().split("\nwrite_bytes: ")[1].split()[0])


def _status(key: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) * 1024


def main(folder: Path, gigabytes: float, limit: float) -> int:
    blocks = count_blocks(gigabytes)
    base = [
        sys.executable,
        __file__,
        "--folder",
        str(folder),
        "--gigabytes",
        str(gigabytes),
        "--limit",
        str(limit),
        "--part",
    ]
    if not (folder / "full.pt").is_file():
        for part in ("make", "full"):
            subprocess.run([*base, part], check=True)
    done = subprocess.run([*base, "limited"], check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"model                {size / 1e9:.2f} GB in {blocks} blocks")
    print(f"limit                {limit:.2f} GB of address space")
    print(f"equal outputs        {'yes' if figures['equal'] else 'NO'}, compared with the model in memory")
    print(f"written to disk      {figures['bytes written']} bytes")
    print(
        f"peak                 {figures['peak address space'] / 1e9:.2f} GB of address space, "
        f"{figures['peak resident'] / 1e9:.2f} GB resident"
    )
    print(f"load                 {figures['load']:.3f} s")
    print(f"two forwards         {figures['two forwards']:.2f} s")
    return 0 if figures["equal"] and figures["bytes written"] == 0 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="directory of the checkpoint; reused by the next run"
    )
    parser.add_argument("--gigabytes", type=float, default=6.0, help="size of the model (10**9 bytes)")
    parser.add_argument("--limit", type=float, default=2.0, help="limit of the address space (10**9 bytes)")
    parser.add_argument("--part", choices=["make", "full", "limited"], help="used internally for the worker processes")
    arguments = parser.parse_args()
    count = count_blocks(arguments.gigabytes)
    if arguments.part == "make":
        make(arguments.folder, count)
    elif arguments.part == "full":
        run_full(arguments.folder, count)
    elif arguments.part == "limited":
        run_limited(arguments.folder, count, int(arguments.limit * 10**9))
    else:
        sys.exit(main(arguments.folder, arguments.gigabytes, arguments.limit))
