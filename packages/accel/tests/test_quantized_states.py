"""Optimizers with states of 8 bits on shards of parameters."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.testing import run_world

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="the optimizers are torchao's")


def warnings_of(shape: tuple[int, int]) -> list[str]:
    from torchao.optim import AdamW8bit

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("accel.fsdp.quantized_states")
    logger.addHandler(handler)
    model, optimizer = accelerator.prepare(model, AdamW8bit(model.parameters()))
    logger.removeHandler(handler)
    # What the optimizer itself decides, here and in one process.
    weight, whole = next(model.parameters()), torch.zeros(shape)
    states = [optimizer.optimizer._new_buffer(weight, True).to_local(), AdamW8bit([whole])._new_buffer(whole, True)]
    decides_alike = type(states[0]) is type(states[1])
    assert bool(records) == (accelerator.is_main_process and not decides_alike)
    return [record.getMessage() for record in records]


def test_a_shard_whose_state_is_not_quantized_as_the_whole_is_reported() -> None:
    for shape, is_reported in (((64, 128), False), ((64, 64), True), ((32, 64), False), ((63, 128), True)):
        found = run_world(warnings_of, 2, shape, timeout=200)
        assert [len(warnings) for warnings in found] == [int(is_reported), 0], shape
        if is_reported:
            assert str(shape) in found[0][0]
