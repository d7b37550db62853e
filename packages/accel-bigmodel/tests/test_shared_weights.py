"""Parameters read by a parent of their owner, and tied parameters that a map puts on several devices."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from accel_bigmodel import (
    compute_module_sizes,
    dispatch_model,
    get_state_dict_offloaded_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
)


class Attention(nn.Module):
    """torch's attention reads the weights of its output layer itself; the embedding is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        mixed, weights = self.attention(hidden, hidden, hidden)
        return self.head(hidden + mixed) + weights.sum()


class Encoder(nn.Module):
    """torch's encoder layers run as one kernel in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 3, enable_nested_tensor=False
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embed(words))


class Tables(nn.Module):
    """Holds tensors that its parent reads, and has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(3))
        self.register_buffer("shift", torch.randn(16))
        self.inner = nn.Linear(16, 16)
        self.again = self.scales[0]


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.tables = Tables()
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(16))})
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.ParameterList([nn.Parameter(torch.randn(16))])])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words) * self.tables.scales[1] + self.tables.shift * self.named["a"] + self.tables.again
        return self.blocks[0](self.tables.inner(hidden)) + self.blocks[1][0]


class OneModuleTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        block = nn.Linear(16, 16)
        self.first = nn.Sequential(block, nn.ReLU())
        self.second = nn.Sequential(block, nn.Linear(16, 16))
        self.third = block

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(self.embed(words))))


MODELS: list[Callable[[], nn.Module]] = [Attention, Encoder, Containers, OneModuleTwice]
WORDS = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(0))


def maps(model: nn.Module) -> list[dict[str, Any]]:
    """Everything on the disk; direct parts on CPU and disk in turn, both ways; single tensors; and what a tight budget
    gives.
    """
    parts = [name for name, _ in model.named_children()]
    tensors = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    half = compute_module_sizes(model)[""] // 2
    return [
        {"": "disk"},
        {name: ("cpu", "disk")[place % 2] for place, name in enumerate(parts)},
        {name: ("disk", "cpu")[place % 2] for place, name in enumerate(parts)},
        {"": "cpu", **{name: ("disk", "cpu")[place % 2] for place, name in enumerate(tensors)}},
        infer_auto_device_map(model, max_memory={"cpu": half}),
    ]


@pytest.mark.filterwarnings("ignore:a tied parameter is mapped to several devices")
@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_parameters_are_loaded_with_the_module_that_reads_them(
    build: Callable[[], nn.Module], offload_buffers: bool, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    whole = build().eval()
    save_model(whole, str(tmp_path / "model.safetensors"))
    with torch.no_grad():
        expected = whole(WORDS)
        for number, device_map in enumerate(maps(whole)):
            with init_empty_weights():
                model = build().eval()
            load_checkpoint_and_dispatch(
                model, tmp_path / "model.safetensors", device_map, offload_buffers=offload_buffers
            )
            torch.testing.assert_close(model(WORDS), expected)
            torch.testing.assert_close(copy.deepcopy(model)(WORDS), expected)
            held = get_state_dict_offloaded_model(model)
            assert all(torch.equal(held[name], value) for name, value in whole.state_dict().items())
            dispatched = dispatch_model(
                copy.deepcopy(whole), device_map, offload_dir=tmp_path / str(number), offload_buffers=offload_buffers
            )
            torch.testing.assert_close(dispatched(WORDS), expected)
            remove_hook_from_submodules(dispatched)
            torch.testing.assert_close(dispatched(WORDS), expected)


def test_maps_keep_attention_together() -> None:
    model = Encoder()
    layer = compute_module_sizes(model)["blocks.layers.0"]
    found = infer_auto_device_map(model, max_memory={"cpu": 2 * layer + layer // 2})
    assert set(found.values()) == {"cpu", "disk"}
    assert all(name.count(".") <= 2 for name in found), found


def test_a_shared_weight_in_two_places_is_one_weight_at_each(tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = Attention().eval()
    save_model(whole, str(tmp_path / "model.safetensors"))
    with init_empty_weights():
        model = Attention().eval()
    with pytest.warns(UserWarning, match="several devices"):
        load_checkpoint_and_dispatch(model, tmp_path / "model.safetensors", {"": "cpu", "head": "disk"})
    assert (model.embed.weight.device.type, model.head.weight.device.type) == ("cpu", "meta")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # of another test's garbage
        torch.testing.assert_close(model(WORDS), whole(WORDS))
