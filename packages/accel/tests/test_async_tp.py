"""Products of tensor-parallel layers that overlap with their communication.

torch's operators have kernels for CUDA only. Here, they compute what they are defined as: torch's own reference
implementations, registered for CPUs, over gloo. What surrounds them is real.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from mesh_matrix import Case, data, deviation, mesh_step, plain_step, stacked
from mesh_runs import build
from transformers_5 import needs_transformers_5

from accel import Accelerator, ParallelismConfig
from accel.parallel import async_products
from accel.parallel.axis_settings import TorchTensorParallelConfig
from accel.strategies import mesh as mesh_strategy
from accel_state import context
from accel_state.env import patch_environment
from accel_state.errors import ArgumentTypeError, ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

ASYNC: dict[str, Any] = {"tp_handler": TorchTensorParallelConfig(enable_async_tp=True)}
TWO = [
    Case("tp 2", "llama", mesh=ASYNC),
    Case("tp 2", "llama", length=7, mesh=ASYNC),  # not a multiple of tp_size: nothing overlaps
    Case("tp 2", "gpt2", window=2, mesh=ASYNC),
    Case("tp 2", "tied llama", mesh=ASYNC),
    Case("tp 2", "qwen", mesh=ASYNC),
    Case("tp 2", "qwen2", mesh=ASYNC),
    Case("tp 2", "gemma2", mesh=ASYNC, fsdp={"activation_checkpointing": True}),
]
FOUR = [
    Case("tp 4", "llama", mesh=ASYNC),
    Case("dp_shard 2 x tp 2", "llama", mesh=ASYNC, fsdp={"activation_checkpointing": True}),
    Case("dp_replicate 2 x tp 2", "gpt2", mesh=ASYNC),
]


class OnCPU:
    """Counts the calls of torch's operators, which have CPU kernels in this block."""

    def __enter__(self) -> OnCPU:
        memory: Any = __import__("torch.distributed._symmetric_memory", fromlist=["lib"])
        self.calls = {"fused_all_gather_matmul": 0, "fused_matmul_reduce_scatter": 0}
        self.library = torch.library.Library("symm_mem", "IMPL")
        for name in self.calls:
            self.library.impl(name, self.counted(name, getattr(memory, f"_{name}_fallback")), "CPU")
        self.patch = mock.patch.object(mesh_strategy, "check_devices")
        self.patch.start()
        return self

    def counted(self, name: str, operator: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return operator(*args, **kwargs)

        return call

    def __exit__(self, *error: object) -> None:
        self.patch.stop()
        self.library._destroy()


def steps(cases: list[Case]) -> tuple[list[Any], list[dict[str, int]]]:
    found, calls = [], []
    for case in cases:
        with OnCPU() as operators:
            found.append(mesh_step(case))
        calls.append(operators.calls)
    return found, calls


@needs_transformers_5
@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_losses_and_gradients_are_those_of_one_process(ranks: int, cases: list[Case]) -> None:
    found, calls = run_world(steps, ranks, cases, timeout=250)[0]
    for case, result, made in zip(cases, found, calls, strict=True):
        assert deviation(result, plain_step(case)) < 1e-5, case
        # In two blocks, attention and the feed-forward network each have one forward, and the other one backward.
        forwards = 2 if case.fsdp else 1
        count = 0 if case.length % 2 else 4 * case.window * (1 + forwards)
        assert made == dict.fromkeys(made, count), case


def accelerator_with(settings: dict[str, Any], **options: Any) -> Accelerator:
    return Accelerator(parallelism_config=ParallelismConfig(tp_size=2, **settings), **options)


def whole_batch() -> dict[str, torch.Tensor]:
    return stacked(data(Case("tp 2", "llama")))


def in_bfloat16() -> tuple[list[float], list[float]]:
    """Losses and norms with and without overlap, under autocast."""
    found = []
    for overlap in (True, False):
        with context.isolated(), OnCPU() as operators:
            accelerator = accelerator_with(ASYNC if overlap else {}, mixed_precision="bf16")
            model = accelerator.prepare(build("llama"))
            loss = model(**whole_batch()).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            found.append([loss.item(), float(norm)])
            assert all(operators.calls.values()) == overlap
    return found[0], found[1]


@needs_transformers_5
def test_autocast_casts_what_the_operators_get() -> None:
    overlapped, plain = run_world(in_bfloat16, 2, timeout=250)[0]
    assert overlapped == pytest.approx(plain, rel=1e-2)


def refused() -> None:
    with pytest.raises(ConfigurationError, match="needs CUDA devices"):
        accelerator_with(ASYNC).prepare(build("llama"))
    with OnCPU(), pytest.raises(ConfigurationError, match="enable_async_tp=True does not support Phi3ForCausalLM"):
        accelerator_with(ASYNC).prepare(build("phi"))
    compiled = build("llama")
    compiled.compile(backend="eager")
    with OnCPU(), pytest.raises(ConfigurationError, match="enable_async_tp=True does not support .*compiled"):
        accelerator_with(ASYNC).prepare(compiled)
    with OnCPU():
        model = accelerator_with(ASYNC).prepare(build("llama"))
        block = model.model.layers[0].mlp
        type(block).forward, forward = lambda self, x: self.down_proj(self.up_proj(x)), type(block).forward
        try:
            with pytest.raises(ConfigurationError, match="LlamaMLP, which does not call all of its column-wise"):
                model(**whole_batch())
        finally:
            type(block).forward = forward


@needs_transformers_5
def test_what_it_cannot_do_is_refused() -> None:
    run_world(refused, 2, timeout=250)
    with pytest.raises(ConfigurationError, match="needs the 8 ranks of tp on one node"):
        async_products.check_devices(torch.device("cuda"), 8, 4)
    async_products.check_devices(torch.device("cuda"), 4, 8)


def test_settings_that_contradict_it() -> None:
    for sizes, message in (
        ({"dp_shard_size": 2}, "tp_size=1"),
        ({"tp_size": 2, "tp_sequence_parallel": False}, "tp_sequence_parallel=False"),
        ({"tp_size": 2, "cp_size": 2}, "cp_size=2: the combination has not been compared"),
        ({"tp_size": 2, "pp_size": 2}, "pp_size=2"),
        ({"tp_size": 2, "ep_size": 2}, "ep_size=2"),
        ({"tp_size": 2, "sp_size": 2}, "sp_size=2"),
    ):
        with pytest.raises(ConfigurationError, match=f"enable_async_tp=True.*{message}"):
            ParallelismConfig(**sizes, **ASYNC)
        with (
            patch_environment(PARALLELISM_CONFIG_ENABLE_ASYNC_TP="true"),
            pytest.raises(ConfigurationError, match=message),
        ):
            ParallelismConfig(**sizes)
    with pytest.raises(ArgumentTypeError, match="'yes'"):
        TorchTensorParallelConfig(enable_async_tp="yes")  # type: ignore[arg-type]
    with patch_environment(PARALLELISM_CONFIG_ENABLE_ASYNC_TP="true"):
        handler = ParallelismConfig(tp_size=2).tp_handler
    assert handler is not None and handler.enable_async_tp
