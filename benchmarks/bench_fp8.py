"""The speed of fp8 training: the native and the torchao backend relative to bfloat16, on a block of Llama's shape.

    python benchmarks/bench_fp8.py
    python benchmarks/bench_fp8.py --width 4096 --tokens 16384 --compile    # the default on a GPU

Each variant is a training step (forward and backward, no optimizer) of one transformer block: attention with its four
projections and a gated MLP, under bfloat16 autocast with float32 weights. On a CPU fp8 is emulated and not faster, so
the block is small and the figures show the overhead. On a GPU the block has the width of Llama 3 8B and is compiled,
and two targets are checked: native is at most 5% slower than torchao with tensorwise scaling, and has at least 1.25
times the throughput of bfloat16.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import platform
import time
from collections.abc import Callable
from typing import Any

import _measure
import torch
from torch import Tensor, nn

from accel_fp8 import FP8Recipe, autocast, convert
from accel_state import devices

NATIVE_TARGET = 1.05
THROUGHPUT_TARGET = 1 / 1.25
RECIPES: dict[str, dict[str, Any]] = {
    "native, dynamic": {"backend": "native", "scaling": "dynamic"},
    "native, delayed": {"backend": "native", "scaling": "delayed"},
    "native, rowwise": {"backend": "native", "scaling": "rowwise"},
    "torchao, tensorwise": {"backend": "ao", "ao_recipe": "tensorwise"},
    "torchao, rowwise": {"backend": "ao", "ao_recipe": "rowwise"},
}


class LlamaBlock(nn.Module):
    """A block of Llama: RMS norm, attention, RMS norm, gated MLP of 3.5 times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        hidden = width * 7 // 2
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            layer(normed).view(n, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        normed = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def step_of(recipe: dict[str, Any] | None, arguments: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """A training step of a block whose layers are all converted, as in the middle of a model."""
    torch.manual_seed(0)
    model: nn.Module = LlamaBlock(arguments.width, arguments.width // 128 or 1).to(device)
    if recipe is not None:
        convert(model, FP8Recipe(**recipe, module_filter_func=lambda layer, name: True))
    x = torch.randn(
        arguments.tokens // arguments.length, arguments.length, arguments.width, device=device, requires_grad=True
    )
    gradient = torch.randn_like(x)
    call = torch.compile(model, fullgraph=True) if arguments.compile else model
    context = (
        (lambda: autocast(model)) if recipe is not None else (lambda: torch.autocast(device.type, dtype=torch.bfloat16))
    )

    def run() -> None:
        with context():
            result = call(x)
        result.backward(gradient.to(result.dtype))
        for parameter in model.parameters():
            parameter.grad = None
        devices.get(device.type).synchronize()

    return run


def name_of(device: torch.device) -> str:
    """The name of the device for the report."""
    if device.type == "cpu":
        return f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s)"
    return str(devices.get(device.type).module.get_device_name(device))


def parse() -> argparse.Namespace:
    gpu = devices.detect().name != "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=4096 if gpu else 256, help="width of the block")
    parser.add_argument("--tokens", type=int, default=16384 if gpu else 256, help="tokens in a step")
    parser.add_argument("--length", type=int, default=2048 if gpu else 128, help="tokens in a sequence")
    parser.add_argument("--rounds", type=int, default=20 if gpu else 10, help="steps of each variant")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=gpu, help="compile the block (default: on a GPU)"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    device = devices.detect().device(0)
    recipes = {
        name: recipe
        for name, recipe in RECIPES.items()
        if recipe["backend"] != "ao" or importlib.util.find_spec("torchao") is not None
    }
    variants: dict[str, Callable[[], object]] = {"bfloat16": step_of(None, arguments, device)}
    variants.update({name: step_of(recipe, arguments, device) for name, recipe in recipes.items()})
    variants["bfloat16 again"] = step_of(None, arguments, device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    times = _measure.in_turns(variants, arguments.rounds, warm_up=5 if arguments.compile else 2, clock=clock)
    compiled = "compiled" if arguments.compile else "not compiled"
    _measure.heading(f"a Llama block of width {arguments.width}, {arguments.tokens} tokens, {compiled}")
    print(f"{name_of(device)}, PyTorch {torch.__version__}, {datetime.date.today()}")
    for name in variants:
        if name != "bfloat16":
            slower = _measure.ratio(times, name, "bfloat16")
            _measure.row(name, f"{slower:.2f}", f"time of bfloat16 (throughput {1 / slower:.2f})")
    if device.type != "cpu":
        _targets(times)


def _targets(times: _measure.Times) -> None:
    if "torchao, tensorwise" in times:
        figure = _measure.ratio(times, "native, dynamic", "torchao, tensorwise")
        _measure.row(
            "native, relative to torchao",
            f"{figure:.3f}",
            f"target {NATIVE_TARGET}: {_measure.verdict(figure, NATIVE_TARGET)}",
        )
    best = min(_measure.ratio(times, name, "bfloat16") for name in ("native, dynamic", "native, delayed"))
    _measure.row(
        "native, relative to bfloat16",
        f"{best:.3f}",
        f"target {THROUGHPUT_TARGET}: {_measure.verdict(best, THROUGHPUT_TARGET)}",
    )


if __name__ == "__main__":
    main()
