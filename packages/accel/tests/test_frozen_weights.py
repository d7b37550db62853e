"""Models that are trained in part: frozen layers under tensor parallelism, adapters under FSDP, 4-bit base weights."""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import BATCH, build, dataset, stack
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from windows import assert_same

from accel import Accelerator
from accel.core.quantized_layers import check_sharded
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.kwargs.ddp import DistributedDataParallelKwargs
from accel.parallel.config import ParallelismConfig
from accel.strategies.deepspeed import DeepSpeedStrategy
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(300)
STEPS, THAW_AT = 4, 2
needs_models = pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers")
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="the clients' environment has bitsandbytes"
)
FIRST_LAYERS = ("embed_tokens", "wte", "wpe", "layers.0.", "h.0.")


def train_part(kind: str, accelerator: Accelerator | None) -> dict[str, Any]:
    """Embeddings and the first layer join the training after two steps."""
    model = build(kind)
    first = [item for name, item in model.named_parameters() if any(part in name for part in FIRST_LAYERS)]
    for parameter in first:
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms = [], []
    for number in range(STEPS):
        if number == THAW_AT:
            model.requires_grad_(True)
        loss = model(**stack(dataset(STEPS)[number * BATCH : (number + 1) * BATCH])).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        clip = nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
        norms.append(clip(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    if accelerator is not None:
        accelerator.free_memory()
    return {"losses": losses, "norms": norms, "weights": {name: value.clone() for name, value in weights.items()}}


def train_with_tp(kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    return [train_part(kind, Accelerator(parallelism_config=ParallelismConfig(tp_size=2))) for kind in kinds]


@needs_models
def test_frozen_layers_under_tensor_parallelism_may_be_trained_later() -> None:
    kinds = ("llama", "gpt2")
    found = run_world(train_with_tp, 2, kinds, timeout=250)[0]
    for kind, run in zip(kinds, found, strict=True):
        assert_same(run, train_part(kind, None), kind, 1e-5)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def thaw(accelerator: Accelerator | None, raw: bool = False, freeze_after: bool = False) -> list[torch.Tensor]:
    """The first layer joins the training after two steps, in a group of its own."""
    model: Any = Stack().double()
    if not freeze_after:
        model.first.requires_grad_(False)
    optimizer: Any = torch.optim.AdamW(model.second.parameters(), lr=1e-2)
    inner, original, backward, ranks, rank = model, optimizer, torch.Tensor.backward, 1, 0
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        inner, backward = accelerator.unwrap_model(model), accelerator.backward
        ranks, rank = accelerator.num_processes, accelerator.process_index
    inner.first.requires_grad_(False)
    for number in range(STEPS):
        if number == THAW_AT:
            inner.first.requires_grad_(True)
            (original if raw else optimizer).add_param_group({"params": list(inner.first.parameters()), "lr": 5e-3})
        samples = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        backward(model(samples.chunk(ranks)[rank]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(item, "full_tensor", lambda item=item: item)().detach() for item in model.parameters()]


def thaw_all() -> list[list[torch.Tensor]]:
    """With FSDP 2 and DDP, where the group is added to the prepared optimizer or to the one in it."""
    found = []
    for raw in (False, True):
        with context.isolated():
            accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
            found.append(thaw(accelerator, raw))
    for raw, freeze_after, find_unused in product((False, True), repeat=3):
        with context.isolated():
            handler = DistributedDataParallelKwargs(find_unused_parameters=find_unused)
            found.append(thaw(Accelerator(cpu=True, kwargs_handlers=[handler]), raw, freeze_after))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True)
    with context.isolated(), pytest.raises(ConfigurationError, match=r"first\.weight was frozen .* Use FSDP 2 or DDP"):
        thaw(Accelerator(cpu=True, fsdp_plugin=plugin))
    return found


def test_layers_that_are_trained_later_are_trained_as_in_one_process_or_refused() -> None:
    expected = thaw(None)
    for ranks in run_world(thaw_all, 2, timeout=200):
        for found in ranks:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def switch(settings: dict[str, Any] | None) -> list[torch.Tensor]:
    """The first layer is frozen and trained again, each after an evaluation; it returns all gradients and weights."""
    model: Any = Stack()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    backward, ranks, rank = torch.Tensor.backward, 1, 0
    if settings is not None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **settings)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward, ranks, rank = accelerator.backward, accelerator.num_processes, accelerator.process_index
    found = []
    for number in range(6):
        samples = torch.randn(8, 6, generator=torch.Generator().manual_seed(number)).chunk(ranks)[rank]
        with torch.no_grad():
            model(samples)
        if number in (1, 3):
            model.first.requires_grad_(number == 3)
        backward(model(samples).square().mean())
        gradients = [torch.zeros(()) if item.grad is None else item.grad for item in model.parameters()]
        found += [getattr(item, "full_tensor", lambda item=item: item)().clone() for item in gradients]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(getattr(item, "full_tensor", lambda item=item: item)().detach() for item in model.parameters())]


LAYERS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}


def switch_all() -> list[list[torch.Tensor]]:
    found = []
    for settings in ({}, {**LAYERS, "reshard_after_forward": False}, {**LAYERS, "reshard_after_forward": True}):
        with context.isolated():
            found.append(switch(settings))
    return found


def test_layers_may_be_frozen_and_trained_again_after_an_evaluation() -> None:
    expected = switch(None)
    for ranks in run_world(switch_all, 2, timeout=200):
        for found in ranks:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


SAVE_AT, LAST = 3, 6


def interrupted(accelerator: Accelerator | None, joins: int, folder: str = "", resume: bool = False) -> list[Any]:
    """The weights of a run whose first layer is trained from step ``joins`` on, and not in steps 2 and 3 if it is 0."""
    model: Any = Stack()
    model.first.requires_grad_(not joins)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    backward, ranks, rank = torch.Tensor.backward, 1, 0
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        backward, ranks, rank = accelerator.backward, accelerator.num_processes, accelerator.process_index
    first = model.module.first if hasattr(model, "module") else model.first
    if resume:
        first.requires_grad_(False)
        accelerator.load_state(folder)
        assert not any(item.requires_grad for item in first.parameters())
    for number in range(SAVE_AT if resume else 0, LAST):
        if folder and not resume and number == SAVE_AT:
            accelerator.save_state(folder)
        first.requires_grad_(number >= joins if joins else number not in (2, 3))
        samples = torch.randn(8, 6, generator=torch.Generator().manual_seed(number)).chunk(ranks)[rank]
        backward(model(samples).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if accelerator is None:
        return [item.detach() for item in model.parameters()]
    return [value.clone() for value in accelerator.get_state_dict(model).values()]


def interrupted_all(folder: str) -> list[tuple[int, list[Any]]]:
    found = []
    settings: list[dict[str, Any]] = [{"fsdp_version": 1, "use_orig_params": True}, {"fsdp_version": 2}]
    for joins, options, kind in product((0, 1), settings, ("FULL_STATE_DICT", "SHARDED_STATE_DICT")):
        if joins and options["fsdp_version"] == 1:
            continue  # refused
        place = f"{folder}/{joins}_{options['fsdp_version']}_{kind}"
        for resume in (False, True):
            with context.isolated():
                plugin = FullyShardedDataParallelPlugin(state_dict_type=kind, **options)
                accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
                found.append((joins, interrupted(accelerator, joins, place, resume)))
                accelerator.free_memory()
    return found


def test_layers_that_are_frozen_while_a_state_is_loaded_have_their_moments(tmp_path: Path) -> None:
    expected = [interrupted(None, joins) for joins in (0, 1)]
    for joins, found in run_world(interrupted_all, 2, str(tmp_path), timeout=200)[0]:
        torch.testing.assert_close(found, expected[joins], rtol=1e-5, atol=1e-6)


def half_precision_gradients() -> list[list[torch.Tensor]]:
    """The gradients of a layer in half precision: never frozen, and trained after a step in which it was frozen."""
    found = []
    for frozen in (False, True):
        with context.isolated():
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **LAYERS)
            accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=plugin)
            model: Any = Stack()
            model.first.requires_grad_(not frozen)
            model = accelerator.prepare(model)
            samples = torch.randn(8, 6, generator=torch.Generator().manual_seed(accelerator.process_index))
            accelerator.backward(model(samples).square().mean())
            model.zero_grad()
            model.first.requires_grad_(True)
            accelerator.backward(model(samples).square().mean())
            found.append([item.grad.full_tensor() for item in model.parameters()])
    return found


def test_a_layer_that_is_trained_later_has_gradients_in_the_same_precision() -> None:
    always, later = run_world(half_precision_gradients, 2, timeout=200)[0]
    assert [item.dtype for item in later] == [torch.float32] * 4
    torch.testing.assert_close(later, always, rtol=0, atol=0)


class Adapted(nn.Module):
    """A frozen layer with adapters so small that one of two ranks holds all of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 1, bias=False), nn.Linear(1, 8, bias=False)
        self.base = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(folder: str, kind: str) -> tuple[list[float], list[float]]:
    """The losses after a saved state, and those after it was loaded."""

    def start() -> tuple[Accelerator, nn.Module, Any]:
        accelerator = Accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True, state_dict_type=kind)
        )
        torch.manual_seed(0)
        model = Adapted()
        optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=0.1)
        return accelerator, *accelerator.prepare(model, optimizer)

    def train(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for _ in range(2):
            loss = model(torch.ones(2, 8)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    run = start()
    train(*run)
    trained = run[2].param_groups[0]["params"]
    held = torch.tensor(float(sum(item.numel() for item in trained)))
    assert run[0].gather(held).min() == 0, "both ranks hold elements that are trained"
    run[0].save_state(folder)
    undisturbed = train(*run)
    run[0].free_memory()
    again = start()
    again[0].load_state(folder)
    return undisturbed, train(*again)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_adapters_of_which_a_rank_holds_no_element_are_saved(kind: str, tmp_path: Path) -> None:
    for undisturbed, resumed in run_world(adapted, 2, str(tmp_path / "state"), kind, timeout=200):
        assert undisturbed == resumed


class FourBit(nn.Module):
    def __init__(self, storage: torch.dtype) -> None:
        from bitsandbytes.nn import Linear4bit

        super().__init__()
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.base = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4", quant_storage=storage)
        self.head = nn.Linear(64, 8, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x) + self.up(self.down(x)))


def train_four_bit(storage: torch.dtype, version: int | None) -> list[float]:
    """Losses of evaluation and training in turn, and gradient norms; in one process of plain PyTorch without FSDP."""
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # all ranks start with the weights of the first
    model: nn.Module = FourBit(storage).to("cpu")  # quantizes
    torch.manual_seed(2)
    inputs, targets = torch.randn(8, 64), torch.randn(8, 8)
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=1e-2)
    accelerator = None
    if version is None:
        model.base.support_avx512bf16_for_cpu = False
    else:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version) if version else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model, optimizer = accelerator.prepare(model, optimizer)
    found = []
    for _ in range(3):
        model.eval()
        with torch.no_grad():
            found += [nn.functional.mse_loss(model(inputs), targets).item() for _ in range(2)]
        model.train()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        clip = nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
        found += [loss.item(), clip(model.parameters(), 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    return found


@needs_bitsandbytes
@pytest.mark.parametrize("cases", [[(2, 2)], pytest.param([(1, 0), (2, 0), (2, 1)], marks=pytest.mark.slow)], ids=str)
def test_four_bit_layers_train_after_an_evaluation(cases: list[tuple[int, int]]) -> None:
    expected = train_four_bit(torch.float32, None)
    assert all(norm > 0 for norm in expected[3::4])
    for ranks, version in cases:
        for found in run_world(train_four_bit, ranks, torch.float32, version, timeout=200):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class GatheredBytes(TorchDispatchMode):
    """Counts the bytes that all-gathers return on this rank."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in func.name():
            self.total += args[0].nbytes
        return func(*args, **(kwargs or {}))


def gathered_four_bit() -> tuple[int, int]:
    """Bytes that a forward and a backward pass gather, and those of the parameters as they are stored."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = accelerator.prepare(FourBit(torch.uint8).to("cpu"))
    with GatheredBytes() as gathered:
        accelerator.backward(model(torch.randn(8, 64)).sum())
    return gathered.total, sum(item.nbytes for item in model.parameters())


@needs_bitsandbytes
def test_four_bit_weights_are_gathered_in_four_bits() -> None:
    for gathered, stored in run_world(gathered_four_bit, 2, timeout=200):
        assert stored == 64 * 64 // 2 + 4 * (2 * 4 * 64 + 8 * 64)
        assert gathered == 2 * stored  # once for each pass


def trainable_weights(kind: str, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights that a model in training has, after one step; in one process of plain PyTorch without settings."""
    model = build(kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name or "h.1." in name)
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=1e-2)
    accelerator = Accelerator(cpu=True, **settings) if settings else None
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(**stack(dataset(1)[:BATCH])).loss
    loss.backward() if accelerator is None else accelerator.backward(loss)
    optimizer.step()
    if accelerator is None:
        return {name: item.detach() for name, item in model.named_parameters() if item.requires_grad}
    with GatheredBytes() as gathered:
        state = accelerator.get_state_dict(model, trainable_only=True)
    trained = sum(item.nbytes for item in model.parameters() if item.requires_grad)
    assert gathered.total <= trained or "fsdp_plugin" not in settings, "frozen weights were gathered"
    return state


def trainable_on_ranks(cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, torch.Tensor]]:
    found = []
    for kind, settings in cases:
        with context.isolated():
            found.append(trainable_weights(kind, settings))
    with context.isolated(), pytest.raises(ConfigurationError, match="does not support FSDP 1.*fsdp_version=2"):
        trainable_weights("llama", {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)})
    with context.isolated(), pytest.raises(ConfigurationError, match="does not support unwrap=False"):
        Accelerator(cpu=True).get_state_dict(nn.Linear(1, 1), unwrap=False, trainable_only=True)
    with pytest.raises(ConfigurationError, match=r"does not support DeepSpeedStrategy.*get_state_dict\(model\)"):
        DeepSpeedStrategy().trainable_state_dict(nn.Linear(1, 1))
    return found


@needs_models
def test_a_state_of_trainable_weights_alone() -> None:
    """Fused weights (GPT-2 under tensor parallelism) and checkpointed blocks have the names and shapes of the model."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", activation_checkpointing=True
    )
    cases: list[tuple[str, dict[str, Any]]] = [
        ("gpt2", {"parallelism_config": ParallelismConfig(tp_size=2)}),
        ("llama", {"fsdp_plugin": plugin}),
        ("llama", {"kwargs_handlers": [DistributedDataParallelKwargs()]}),
    ]
    first, second = run_world(trainable_on_ranks, 2, cases, timeout=250)
    assert [len(state) for state in second[:2]] == [0, 0]
    for (kind, settings), state in zip(cases, first, strict=True):
        expected = trainable_weights(kind, {})
        assert state.keys() == expected.keys(), settings
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)


def saved_four_bit(storage: torch.dtype, version: int, folder: str) -> bool:
    """Whether the whole state, and the file of weights, are those of the model itself."""
    torch.manual_seed(0)
    model: nn.Module = FourBit(storage).to("cpu")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version))
    model = accelerator.prepare(model)
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, folder)
    if not accelerator.is_main_process:
        return not state
    saved = load_file(f"{folder}/model.safetensors")
    return all(
        found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
        for found in (state, saved)
    )


@needs_bitsandbytes
@pytest.mark.parametrize(("version", "storage"), [(2, torch.uint8), (1, torch.float32)])
def test_four_bit_weights_are_saved_with_their_scales(version: int, storage: torch.dtype, tmp_path: Path) -> None:
    assert all(run_world(saved_four_bit, 2, storage, version, str(tmp_path), timeout=200))


@needs_bitsandbytes
def test_quantized_layers_that_fsdp_would_tear_are_refused() -> None:
    from bitsandbytes.nn import Linear8bitLt

    for storage, dtype, version, named in (
        (torch.float32, torch.bfloat16, 2, "torch.bfloat16"),
        (torch.uint8, None, 1, "torch.uint8"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            check_sharded(FourBit(storage).to("cpu"), dtype, version)
    check_sharded(FourBit(torch.uint8).to("cpu"), torch.bfloat16, 2)
    with pytest.raises(ConfigurationError, match="8-bit"):
        check_sharded(nn.Sequential(Linear8bitLt(8, 8, has_fp16_weights=False)), None, 2)


@needs_bitsandbytes
def test_a_loaded_state_has_its_own_scales(tmp_path: Path) -> None:
    """bitsandbytes loads the packed bytes alone, and keeps the scales that a layer had before."""
    inputs, outputs = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), []
    for seed in (0, 1):
        with context.isolated():
            torch.manual_seed(seed)
            accelerator = Accelerator(cpu=True)
            model = accelerator.prepare(FourBit(torch.uint8).to("cpu"))
            accelerator.load_state(tmp_path / "state") if seed else accelerator.save_state(tmp_path / "state")
            outputs.append(model(inputs))
    assert torch.equal(*outputs)
    other = FourBit(torch.uint8)
    other.base.weight.blocksize = 128
    with context.isolated(), pytest.raises(ConfigurationError, match="blocks of 64 weights.* nf4 with blocks of 128"):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(other.to("cpu"))
        accelerator.load_state(tmp_path / "state")
