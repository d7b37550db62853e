"""Base weights in torchao's NF4 with adapters, on several ranks, against one process with the dequantized weights."""

from __future__ import annotations

import copy
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from fine_tuning import nf4_tensor
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from accel import Accelerator
from accel.core.nf4_weights import check_nf4, is_nf4, store_as_bytes
from accel.deepspeed.plugin import DeepSpeedPlugin
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.axis_settings import PipelineParallelConfig, TorchTensorParallelConfig
from accel.parallel.config import ParallelismConfig
from accel.parallel.tp_layers import Columns
from accel.strategies.ft import FaultTolerantStrategy
from accel.strategies.ft_fsdp2 import FaultTolerantFSDP2Strategy
from accel.strategies.xla import XlaStrategy
from accel.strategies.xla_spmd import XlaSpmdStrategy
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("torchao") is None, reason="NF4Tensor is torchao's"),
    pytest.mark.timeout(400),
]

STEPS, SAVED_AT, BATCH, WIDTH = 20, 10, 12, 64
BLOCKS: dict[str, Any] = {
    "fsdp_version": 2,
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": ["Adapted"],
}


class Adapted(nn.Module):
    """A frozen layer with an adapter; ``alone`` has the values of its weights in full."""

    def __init__(self, inputs: int, outputs: int, alone: bool, dtype: torch.dtype, trained: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).to(dtype).requires_grad_(False)
        packed = nf4_tensor(self.base.weight.data)
        self.base.weight = nn.Parameter(packed.get_original_weight() if alone else packed, requires_grad=False)
        self.down, self.up = (nn.Linear(*sizes, bias=False).to(trained) for sizes in ((inputs, 4), (4, outputs)))
        self.base_dtype, self.trained = dtype, trained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.to(self.base_dtype)) + self.up(self.down(x.to(self.trained)))


def model_of(alone: bool, dtype: torch.dtype = torch.float32, trained: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    first, second = Adapted(WIDTH, 96, alone, dtype, trained), Adapted(96, WIDTH, alone, dtype, trained)
    return nn.Sequential(first, nn.SiLU(), second)


def optimizer_of(model: nn.Module, everything: bool) -> torch.optim.Optimizer:
    chosen = [item for item in model.parameters() if everything or item.requires_grad]
    return torch.optim.AdamW(chosen, lr=1e-2, eps=1e-2)


def steps(model: Any, optimizer: Any, accelerator: Any, begin: int, end: int) -> list[float]:
    losses = []
    for number in range(begin, end):
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        if accelerator is None:
            loss = model(batch).float().square().mean()
            loss.backward()
        else:
            rank, ranks = accelerator.process_index, accelerator.num_processes
            loss = model(batch.chunk(ranks)[rank]).float().square().mean()
            accelerator.backward(loss)
            loss = accelerator.reduce(loss.detach(), "mean")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(**types: torch.dtype) -> list[float]:
    model = model_of(True, **types)
    return steps(model, optimizer_of(model, False), None, 0, STEPS)


def accelerator_of(kind: str) -> Accelerator:
    settings: dict[str, Any] = {}
    if kind not in ("alone", "ddp"):
        plugin = {"activation_checkpointing": True} if kind == "checkpointed" else {}
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(**BLOCKS, **plugin)
    if kind == "hsdp":
        settings["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    return Accelerator(cpu=True, **settings)


def train(kind: str, folder: str = "", everything: bool = False, **types: torch.dtype) -> dict[str, Any]:
    """All steps, with a state saved half-way if there is a folder."""
    with context.isolated():
        accelerator = accelerator_of(kind)
        model = model_of(False, **types)
        if kind == "meta" and accelerator.process_index:
            model = model.to("meta")
        model, optimizer = accelerator.prepare(model, optimizer_of(model, everything))
        losses = steps(model, optimizer, accelerator, 0, SAVED_AT)
        if folder:
            accelerator.save_state(folder)
        losses += steps(model, optimizer, accelerator, SAVED_AT, STEPS)
        stored = [item for name, item in model.named_parameters() if "weight_nf4" in name]
        held = [getattr(item, "_local_tensor", item) for item in stored]
        accelerator.free_memory()
        return {
            "losses": losses,
            "bytes": sum(item.nbytes for item in held),
            "whole": sum(item.nbytes for item in stored),
            "types": {item.dtype for item in stored},
        }


def train_all(kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    return [train(kind) for kind in kinds]


def check(ranks: list[dict[str, Any]], expected: list[float], sharded: int) -> None:
    for found in ranks:
        torch.testing.assert_close(found["losses"], expected, rtol=1e-5, atol=0)
        assert found["types"] == {torch.uint8}
        assert found["bytes"] <= -(-found["whole"] // sharded) + 6, "a rank has more than its share of each weight"
        # 4 bits a weight, 8 per block of 64, and 32 for each 16 of these; a mean and a table of 16 values.
        assert found["whole"] == 2 * (WIDTH * 96 // 2 + 96 + 4 * 6 + 4 + 4 * 16)


def test_nf4_weights_train_as_the_dequantized_ones() -> None:
    expected = plain()
    kinds = ("ddp", "fsdp2", "checkpointed", "meta")
    found = run_world(train_all, 2, kinds, timeout=200)
    for number, kind in enumerate(kinds):
        check([rank[number] for rank in found], expected, 1 if kind == "ddp" else 2)


@pytest.mark.slow  # four ranks; the test above has two
def test_nf4_weights_on_meshes_of_four_ranks() -> None:
    expected = plain()
    for kind, sharded in (("hsdp", 2), ("fsdp2", 4)):
        check([rank[0] for rank in run_world(train_all, 4, (kind,), timeout=300)], expected, sharded)


def train_in_bf16() -> list[dict[str, Any]]:
    return [
        train("fsdp2", dtype=torch.bfloat16, trained=trained, everything=everything)
        for trained, everything in ((torch.float32, True), (torch.bfloat16, False))
    ]


def test_bf16_weights_and_optimizers_of_frozen_parameters() -> None:
    """Sums of gradients in another order are rounded to bfloat16 where adapters have this type."""
    found = run_world(train_in_bf16, 2, timeout=200)
    for number, (trained, tolerance) in enumerate(((torch.float32, 2e-3), (torch.bfloat16, 2e-2))):
        expected = plain(dtype=torch.bfloat16, trained=trained)
        for rank in found:
            torch.testing.assert_close(rank[number]["losses"], expected, rtol=tolerance, atol=0)


def resume(kind: str, folder: str) -> list[float]:
    accelerator = accelerator_of(kind)
    torch.manual_seed(1)
    model = model_of(False)
    for item in model.parameters():
        if item.requires_grad:
            item.data.zero_()
    model[0].base.weight = nn.Parameter(nf4_tensor(torch.zeros(96, WIDTH)), requires_grad=False)
    model, optimizer = accelerator.prepare(model, optimizer_of(model, True))
    accelerator.load_state(folder)
    return steps(model, optimizer, accelerator, SAVED_AT, STEPS)


def test_a_state_is_resumed_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """With three, the bytes of a weight do not divide evenly."""
    folder = str(tmp_path / "state")
    run_world(train, 2, "fsdp2", folder, True, timeout=200)
    expected = plain()[SAVED_AT:]
    for ranks, kind in ((3, "fsdp2"), (2, "ddp"), (1, "alone")):
        for found in run_world(resume, ranks, kind, folder, timeout=200):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def refused() -> None:
    for axis in ("pp_size", "ep_size"):
        with context.isolated(), pytest.raises(ConfigurationError, match="NF4Tensor.*not been compared"):
            Accelerator(cpu=True, parallelism_config=parallelism_of(axis)).prepare(model_of(False))
    with context.isolated(), pytest.raises(ConfigurationError, match=r"NF4Tensor.*FSDP1Strategy.*fsdp_version=2"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
        Accelerator(cpu=True, fsdp_plugin=plugin).prepare(model_of(False))
    for plan, named in (
        ({"0.base": "colwise", "2.base": "rowwise"}, "96 inputs in NF4.*each 64 weights.*dp_shard_size"),
        ({"0.base": "rowwise"}, "64 inputs in NF4.*tp_size=2 would cut its rows into parts of 32"),
        ({"0.base": Columns(pieces=2)}, "holds 2 matrices"),
        ({"0.base": ColwiseParallel()}, "by ColwiseParallel of torch, which would cut its blocks"),
    ):
        with context.isolated(), pytest.raises(ConfigurationError, match=named):
            settings = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
            Accelerator(cpu=True, parallelism_config=settings).prepare(model_of(False))


def parallelism_of(axis: str) -> ParallelismConfig:
    more = {"pp_handler": PipelineParallelConfig()} if axis == "pp_size" else {"dp_shard_size": 2}
    return ParallelismConfig(**{axis: 2}, **more)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="the engine is DeepSpeed's")
def test_deepspeed_is_refused() -> None:
    run_world(refused_deepspeed, 1, timeout=200)


def refused_deepspeed() -> None:
    model = model_of(False)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    with pytest.raises(ConfigurationError, match="NF4Tensor.*DeepSpeedStrategy. Use DDP"):
        accelerator.prepare(model, optimizer_of(model, False))


def test_strategies_of_devices_and_replicas_are_refused() -> None:
    for strategy in (XlaStrategy, XlaSpmdStrategy, FaultTolerantStrategy, FaultTolerantFSDP2Strategy):
        with pytest.raises(ConfigurationError, match="NF4Tensor.*Use DDP"):
            check_nf4(model_of(False), strategy)


def test_what_was_not_compared_is_refused() -> None:
    run_world(refused, 2, timeout=200)


def test_weights_of_fsdp_that_are_not_gathered_have_no_values() -> None:
    run_world(read_outside, 2, timeout=200)


def read_outside() -> None:
    accelerator = accelerator_of("fsdp2")
    weight = accelerator.prepare(model_of(False))[0].base.weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((96, WIDTH), torch.float32, "cpu")
    assert weight.get_original_weight().is_meta


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda objects: pickle.loads(pickle.dumps(objects))])
def test_an_accelerator_with_nf4_weights_can_be_copied_and_pickled(copied: Any) -> None:
    """Also a layer with two such weights."""
    expected = plain()
    with context.isolated():
        accelerator = accelerator_of("alone")
        model = model_of(False)
        model[0].base.other = nn.Parameter(nf4_tensor(torch.randn(64, 64)), requires_grad=False)
        other = model[0].base.other.get_original_weight()
        model, optimizer = accelerator.prepare(model, optimizer_of(model, True))
        losses = steps(model, optimizer, accelerator, 0, SAVED_AT)
        objects = copied((accelerator, model, optimizer))
        for run in ((accelerator, model, optimizer), objects):
            found = losses + steps(run[1], run[2], run[0], SAVED_AT, STEPS)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
            assert torch.equal(run[1][0].base.other.get_original_weight(), other)


def test_tied_weights_stay_tied_and_keep_their_values() -> None:
    model = model_of(False)
    model.add_module("tied", nn.Linear(WIDTH, 96))
    model.tied.weight = model[0].base.weight
    expected = model[0].base.weight.get_original_weight()
    replaced = store_as_bytes(model)
    assert len(replaced) == 2
    assert model.tied.weight_nf4 is model[0].base.weight_nf4
    for layer in (model.tied, model[0].base):
        assert isinstance(layer, nn.Linear)
        assert type(layer).__name__ == "Linear"
        assert is_nf4(layer.weight)
        assert torch.equal(layer.weight.get_original_weight(), expected)
    assert store_as_bytes(model) == []
