"""Models that are trained in part: frozen layers under tensor parallelism, adapters under FSDP, 4-bit base weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import BATCH, assert_same, build, dataset, stack
from torch import nn

from accel import Accelerator
from accel.core.quantized_layers import check_sharded
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.config import ParallelismConfig
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
    torch.manual_seed(0)
    model: nn.Module = FourBit(storage).to("cpu")  # quantizes
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
def test_four_bit_layers_train_after_an_evaluation() -> None:
    expected = train_four_bit(torch.float32, None)
    assert all(norm > 0 for norm in expected[3::4])
    for ranks, version in ((1, 0), (2, 2)):
        for found in run_world(train_four_bit, ranks, torch.float32, version, timeout=200):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


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
