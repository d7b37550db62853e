"""A training step with tensor parallelism on two processes, relative to the same step written directly with torch.

python benchmarks/bench_mesh.py

The model is a small Llama. By hand: ``parallelize_module`` with sequence-parallel norms, and logits that are gathered,
with torch's own styles. Collectives and bytes are those of one rank in a step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import _measure
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Both compute the same; accel's layers work on plain tensors, torch's styles on DTensors.
TARGET = 1.03
WIDTH, HEADS, BLOCKS, TOKENS, BATCH, LENGTH = 256, 8, 8, 512, 4, 128
ROUNDS = 9


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def by_hand() -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Model()
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    for block in model.blocks:
        plan = {
            "first": SequenceParallel(),
            "second": SequenceParallel(),
            "attention": PrepareModuleInput(**whole),
            "mlp": PrepareModuleInput(**whole),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            **{f"mlp.{name}": ColwiseParallel() for name in ("w1", "w3")},
            "mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return model


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes that a rank of two sends in them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sent = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if "c10d" in name and "wait" not in name:
            tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
            largest = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            if "functional.all_gather" in name:  # gets the part only
                largest *= 2
            self.calls += 1
            self.sent += largest if "reduce_scatter" not in name and "reduce" in name else largest // 2
        return function(*args, **(kwargs or {}))


def step_of(model: nn.Module, tokens: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def step() -> float:
        logits = model(tokens)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def counted(step: Callable[[], float]) -> Collectives:
    with Collectives() as found:
        step()
    return found


def work() -> None:
    """Measure both in this process, which is one of two ranks."""
    from accel import Accelerator, ParallelismConfig

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    tokens = torch.randint(0, TOKENS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    steps = {
        "raw": step_of(by_hand(), tokens, torch.Tensor.backward),
        "prepared": step_of(accelerator.prepare(Model()), tokens, accelerator.backward),
    }
    for _ in range(3):
        plain, ours = steps["raw"](), steps["prepared"]()
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    found = {name: counted(step) for name, step in steps.items()}
    times = _measure.in_turns(steps, ROUNDS, clock=time.process_time)
    if accelerator.is_main_process:
        _measure.report(
            {
                "raw": sorted(times["raw"])[ROUNDS // 2] * 1e3,
                "time": _measure.ratio(times, "prepared"),
                **{f"{name}_calls": item.calls for name, item in found.items()},
                **{f"{name}_bytes": item.sent for name, item in found.items()},
            }
        )
    dist.barrier()
    accelerator.end_training()


def main() -> None:
    """Print the table and compare the figures with the target."""
    figures = _measure.worker(sys.executable, __file__, "--worker", processes=2)
    _measure.heading(f"A step of {BLOCKS} blocks with tp 2 on two processes")
    _measure.row("parallelize_module", f"{figures['raw']:.0f} ms of CPU time")
    _measure.row("", f"{figures['raw_calls']:.0f} collectives, {figures['raw_bytes'] / 1e6:.2f} MB sent")
    _measure.row("accel", f"{figures['prepared_calls']:.0f} collectives, {figures['prepared_bytes'] / 1e6:.2f} MB sent")
    ratios = {"CPU time": figures["time"], "bytes": figures["prepared_bytes"] / figures["raw_bytes"]}
    for name, ratio in ratios.items():
        _measure.row(
            f"{name}, relative to that",
            f"{ratio:.3f} x",
            f"target: at most {TARGET:.2f}: {_measure.verdict(ratio, TARGET)}",
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help="measure in this process (used internally)")
    work() if parser.parse_args().worker else main()
