"""Combinations that benchmarks/combinations.py found to be wrong, or to end in a library's error: they are refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from language_models import BATCH, LENGTH, build, dataset, stack
from torch import nn

from accel import Accelerator, DeepSpeedPlugin, LocalSGD
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.config import ParallelismConfig
from accel.utils import TorchDynamoPlugin
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(300)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def pipeline(model: Callable[[], nn.Module], **settings: Any) -> nn.Module:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2), **settings)
    return accelerator.prepare(model())


def gpt2() -> nn.Module:
    return build("gpt2")


def packed_pipeline() -> None:
    positions = (torch.arange(LENGTH) % (LENGTH // 2)).repeat(BATCH, 1)
    model = pipeline(gpt2)
    with pytest.raises(ConfigurationError, match="position_ids"):
        model(**stack(dataset(1)), position_ids=positions)
    model(**stack(dataset(1)), position_ids=torch.arange(LENGTH).repeat(BATCH, 1))


def compiled_pipelines() -> None:
    with pytest.raises(ConfigurationError, match="compiled"):
        pipeline(lambda: torch.compile(gpt2(), backend="eager"))
    for regional in (False, True):
        with context.isolated(), pytest.raises(ConfigurationError, match="dynamo_plugin"):
            pipeline(gpt2, dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=regional))


def eight_bit_pipeline() -> None:
    with pytest.raises(ConfigurationError, match="fp8"):
        pipeline(gpt2, mixed_precision="fp8")


def normed_in_bf16() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(ConfigurationError, match="BatchNorm1d"):
        Accelerator(mixed_precision="bf16", fsdp_plugin=plugin).prepare(normed())


def all_of(cases: list[Callable[[], None]]) -> None:
    for case in cases:
        with context.isolated():
            case()


@pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers")
def test_meshes() -> None:
    run_world(all_of, 2, [packed_pipeline, compiled_pipelines, eight_bit_pipeline, normed_in_bf16], timeout=250)


def with_deepspeed(model: nn.Module, stage: int, **settings: Any) -> tuple[Accelerator, nn.Module]:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage), **settings)
    prepared, _, _ = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader([0, 1], batch_size=1)
    )
    return accelerator, prepared


def local_sgd() -> None:
    with pytest.raises(ConfigurationError, match="LocalSGD"):
        LocalSGD(*with_deepspeed(nn.Linear(4, 4), 0), 2)


def compiled_stage_3() -> None:
    with pytest.raises(ConfigurationError, match=r"torch\.compile"):
        with_deepspeed(torch.compile(nn.Linear(4, 4), backend="eager"), 3)


def stage_0_in_bf16() -> None:
    with pytest.raises(ConfigurationError, match="zero_stage=1"):
        with_deepspeed(nn.Linear(4, 4), 0, mixed_precision="bf16")


def normed_under_deepspeed() -> None:
    with pytest.raises(ConfigurationError, match="BatchNorm1d"):
        with_deepspeed(normed(), 1, mixed_precision="bf16")


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed: scripts/test tells why")
def test_deepspeed() -> None:
    run_world(all_of, 2, [local_sgd, compiled_stage_3, stage_0_in_bf16, normed_under_deepspeed], timeout=250)


@pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers")
def test_recomputed_fp8_layers_are_not_compiled() -> None:
    model = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ConfigurationError, match="checkpointing"):
        Accelerator(cpu=True, mixed_precision="fp8", dynamo_plugin=TorchDynamoPlugin(backend="eager")).prepare(model)
