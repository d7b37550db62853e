"""Experts of mixture-of-experts layers: only the chosen ones are read."""

from __future__ import annotations

import copy
import json
import os
import pickle
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    align_module_device,
    cache_experts,
    cpu_offload,
    disk_offload,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
)
from accel_bigmodel.hooks.attach import align_hooks
from accel_bigmodel.hooks.experts import RoutedExpertsHook
from accel_state.errors import ConfigurationError

EXPERTS, WIDTH, INNER = 6, 32, 48
EXPERT_NBYTES = 4 * (2 * INNER * WIDTH + WIDTH * INNER)


class Experts(nn.Module):
    """Stacked experts, called as those of Transformers 5."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 6)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 6)

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(hidden)
        counts = nn.functional.one_hot(top_k_index, self.num_experts + 1).sum((0, 1))
        for expert in counts.nonzero()[:, 0]:
            if expert == self.num_experts:
                continue
            token, place = torch.where(top_k_index == expert)
            gate, up = nn.functional.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, -1)
            value = nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj[expert])
            if value.isnan().any():
                raise ArithmeticError("not a number")
            result.index_add_(0, token, value * top_k_weights[token, place, None])
        return result


class Layer(nn.Module):
    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.router, self.experts, self.top_k = nn.Linear(WIDTH, EXPERTS), Experts(), top_k

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(hidden).softmax(-1).topk(self.top_k)
        return hidden + self.experts(hidden, index, top_k_weights=weights)


class Model(nn.Module):
    def __init__(self, top_k: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(top_k) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def offloaded(folder: Path, plain: Model, source: str) -> Model:
    state = plain.state_dict()
    if source == "written":
        return disk_offload(copy.deepcopy(plain), folder / "written")
    if source == "memory":
        return cpu_offload(copy.deepcopy(plain))
    dtype = torch.float64 if source == "converted" else torch.float32
    save_file({name: value.to(dtype) for name, value in state.items()}, folder / "model.safetensors")
    with init_empty_weights():
        model = Model(plain.layers[0].top_k)
    return load_checkpoint_and_dispatch(model, folder / "model.safetensors", device_map={"": "disk"})


def check_equal(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the last bits, which depend on the address of a mapped weight."""
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def bytes_read() -> int:
    """Bytes that this thread and the one that reads ahead have read with system calls, not through mappings.

    Other threads do not count: that of a pytest-xdist worker reads messages at any moment.
    """
    own = threading.current_thread()
    threads = [one for one in threading.enumerate() if one is own or one.name.startswith("accel-prefetch")]
    return sum(int(Path(f"/proc/self/task/{one.native_id}/io").read_text().split()[1]) for one in threads)


@pytest.mark.parametrize("source", ["stored", "converted", "written", "memory"])
@torch.no_grad()
def test_outputs_are_those_of_the_model_in_memory(tmp_path: Path, source: str) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = offloaded(tmp_path, plain, source)
    hooks = [hook for layer in model.layers for hook in align_hooks(layer.experts)]
    assert all(isinstance(hook, RoutedExpertsHook) for hook in hooks) and len(hooks) == 2
    batches = [torch.randn(rows, WIDTH) for rows in (1, 1, 1, 20, 2, 1)]
    expected = [plain(hidden) for hidden in batches]
    for capacity in (0, 3, 4, EXPERTS):
        assert cache_experts(model, capacity * 2 * EXPERT_NBYTES) == capacity
        for hidden, wanted in zip(batches, expected, strict=True):
            result = model(hidden)
            check_equal(result, wanted)
            if source != "stored":  # its routers are mapped
                assert torch.equal(result, wanted)
    assert all(layer.experts.num_experts == EXPERTS for layer in model.layers)
    assert all(layer.experts.down_proj.device.type == "meta" for layer in model.layers)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts the bytes that Linux reports")
@torch.no_grad()
def test_only_chosen_experts_are_read_and_a_cache_keeps_those_used_last(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Model(top_k=2)
    model = offloaded(tmp_path, plain, "stored")
    cache_experts(model, "1MB")  # all of them fit
    seen: list[set[int]] = [set(), set()]
    for _ in range(8):
        hidden = torch.randn(1, WIDTH)
        missing, value = 0, hidden
        for layer, known in zip(plain.layers, seen, strict=True):
            chosen = set(layer.router(value).topk(2).indices[0].tolist())
            missing += len(chosen - known)
            known |= chosen
            value = layer(value)
        before = bytes_read()
        model(hidden)
        # Reading the counter reads about 130 bytes, too; routers are mapped.
        assert missing * EXPERT_NBYTES <= bytes_read() - before < missing * EXPERT_NBYTES + 1000
    assert 2 < len(seen[0]) <= EXPERTS


@torch.no_grad()
def test_a_forward_that_raises_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    plain = Model()
    model = offloaded(tmp_path, plain, "stored")
    cache_experts(model, 8 * EXPERT_NBYTES)
    hidden = torch.randn(3, WIDTH)
    with pytest.raises(ArithmeticError):
        model.layers[0].experts(hidden * float("nan"), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert model.layers[0].experts.num_experts == EXPERTS and model.layers[0].experts.down_proj.device.type == "meta"
    check_equal(model(hidden), plain(hidden))


def test_gradients_copies_and_other_uses_of_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = offloaded(tmp_path, plain, "stored")
    cache_experts(model, 8 * EXPERT_NBYTES)
    hidden = torch.randn(4, WIDTH)
    gradients = []
    for one in (plain, model):
        inputs = hidden.clone().requires_grad_()
        one(inputs).square().sum().backward()
        gradients.append(inputs.grad)
    check_equal(*gradients)
    with torch.no_grad():
        expected = plain(hidden)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            check_equal(other(hidden), expected)
        with align_module_device(model.layers[0].experts):
            assert torch.equal(model.layers[0].experts.down_proj, plain.layers[0].experts.down_proj)
        # Expert parallelism marks experts of other processes with the number after the last.
        index = torch.tensor([[0, EXPERTS], [4, 0], [EXPERTS, EXPERTS], [5, 4]])
        calls = [one.layers[1].experts(hidden, index, torch.ones(4, 2)) for one in (plain, model)]
        check_equal(*calls)
    remove_hook_from_submodules(model)
    assert model.layers[0].experts.num_experts == EXPERTS


def test_errors_of_cache_experts(tmp_path: Path) -> None:
    model = offloaded(tmp_path, Model(), "stored")
    with pytest.raises(ConfigurationError, match=f"less than one expert of each of the 2 layers.*{2 * EXPERT_NBYTES}"):
        cache_experts(model, 1000)
    with pytest.raises(ConfigurationError, match="'many' is not a size"):
        cache_experts(model, "many")
    with pytest.raises(ConfigurationError, match="-1"):
        cache_experts(model, -1)
    with pytest.raises(ConfigurationError, match="mixture-of-experts"):
        cache_experts(Model(), "1GB")


@torch.no_grad()
def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    model = offloaded(tmp_path, Model(), "stored")
    cache_experts(model, 4 * EXPERT_NBYTES)
    os.truncate(tmp_path / "model.safetensors", 2000)
    experts = model.layers[1].experts
    with pytest.raises(ConfigurationError, match=r"model.safetensors has been truncated"):
        experts(torch.randn(1, WIDTH), torch.tensor([[5]]), torch.ones(1, 1))


# Transformers stores the experts one by one.


def checkpoint_of_mixtral(folder: Path) -> tuple[nn.Module, dict[str, str]]:
    """A tiny Mixtral, saved in several shards by Transformers; returns it and the weight map of its index."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=11, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(folder, max_shard_size="100KB")
    return model, json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@torch.no_grad()
def test_names_and_experts_that_transformers_converts(tmp_path: Path) -> None:
    plain, weight_map = checkpoint_of_mixtral(tmp_path)
    assert "model.layers.0.block_sparse_moe.experts.10.w1.weight" in weight_map and len(set(weight_map.values())) > 3
    tokens = torch.arange(1, 13).view(2, 6)
    expected = plain(tokens).logits
    before = {path: path.stat() for path in tmp_path.iterdir()}
    for placement in ({"": "cpu"}, {"": "disk"}, {"": "cpu", "model.layers.1.mlp.experts": "disk"}):
        with init_empty_weights():
            model = type(plain)(plain.config).eval()
        load_checkpoint_and_dispatch(model, tmp_path, device_map=placement)
        check_equal(model(tokens).logits, expected)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == {
        path: status.st_mtime_ns for path, status in before.items()
    }  # nothing was written
    assert cache_experts(model, "1MB") == 11
    check_equal(model(tokens).logits, expected)
    state = {name: hook for name, hook in model.state_dict().items() if name.endswith("down_proj")}
    assert len(state) == 2 and model.model.layers[1].mlp.experts.num_experts == 11
    halves = []
    for placement in ("cpu", "disk"):
        with init_empty_weights():
            model = type(plain)(plain.config).eval()
        load_checkpoint_and_dispatch(model, tmp_path, device_map={"": placement}, dtype=torch.bfloat16)
        halves.append(model(tokens).logits)
    assert halves[0].dtype == torch.bfloat16
    torch.testing.assert_close(*halves, rtol=2e-2, atol=2e-2)


def test_a_checkpoint_without_all_experts_is_refused(tmp_path: Path) -> None:
    plain, weight_map = checkpoint_of_mixtral(tmp_path)
    weight_map = {name: file for name, file in weight_map.items() if "1.block_sparse_moe.experts.7.w1" not in name}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigurationError, match="layers.1.mlp.experts.gate_up_proj.*from 21 stored"):
        load_checkpoint_and_dispatch(plain, tmp_path, device_map={"": "cpu"})


@torch.no_grad()
def test_a_converted_tensor_that_is_no_stack_needs_a_folder_for_the_disk(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

    class FusedInFile(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.query, self.key, self.head = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.head(self.query(hidden) * self.key(hidden))

    chunks = WeightConverter("fused.weight", ["query.weight", "key.weight"], [Chunk(dim=0)])
    renamings = [WeightRenaming("output.weight", "head.weight"), chunks]
    register_checkpoint_conversion_mapping("FusedInFile", renamings, overwrite=True)
    model = FusedInFile(PreTrainedConfig())
    fused = torch.cat([model.query.weight, model.key.weight])
    save_file({"fused.weight": fused, "output.weight": model.head.weight.detach()}, tmp_path / "model.safetensors")
    hidden = torch.randn(2, 8)
    expected = model(hidden)
    for folder, placement in ((None, "cpu"), (tmp_path / "offload", "disk")):
        other = FusedInFile(PreTrainedConfig())
        load_checkpoint_and_dispatch(other, tmp_path, device_map={"": placement}, offload_folder=folder)
        check_equal(other(hidden), expected)
    assert sorted(path.name for path in (tmp_path / "offload").glob("*.dat")) == ["key.weight.dat", "query.weight.dat"]
    with pytest.raises(ConfigurationError, match="query.weight.*disk.*offload_folder="):
        load_checkpoint_and_dispatch(FusedInFile(PreTrainedConfig()), tmp_path, device_map={"": "disk"})
