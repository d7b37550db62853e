"""Sharded training gives the numbers of one process: every strategy, order of preparing, accumulation and clipping."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from windows import TOLERANCE, assert_same, plain_windows, train_windows

from accel import Accelerator, GradScalerKwargs
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.kwargs.base import KwargsHandler
from accel.utils import AORecipeKwargs, NativeRecipeKwargs
from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(600)

VOCABULARY, WIDTH, BATCH, LENGTH = 11, 7, 8, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A language model with tied embeddings, a buffer, and sizes that no number of ranks divides."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))

    def reset_parameters(self) -> None:
        self.scale.fill_(1.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {"net": Net, "gpt2": gpt2, "llama": llama}


def batches(count: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count * BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    logits = getattr(logits, "logits", logits)
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Gradients that are zero but for rounding (of the biases of attention's keys) must stay small beside eps, or Adam
    # makes steps of them.
    return torch.optim.AdamW(
        (parameter for parameter in model.parameters() if parameter.requires_grad), lr=1e-2, eps=1e-6
    )


def build(kind: str, seed: int, frozen: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[kind]()
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("up" not in name)
    return model


def plain(kind: str, steps: int, window: int, max_norm: float, frozen: bool = False) -> dict[str, Any]:
    """One process, plain PyTorch, whole batches."""
    model, chunks = build(kind, 0, frozen), batches(steps).split(BATCH)
    windows = (chunks[begin : begin + window] for begin in range(0, steps, window))
    return plain_windows(model, [optimizer_of(model)], windows, loss_of, max_norm)


def prepare(accelerator: Accelerator, model: nn.Module, order: str) -> tuple[nn.Module, Any]:
    optimizer = optimizer_of(model)
    if order == "model first":
        return accelerator.prepare(model, optimizer)
    if order == "optimizer first":
        optimizer, model = accelerator.prepare(optimizer, model)
        return model, optimizer
    optimizer = accelerator.prepare(optimizer)
    return accelerator.prepare(model), optimizer


def sharded(
    settings: dict[str, Any],
    kind: str,
    steps: int,
    window: int,
    max_norm: float,
    order: str,
    seed: int = 0,
    frozen: bool = False,
) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(**settings)
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=window)
    model, optimizer = prepare(accelerator, build(kind, accelerator.process_index * seed, frozen), order)
    loader = accelerator.prepare(DataLoader(batches(steps), batch_size=BATCH // accelerator.num_processes))
    kinds = str(accelerator.distributed_type), accelerator.is_fsdp2

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        accelerator.backward(loss)
        return loss

    return {**train_windows(accelerator, model, [optimizer], loader, step, max_norm), "kinds": kinds}


def train_on_two_nodes(cases: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
    rank = int(os.environ["RANK"])
    with patch_environment(LOCAL_RANK=rank % 2, LOCAL_WORLD_SIZE=2, GROUP_RANK=rank // 2, GROUP_WORLD_SIZE=2):
        return train_all(cases)


def train_all(cases: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [sharded(*case) for case in cases]


BLOCKS = {"auto_wrap_policy": "transformer_based_wrap"}
SIZES = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100}
CASES = [
    ({}, "net", 7, 1, 0.5, "model first"),
    ({**BLOCKS}, "net", 7, 3, 0.5, "optimizer first", 3),
    ({**BLOCKS, "sharding_strategy": "SHARD_GRAD_OP"}, "net", 7, 3, 0.5, "apart"),
    ({**SIZES, "sharding_strategy": "NO_SHARD"}, "net", 7, 3, 0.5, "model first", 3),
    ({"use_orig_params": False, **BLOCKS}, "net", 7, 3, 0.5, "optimizer first"),
    ({**BLOCKS, "cpu_offload": True, "activation_checkpointing": True}, "net", 7, 1, 0.5, "model first"),
    (
        {**BLOCKS, "backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True, "limit_all_gathers": False},
        "net",
        7,
        1,
        0.5,
        "model first",
        0,
        True,
    ),
    ({"fsdp_version": 2}, "net", 7, 3, 0.5, "model first"),
    ({"fsdp_version": 2, **BLOCKS}, "net", 7, 3, 0.5, "optimizer first", 3),
    ({"fsdp_version": 2, **BLOCKS, "reshard_after_forward": False}, "net", 7, 1, 0.5, "apart", 3),
    ({"fsdp_version": 2, **BLOCKS, "cpu_offload": True, "activation_checkpointing": True}, "net", 7, 3, 0.5, "apart"),
    ({"fsdp_version": 2, **SIZES}, "net", 7, 3, 0.5, "model first", 0, True),
    ({"fsdp_version": 2, "ignored_modules": r"blocks\.\d\.up"}, "net", 7, 1, 0.5, "model first", 3, True),
    ({"ignored_modules": r"blocks\.\d\.up"}, "net", 7, 1, 0.5, "model first", 3, True),
]
MODEL_CASES = [
    ({**settings, **BLOCKS}, kind, 20, 1, 0.5, "model first")
    for kind in ("gpt2", "llama")
    for settings in (
        {},
        {"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_POST"},
        {"sharding_strategy": "NO_SHARD"},
        {"fsdp_version": 2},
        {"fsdp_version": 2, "reshard_after_forward": False},
    )
]
MODEL_CASES += [
    ({"use_orig_params": False, **BLOCKS, "cpu_offload": True}, "llama", 20, 1, 0.5, "model first"),
    ({"fsdp_version": 2, **SIZES}, "gpt2", 20, 1, 0.5, "optimizer first"),
]


@pytest.mark.slow
# Some thirty trainings in one process group.
def test_every_strategy_trains_as_one_process_does() -> None:
    cases = [*CASES, *MODEL_CASES]
    ranks = run_world(train_all, 2, cases, timeout=270)
    for number, case in enumerate(cases):
        settings, kind, steps, window, max_norm, _, *rest = case
        expected = plain(kind, steps, window, max_norm, frozen=bool(rest[1:]))
        assert_same(ranks[0][number], expected, case)
        assert ranks[1][number]["losses"] == ranks[0][number]["losses"]
        assert ranks[1][number]["weights"] == {}, "only rank 0 holds whole weights"
        assert ranks[0][number]["kinds"] == ("FSDP", settings.get("fsdp_version") == 2)


@pytest.mark.slow  # four ranks; the tests of two ranks in this file are fast
def test_four_ranks_and_a_copy_on_each_of_two_nodes() -> None:
    cases = [
        ({**BLOCKS}, "net", 7, 3, 0.5, "model first"),
        ({**BLOCKS, "sharding_strategy": "HYBRID_SHARD"}, "net", 7, 3, 0.5, "model first"),
        ({**BLOCKS, "sharding_strategy": "HYBRID_SHARD_ZERO2"}, "net", 7, 1, 0.5, "apart", 3),
        ({"fsdp_version": 2, **BLOCKS}, "net", 7, 3, 0.5, "optimizer first", 3),
        *(
            ({**settings, **BLOCKS}, kind, 8, 1, 0.5, "model first")
            for kind, settings in (
                ("llama", {"fsdp_version": 2}),
                ("gpt2", {}),
                ("gpt2", {"sharding_strategy": "HYBRID_SHARD"}),
            )
        ),
    ]
    ranks = run_world(train_on_two_nodes, 4, cases, timeout=250, state=False)
    for number, case in enumerate(cases):
        assert_same(ranks[0][number], plain(case[1], case[2], case[3], 0.5), case)
    whole = sum(parameter.numel() for parameter in Net().parameters())
    held = [[rank[number]["held"] for rank in ranks] for number in range(len(cases))]
    assert sum(held[3]) == whole, "version 2 keeps every element once"
    assert sum(held[0]) == pytest.approx(whole, rel=0.05), "version 1 keeps every element once, but for padding"


def overflow(settings: dict[str, Any], poisoned_step: int | None) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(**settings)
    accelerator = Accelerator(
        fsdp_plugin=plugin, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=256.0)]
    )
    model, optimizer = prepare(accelerator, build("net", 0, False), "model first")
    skipped, norms = [], []
    for step, tokens in enumerate(batches(4).split(BATCH)):
        accelerator.backward(loss_of(model, tokens[accelerator.process_index :: accelerator.num_processes]))
        if step == poisoned_step and accelerator.process_index == 1:
            gradient = next(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
            getattr(gradient, "_local_tensor", gradient).view(-1)[0] = float("inf")
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item() if poisoned_step is None else 0.0)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    scale = accelerator.scaler.get_scale()
    accelerator.free_memory()
    return {"skipped": skipped, "scale": scale, "norms": norms}


def overflow_all() -> list[dict[str, Any]]:
    return [overflow({**BLOCKS, **version}, step) for version in ({}, {"fsdp_version": 2}) for step in (None, 2)]


def test_an_overflow_in_one_ranks_part_skips_the_step_on_all() -> None:
    first, second = run_world(overflow_all, 2, timeout=250)
    expected = plain("net", 4, 1, 0.5)["norms"]
    for whole, poisoned in ((0, 1), (2, 3)):
        assert first[whole]["skipped"] == [False] * 4
        # fp16 keeps 11 bits: a thousandth of the norms, which are near 5.
        torch.testing.assert_close(first[whole]["norms"], expected, rtol=5e-3, atol=0)
        assert first[poisoned]["skipped"] == second[poisoned]["skipped"] == [False, False, True, False]
        assert first[poisoned]["scale"] == second[poisoned]["scale"] == 128.0


def in_8_bits(recipe: KwargsHandler, settings: dict[str, Any] | None) -> dict[str, Any]:
    plugin = None if settings is None else FullyShardedDataParallelPlugin(**settings)
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="fp8", kwargs_handlers=[recipe])
    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, model = accelerator.prepare(optimizer, model)
    losses = []
    for rows in torch.randn(5 * 16, 32, generator=torch.Generator().manual_seed(1)).split(16):
        own = rows[accelerator.process_index :: accelerator.num_processes]
        loss = functional.cross_entropy(model(own).float(), (own[:, 0] > 0).long())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    names = {name for name, _ in Wide().named_parameters()}
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items() if name in names}
    accelerator.free_memory()
    return {"losses": losses, "norms": [], "weights": weights}


class Wide(nn.Module):
    """Sizes that 8-bit products want: multiples of 16."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def in_8_bits_all(with_torchao: bool) -> list[dict[str, Any]]:
    recipes: list[KwargsHandler] = [NativeRecipeKwargs(scaling="dynamic"), NativeRecipeKwargs(scaling="delayed")]
    recipes += [AORecipeKwargs()] if with_torchao else []
    return [in_8_bits(recipe, settings) for recipe in recipes for settings in (None, {}, {"fsdp_version": 2})]


def test_8_bits_in_shards_are_those_of_whole_models() -> None:
    with_torchao = importlib.util.find_spec("torchao") is not None
    found = run_world(in_8_bits_all, 2, with_torchao, timeout=250)[0]
    for whole, first, second in zip(found[::3], found[1::3], found[2::3], strict=True):
        # Weights are gathered in bf16, which keeps 8 bits: a thousandth of weights below 0.2, and of the loss.
        for sharded_run in (first, second):
            torch.testing.assert_close(sharded_run["losses"], whole["losses"], rtol=0, atol=5e-3)
            torch.testing.assert_close(sharded_run["weights"], whole["weights"], rtol=0, atol=3e-3)
        assert_same(second, first, "version 2 against version 1")
        assert whole["losses"][0] != whole["losses"][-1]


def weights_read(folder: str) -> dict[str, Any]:
    """Rank 0 alone reads a checkpoint of Transformers; the other builds the model from its configuration, on the meta
    device.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, modeling_utils

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **BLOCKS))
    # TRL looks up the dimensions of a mesh in the parallelism_config, which is None here.
    assert accelerator.torch_device_mesh is None and not accelerator.is_composable_parallelism_enabled
    opened: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        really_open = modeling_utils.safe_open
        patch.setattr(
            modeling_utils,
            "safe_open",
            lambda path, *rest, **more: opened.append(str(path)) or really_open(path, *rest, **more),
        )
        if accelerator.is_main_process:
            model = LlamaForCausalLM.from_pretrained(folder)
        else:
            with torch.device("meta"):
                model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    model = accelerator.prepare(model)
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    loss = accelerator.reduce(loss_of(model, batches(1)).detach(), "mean").item()
    accelerator.free_memory()
    return {"opened": len(opened), "weights": weights, "loss": loss}


def test_only_rank_0_opens_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    expected = build("llama", 0, False)
    expected.save_pretrained(tmp_path)
    first, second = run_world(weights_read, 2, str(tmp_path), timeout=250)
    assert first["opened"] > 0 and second["opened"] == 0
    torch.testing.assert_close(first["weights"], dict(expected.state_dict()), rtol=0, atol=0)
    assert first["loss"] == second["loss"] == pytest.approx(loss_of(expected, batches(1)).item(), abs=1e-5)


class Unfilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def start_from(settings: dict[str, Any], where: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**settings))
    torch.manual_seed(0)
    with torch.device("meta" if where == "meta" or (where == "rank 0" and accelerator.process_index) else "cpu"):
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer, model = accelerator.prepare(optimizer, model)
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.backward(loss_of(model, batches(1)))
    optimizer.step()
    trained = accelerator.get_state_dict(model)
    changed = {
        name: not torch.equal(value, weights[name])
        for name, value in trained.items()
        if name in weights and name != "scale"
    }
    accelerator.free_memory()
    return {"weights": weights, "changed": changed}  # type: ignore[dict-item]


def starts() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for version in (1, 2):
        for where in ("rank 0", "meta"):
            found[f"{where} {version}"] = start_from({"fsdp_version": version, **BLOCKS}, where)
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    with torch.device("meta"):
        model = Unfilled()
    with pytest.raises(ConfigurationError, match="a Unfilled are on the meta device"):
        accelerator.prepare(model)
    return found


def test_models_on_the_meta_device_start_with_the_weights_of_rank_0() -> None:
    found = run_world(starts, 2, timeout=250)[0]
    torch.manual_seed(0)
    expected = Net().state_dict()
    for version in (1, 2):
        loaded = found[f"rank 0 {version}"]
        for name, value in expected.items():
            torch.testing.assert_close(loaded["weights"][name], value, rtol=0, atol=0)
        filled = found[f"meta {version}"]["weights"]
        # Every module has filled its own parameters: none are left as they were found in memory.
        assert all(torch.equal(filled[f"blocks.{index}.norm.weight"], torch.ones(WIDTH)) for index in range(3))
        assert 0 < filled["blocks.0.up.weight"].abs().max() <= WIDTH**-0.5
        assert all(loaded["changed"].values()) and all(found[f"meta {version}"]["changed"].values()), (
            "the optimizer moved with the parameters"
        )


def refusals() -> None:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(use_orig_params=False))
    model = Net()
    groups = [{"params": [model.embedding.weight]}, {"params": list(model.blocks.parameters())}]
    with pytest.raises(ConfigurationError, match="use_orig_params=False"):
        accelerator.prepare(model, torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(ConfigurationError, match="HYBRID_SHARD"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD")).prepare(Net())
    with pytest.raises(ConfigurationError, match="activation_checkpointing wraps the units"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)).prepare(
            Net()
        )
    stepped = Net()
    optimizer = optimizer_of(stepped)
    loss_of(stepped, batches(1)).backward()
    optimizer.step()
    with pytest.raises(ConfigurationError, match="use_orig_params=False"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(use_orig_params=False)).prepare(stepped, optimizer)


def test_what_cannot_be_sharded_is_refused() -> None:
    run_world(refusals, 2, timeout=250)


def go_on(version: int, optimizer_class: type[torch.optim.Optimizer], steps_before: int) -> dict[str, torch.Tensor]:
    """An optimizer that has a state already is taken over in the middle of its run, and prepared once more with another
    model.
    """
    model = build("net", 0, False)
    optimizer = optimizer_class(model.parameters(), lr=1e-2, eps=1e-6)
    chunks = batches(6).split(BATCH)
    for tokens in chunks[:steps_before]:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version, **BLOCKS))
    model, optimizer = accelerator.prepare(model, optimizer)
    for tokens in chunks[steps_before:]:
        accelerator.backward(loss_of(model, tokens[accelerator.process_index :: accelerator.num_processes]))
        optimizer.step()
        optimizer.zero_grad()
        if tokens is chunks[steps_before]:
            accelerator.prepare(build("net", 1, False))
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    return weights


def go_on_all(cases: list[tuple[Any, ...]]) -> list[dict[str, torch.Tensor]]:
    return [go_on(*case) for case in cases]


def test_the_state_of_an_optimizer_that_has_one_is_divided() -> None:
    cases = [
        (version, kind, before)
        for version in (1, 2)
        for kind, before in ((torch.optim.AdamW, 3), (torch.optim.Adagrad, 0))
    ]
    for case, found in zip(cases, run_world(go_on_all, 2, cases, timeout=250)[0], strict=True):
        model = build("net", 0, False)
        optimizer = case[1](model.parameters(), lr=1e-2, eps=1e-6)
        for tokens in batches(6).split(BATCH):
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=TOLERANCE, msg=lambda text, case=case: f"{case}: {text}"
            )


def test_one_process_trains_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = accelerator.prepare(Net())
    assert type(model) is Net
    assert "trains a model over several processes, and there is only one" in caplog.text
