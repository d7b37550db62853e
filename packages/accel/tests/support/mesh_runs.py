"""Training runs on meshes, and the same ones in one process of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import windows
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from windows import TOLERANCE, plain_windows, train_windows

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.axis_settings import TorchTensorParallelConfig
from accel.parallel.config import ParallelismConfig

VOCABULARY, BATCH, LENGTH = 13, 8, 6
# Weights that start 1e-7 apart already move the norms of one process (of the model with tied embeddings) by 4e-5 in 20
# steps.
NORM_TOLERANCE = 1e-3
BLOCKS = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}


SMALL: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 16, "bos_token_id": None, "eos_token_id": None},
}


def llama(tied: bool = False, kv_heads: int = 4, layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SMALL, "intermediate_size": 22, "num_hidden_layers": layers, "num_key_value_heads": kv_heads}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))


def tied_llama() -> nn.Module:
    return llama(tied=True)


def deep_llama(tied: bool = False) -> nn.Module:
    return llama(tied, layers=5)


def deep_tied_llama() -> nn.Module:
    return deep_llama(tied=True)


def gpt2(dropout: float = 0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
    dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropped, bos_token_id=None, eos_token_id=None))


def qwen() -> nn.Module:
    """With norms of single heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=4))


def gemma() -> nn.Module:
    """With an embedding that scales what it has looked up, tied to the head."""
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**SMALL, num_key_value_heads=2, head_dim=4, pad_token_id=None))


def phi() -> nn.Module:
    """With fused layers, whose outputs are put together again."""
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**SMALL, num_key_value_heads=4, pad_token_id=None))


def mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, head_dim=4, sliding_window=None))


def qwen2() -> nn.Module:
    """With biases of queries, keys and values."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=2))


def gemma2() -> nn.Module:
    """With norms before and after attention, and softly capped logits."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=4, pad_token_id=None, sliding_window=4)
    return Gemma2ForCausalLM(config)


class FusedAttention(nn.Module):
    """Queries, keys and values of one linear layer, as GPT-2's are, but with torch's own layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.split_size = heads, width // heads, width
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.c_attn(x).split(self.split_size, dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for part in parts)
        return self.c_proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        return self.wo(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module], width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = attention(width, heads)
        self.mlp = nn.ModuleDict({"w1": nn.Linear(width, 20), "w3": nn.Linear(width, 20), "w2": nn.Linear(20, width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        inner = self.second(x)
        return x + self.mlp["w2"](functional.silu(self.mlp["w1"](inner)) * self.mlp["w3"](inner))


class Own(nn.Module):
    """A model of no library, with blocks of both shapes and tied embeddings."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16, padding_idx=3)
        self.blocks = nn.ModuleList([Block(FusedAttention, 16, 4), Block(Attention, 16, 4)])
        self.lm_head = nn.Linear(16, VOCABULARY, bias=False)
        self.lm_head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x) * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{"llama": llama, "tied llama": tied_llama, "deep llama": deep_llama, "deep tied llama": deep_tied_llama},
    **{"gpt2": gpt2, "qwen": qwen, "gemma": gemma, "gemma2": gemma2, "mistral": mistral, "qwen2": qwen2, "phi": phi},
    "own": Own,
}


def build(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[kind]()


def batches(count: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count * BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


@contextmanager
def counted(module: Any, *names: str) -> Iterator[dict[str, int]]:
    """How often functions of a module are called meanwhile, by name."""
    made = dict.fromkeys(names, 0)

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made[name] += 1
            return original(*args, **kwargs)

        return call

    with mock.patch.multiple(module, **{name: counting(name) for name in names}):
        yield made


def loss_of(model: nn.Module, tokens: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    logits = model(tokens[:, :-1])
    logits = getattr(logits, "logits", logits)
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Gradients that are zero but for rounding (of the biases of attention's keys) must stay small beside eps, or Adam
    # makes steps of them.
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    # With eps=1e-6 weights that start 6e-8 apart end up to 7e-5 apart, and norms 7e-4; with 1e-4, 3e-6 and 4e-5.
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others}], lr=1e-2, eps=1e-4)


def plain(kind: str, steps: int, window: int = 1, max_norm: float = 0.5) -> dict[str, Any]:
    """One process, plain PyTorch, whole batches."""
    model, chunks = build(kind), batches(steps).split(BATCH)
    each = (chunks[begin : begin + window] for begin in range(0, steps, window))
    return plain_windows(model, [optimizer_of(model)], each, loss_of, max_norm)


def accelerator_for(
    sizes: dict[str, int], fsdp: dict[str, Any] | None = None, plan: Any = None, **settings: Any
) -> Accelerator:
    handler = None if plan is None else TorchTensorParallelConfig(plan=plan)
    return Accelerator(
        parallelism_config=ParallelismConfig(**sizes, tp_handler=handler),
        fsdp_plugin=None if fsdp is None else FullyShardedDataParallelPlugin(**fsdp),
        **settings,
    )


def train(
    accelerator: Accelerator, kind: str, steps: int, window: int = 1, max_norm: float = 0.5, order: str = "model first"
) -> dict[str, Any]:
    """The run of :func:`plain` on a mesh; only rank 0 starts with the same weights."""
    model = build(kind, seed=accelerator.process_index)
    optimizer = optimizer_of(model)
    if order == "model first":
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    ranks = accelerator.strategy.data_collectives.world_size
    loader = accelerator.prepare(DataLoader(batches(steps), batch_size=BATCH // ranks))

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        accelerator.backward(loss)
        return loss

    return train_windows(accelerator, model, [optimizer], loader, step, max_norm)


def assert_same(found: dict[str, Any], expected: dict[str, Any], what: Any, tolerance: float = TOLERANCE) -> None:
    windows.assert_same(found, expected, what, tolerance, NORM_TOLERANCE)
