"""Parameters that tensor parallelism does not shard, between layers that it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from accel import Accelerator
from accel.parallel.axis_settings import TorchTensorParallelConfig
from accel.parallel.config import ParallelismConfig
from accel.utils import FullyShardedDataParallelPlugin
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

WIDTH, HEADS, LENGTH, VOCABULARY, STEPS = 16, 4, 6, 24, 4
PLAN = {
    **{f"blocks.*.attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
    **{"blocks.*.attn.o_proj": "rowwise", "blocks.*.up_proj": "colwise", "blocks.*.down_proj": "rowwise"},
}
NORMS = {f"blocks.*.attn.{name}": "replicated_with_grad_allreduce" for name in ("q_norm", "k_norm")}


class Attention(nn.Module):
    """With norms of the queries and keys of each head, and one of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.norm = nn.RMSNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH // HEADS), nn.RMSNorm(WIDTH // HEADS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (heads.transpose(1, 2) for heads in (self.q_norm(q), self.k_norm(k), v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.attn = Attention()
        self.up_proj, self.act, self.down_proj = nn.Linear(WIDTH, 32), activation, nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.down_proj(self.act(self.up_proj(x)))


class Net(nn.Module):
    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(activation()) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)
        for parameter in self.parameters():
            parameter.data.add_(torch.randn(parameter.shape), alpha=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.lm_head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(accelerator: Accelerator | None, activation: type[nn.Module]) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights; of one process of plain PyTorch without an Accelerator."""
    model: Any = Net(activation)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for tokens in torch.randint(0, VOCABULARY, (STEPS, 4, LENGTH), generator=torch.Generator().manual_seed(1)):
        mine = tokens if accelerator is None else accelerator.strategy.data_collectives
        mine = mine if mine is tokens else tokens.chunk(mine.world_size)[mine.rank]
        loss = model(mine)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() if accelerator is None else accelerator.reduce(loss.detach(), "mean").item())
    weights = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    return losses, {name: value.clone() for name, value in weights.items()}


def trained(activation: type[nn.Module], plan: Any, sizes: dict[str, int]) -> Any:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if "dp_shard_size" in sizes else None
    with context.isolated():
        config = ParallelismConfig(**sizes, tp_handler=TorchTensorParallelConfig(plan=plan))  # type: ignore[arg-type]
        try:
            return train(Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin), activation)
        except ConfigurationError as error:
            return str(error)


def every_plan(sizes: dict[str, int]) -> list[Any]:
    found = [trained(nn.SiLU, plan, sizes) for plan in (None, {**PLAN, **NORMS}, PLAN)]
    return [*found, trained(nn.PReLU, None, sizes)]


@pytest.mark.parametrize(
    "sizes",
    [{"tp_size": 2}, pytest.param({"tp_size": 2, "dp_shard_size": 2}, marks=pytest.mark.slow)],
    ids=["tp", "tp-dp_shard"],
)
def test_norms_of_heads_are_trained_as_in_one_process_and_others_refused(sizes: dict[str, int]) -> None:
    ranks = 2 * sizes.get("dp_shard_size", 1)
    losses, weights = train(None, nn.SiLU)
    results = run_world(every_plan, ranks, sizes, timeout=150)
    for found_losses, found_weights in results[0][:2]:
        assert found_losses == pytest.approx(losses, abs=2e-5)
        for name, value in weights.items():
            torch.testing.assert_close(found_weights[name], value, atol=2e-5, rtol=0, msg=name)
    for _, _, without_norms, with_activation in results:
        assert "q_norm.weight differs among the 2 ranks of tp_size" in without_norms
        assert "act.weight differs among the 2 ranks of tp_size" in with_activation
