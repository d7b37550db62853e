"""Models of the tests: small ones of our own, and those of transformers built from configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Net(nn.Module):
    """Blocks, a parameter of its own, a buffer in the checkpoint and one that is not, and an output layer tied to the
    input's.
    """

    def __init__(self, blocks: int = 4, width: int = 16, words: int = 50, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.linspace(0, 1, width))
        self.register_buffer("mask", torch.linspace(1, 2, width), persistent=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        hidden = self.embed(words) * self.scale * self.mask * scale + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        return {"logits": self.head(hidden), "hidden": hidden}


def net(**settings) -> Net:
    torch.manual_seed(1)
    model = Net(**settings).eval()
    with torch.no_grad():
        model.scale.uniform_(0.5, 1.5)
        model.shift.add_(0.1)
    return model


def words(rows: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(3))


def save(model: nn.Module, path: Path, without: tuple[str, ...] = ()) -> Path:
    """A checkpoint of one file, in which a shared weight has one name."""
    seen: set[int] = set()
    held = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen and name not in without:
            held[name] = value.detach().clone()
        seen.add(id(value))
    save_file(held, path, metadata={"format": "pt"})
    return path


def blocks_on(model: Net, location: str, others: str = "cpu") -> dict[str, str]:
    """A map with the blocks on one device and all else on another."""
    device_map = {name: others for name in ("embed", "scale", "shift", "mask", "head")}
    return {**device_map, **{f"blocks.{index}": location for index in range(len(model.blocks))}}


def transformers_models() -> dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]]:
    """Builders and inputs of four families."""
    transformers = pytest.importorskip("transformers", reason="the model families of transformers are what users load")
    tokens = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    small = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    gpt2 = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=4, n_positions=64, **small)
    bert = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, vocab_size=100
    )
    t5 = transformers.T5Config(
        num_layers=2, d_model=32, d_ff=64, num_heads=4, d_kv=8, decoder_start_token_id=0, **small
    )
    llama = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, **small
    )
    return {
        "gpt2": (lambda: transformers.GPT2LMHeadModel(gpt2), {"input_ids": tokens}),
        "bert": (lambda: transformers.BertForSequenceClassification(bert), {"input_ids": tokens}),
        "t5": (
            lambda: transformers.T5ForConditionalGeneration(t5),
            {"input_ids": tokens, "decoder_input_ids": tokens[:, :4]},
        ),
        "llama": (lambda: transformers.LlamaForCausalLM(llama), {"input_ids": tokens}),
    }
