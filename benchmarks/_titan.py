"""The Llama of torchtitan 0.2.2, parallelised by torchtitan's own functions and by accel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel
from torch.nn import functional

VERSION = "0.2.2"
Step = Callable[[], float]

PLAN: Mapping[str, Any] = {
    "tok_embeddings": "embedding_rowwise",
    **{f"layers.*.attention.{name}": "colwise" for name in ("wq", "wk", "wv")},
    "layers.*.attention.wo": "rowwise",
    **{f"layers.*.feed_forward.{name}": "colwise" for name in ("w1", "w3")},
    "layers.*.feed_forward.w2": "rowwise",
    "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}
"""What torchtitan shards, for accel."""


def llama(width: int, heads: int, blocks: int, vocabulary: int, length: int) -> nn.Module:
    """Its own model, which computes attention by torch's ``scaled_dot_product_attention``."""
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    torch.manual_seed(0)
    sizes = {"dim": width, "n_heads": heads, "n_layers": blocks, "vocab_size": vocabulary, "max_seq_len": length}
    model: nn.Module = Transformer(TransformerModelArgs(**sizes))
    with torch.no_grad():
        model.init_weights()  # type: ignore[operator]
    return model


def by_titan(kind: str, model: nn.Module) -> nn.Module:
    """Tensor parallelism with sequence-parallel norms and sharded logits, or FSDP 2."""
    from torchtitan.models.llama3.infra import parallelize

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("axis",))
    if kind == "tp":
        parallelize.apply_tp(model, mesh, loss_parallel=True, enable_float8_tensorwise_tp=False)
        return model
    parallelize.apply_fsdp(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no product in a reduction
    return model


def step_by_titan(model: nn.Module, tokens: torch.Tensor, optimizer: Any, ranks_of_data: int) -> Step:
    """A step as torchtitan trains: the sum of the losses over the number of labels of all ranks with data."""

    def step() -> float:
        logits = model(tokens)[:, :-1]
        with loss_parallel():
            total = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            loss = total / (tokens[:, 1:].numel() * ranks_of_data)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return value.item() * ranks_of_data

    return step
