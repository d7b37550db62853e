"""Isolates the tests from each other: fresh states and fixed seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from ft_runs import lighthouse  # noqa: F401

from accel_state import context
from accel_state.testing import preload

# What most ranks of these tests import, which takes each of them seconds: a server imports it once, and ranks are
# forked from it.
preload(
    *(
        "accel.accelerator",
        "accel.checkpointing",
        "accel.checkpointer.accumulation_state",
        "accel.kwargs.base",
        "accel_data",
    ),
    *(f"accel.strategies.{name}" for name in ("ddp", "fsdp1", "fsdp2", "mesh", "mesh_pp")),
    *(f"accel.fsdp.{name}" for name in ("checkpoint.files", "checkpoint.state_dicts", "merge", "meta_init")),
    *(
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.pipelining",
        "torch.nn.parallel",
    ),
    *("safetensors.torch", *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "bert"))),
    "preloaded_deepspeed",
)


@pytest.fixture(autouse=True)
def fresh_states() -> Iterator[None]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with context.isolated():
        yield
