"""Training steps on a mesh of two processes, relative to the same steps written directly with torch.

python benchmarks/bench_mesh.py [--only tp|dp_shard|pp|titan_tp|titan_dp_shard]

The model is a small Llama. By hand, with torch's own functions: ``parallelize_module`` with sequence-parallel norms and
logits that are gathered; ``fully_shard`` of each block and of the rest; ``Schedule1F1B`` on two stages. Collectives and
bytes are those of one rank in a step (in a pipeline messages count, too), the CPU time is that of both ranks.

The tables "titan" compare with torchtitan 0.2.2, if it is installed (``pip install torchtitan==0.2.2``): its model,
parallelised by its own functions and by accel. 0.3.0 does not run on CPUs: its language models compute attention with
flex or varlen kernels only, of which torch has no backward pass there, and its meshes take ``cuda`` where no
accelerator is found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import _measure
import _titan
import torch
import torch.distributed as dist
from _collectives import counted, on_all_ranks
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

# Both compute the same; accel's layers work on plain tensors, torch's styles on DTensors.
TARGET = 1.03
WIDTH, HEADS, BLOCKS, TOKENS, BATCH, LENGTH = 256, 8, 8, 512, 4, 128
CHUNKS = 4  # micro-batches of a pipeline
ROUNDS = 9

Step = Callable[[], float]


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


def sharded_layers() -> nn.Module:
    """Tensor parallelism by hand."""
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


class Stage(nn.Module):
    """A part of the model: every second one has the embedding or the head."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        whole, half = Model(), BLOCKS // 2
        self.embedding = whole.embedding if rank == 0 else nn.Identity()
        self.blocks = whole.blocks[rank * half : (rank + 1) * half]
        self.head = nn.Sequential(whole.norm, whole.lm_head) if rank else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def stages_by_hand(tokens: torch.Tensor) -> Step:
    """A pipeline by hand; only the second rank knows the loss."""
    rank = dist.get_rank()
    part = Stage(rank)
    stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, n_microbatches=CHUNKS, loss_fn=loss_of)
    optimizer = optimizer_of(part)

    def step() -> float:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=tokens, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return float(sum(loss.item() for loss in losses)) / CHUNKS

    return step


def sharded_blocks() -> nn.Module:
    """FSDP 2 by hand."""
    model = Model()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)


def step_of(
    model: nn.Module,
    tokens: torch.Tensor,
    backward: Callable[[torch.Tensor], None],
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = loss_of,
) -> Step:
    optimizer = optimizer_of(model)

    def step() -> float:
        loss = loss_function(model(tokens), tokens)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def stages_of(accelerator: Any, tokens: torch.Tensor) -> Step:
    model = accelerator.prepare(Model())
    optimizer = optimizer_of(model)

    def step() -> float:
        loss = model(tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()) if dist.get_rank() else 0.0

    return step


def both(kind: str, tokens: torch.Tensor) -> tuple[Any, dict[str, Step]]:
    """The accelerator of a mesh, and a step by hand and with it."""
    from accel import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accel.parallelism_config import PipelineParallelConfig

    settings: dict[str, Any] = {}
    if kind == "pp":
        settings["pp_handler"] = PipelineParallelConfig(
            num_microbatches=CHUNKS, loss_fn=loss_of, example=(tokens[: BATCH // CHUNKS],)
        )
    units = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**{f"{kind}_size": 2}, **settings),
        fsdp_plugin=units if kind == "dp_shard" else None,
    )
    if kind == "pp":
        return accelerator, {"raw": stages_by_hand(tokens), "prepared": stages_of(accelerator, tokens)}
    raw = {"tp": sharded_layers, "dp_shard": sharded_blocks}[kind]()
    prepared = step_of(accelerator.prepare(Model()), tokens, accelerator.backward)
    return accelerator, {"raw": step_of(raw, tokens, torch.Tensor.backward), "prepared": prepared}


def titans(kind: str, tokens: torch.Tensor) -> tuple[Any, dict[str, Step]]:
    """The same of torchtitan's model."""
    from accel import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accel.parallelism_config import TorchTensorParallelConfig
    from accel.utils import causal_lm_loss

    def make() -> nn.Module:
        return _titan.llama(WIDTH, HEADS, BLOCKS, TOKENS, LENGTH)

    handler = TorchTensorParallelConfig(plan=_titan.PLAN) if kind == "tp" else None
    units = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerBlock", "Embedding"],
    )
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**{f"{kind}_size": 2}, tp_handler=handler),
        fsdp_plugin=units if kind == "dp_shard" else None,
    )
    raw = _titan.by_titan(kind, make())
    by_titan = _titan.step_by_titan(raw, tokens, optimizer_of(raw), 2 if kind == "dp_shard" else 1)
    model = accelerator.prepare(make())
    return accelerator, {"raw": by_titan, "prepared": step_of(model, tokens, accelerator.backward, causal_lm_loss)}


def work(kind: str) -> None:
    """Measure both in this process, which is one of two ranks."""
    torch.set_num_threads(1)
    tokens = torch.randint(0, TOKENS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    of_titan = kind.removeprefix("titan_")
    accelerator, steps = both(kind, tokens) if of_titan == kind else titans(of_titan, tokens)
    for _ in range(3):
        plain, ours = steps["raw"](), steps["prepared"]()
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    found = {name: counted(step) for name, step in steps.items()}
    times = on_all_ranks(_measure.in_turns(steps, ROUNDS, clock=time.process_time))
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


BY_HAND = {
    "tp": "parallelize_module",
    "dp_shard": "fully_shard",
    "pp": "Schedule1F1B",
    "titan_tp": "torchtitan",
    "titan_dp_shard": "torchtitan",
}


def titan_version() -> str:
    try:
        return version("torchtitan")
    except PackageNotFoundError:
        return ""


def show(kind: str) -> None:
    """Print the figures of a mesh and compare them with the target."""
    of_titan = kind.startswith("titan")
    if of_titan and titan_version() != _titan.VERSION:
        print(f"\n{kind}: not measured, which needs torchtitan {_titan.VERSION} (found: {titan_version() or 'none'})")
        return
    figures = _measure.worker(sys.executable, __file__, "--worker", kind, processes=2)
    model = " of torchtitan" if of_titan else ""
    _measure.heading(f"A step of {BLOCKS} blocks{model} with {kind.removeprefix('titan_')} 2 on two processes")
    _measure.row(BY_HAND[kind], f"{figures['raw']:.0f} ms of CPU time")
    for label, name in (("", "raw"), ("accel", "prepared")):
        _measure.row(label, f"{figures[f'{name}_calls']:.0f} collectives, {figures[f'{name}_bytes'] / 1e6:.2f} MB sent")
    ratios = {"CPU time": figures["time"], "bytes": figures["prepared_bytes"] / figures["raw_bytes"]}
    for name, ratio in ratios.items():
        _measure.row(
            f"{name}, relative to that",
            f"{ratio:.3f} x",
            f"target: at most {TARGET:.2f}: {_measure.verdict(ratio, TARGET)}",
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=BY_HAND, help="one kind of mesh")
    parser.add_argument("--worker", choices=BY_HAND, help="measure in this process (used internally)")
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker)
    else:
        for one in [asked.only] if asked.only else BY_HAND:
            show(one)
