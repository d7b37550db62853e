"""Checkpointing of some units, and of what is between their matrix products: equal, and what is computed again."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from expert_runs import accelerator_for, compare
from expert_runs import build as build_experts
from expert_runs import plain as plain_experts
from expert_runs import train as train_experts
from mesh_matrix import Case, deviation, local, mesh_steps, plain_step
from mesh_runs import assert_same, batches, build, loss_of, plain, train
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode
from transformers_5 import needs_transformers_5

from accel import Accelerator, ParallelismConfig
from accel.core.kept_results import KeptKinds, KeptResults, keep
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.kwargs.activation_checkpointing import ActivationCheckpointingKwargs
from accel_state import context
from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

BLOCKS = {"auto_wrap_policy": "transformer_based_wrap"}
FULL = {"activation_checkpointing": True}
SELECTIVE = {**FULL, "activation_checkpointing_mode": "selective"}
SUMS = {**FULL, "activation_checkpointing_mode": "sums"}
COLLECTIVES = {**FULL, "activation_checkpointing_mode": "collectives"}
SECOND = {**FULL, "activation_checkpointing_every": 2}
TWO = [
    Case("dp_shard 2", "gpt2", fsdp=SECOND, window=2),
    Case("dp_shard 2", "llama", fsdp=SELECTIVE, window=2),
    Case("tp 2", "llama", fsdp=SELECTIVE, length=7),
    Case("tp 2", "llama", fsdp=SUMS, window=2),
    Case("tp 2", "gemma2", fsdp=COLLECTIVES, length=7),
    Case("cp 2", "llama", fsdp=SELECTIVE),
    Case("pp 2", "deep llama", fsdp={**SELECTIVE, **SECOND}),
]
MORE = [
    Case("dp_shard 2", "gemma2", fsdp=SELECTIVE),
    Case("tp 2", "llama", fsdp=SELECTIVE, mesh={"tp_sequence_parallel": False}),
    Case("tp 2", "gpt2", fsdp={**SELECTIVE, **SECOND}, length=7),
    Case("tp 2", "gpt2", fsdp={**SUMS, "activation_checkpointing_offload": True}),
    Case("tp 2", "gemma2", fsdp=SUMS, mesh={"tp_sequence_parallel": False}),
    Case("sp 2", "gpt2", fsdp=SELECTIVE, window=2),
    Case("sp 2", "llama", fsdp=SECOND),
    Case("pp 2", "deep llama", fsdp=SELECTIVE, pipeline={"schedule": "interleaved1f1b"}),
    Case("pp 2", "deep tied llama", fsdp=SELECTIVE, pipeline={"schedule": "gpipe", "num_microbatches": 4}, window=2),
    Case("pp 2", "gpt2", fsdp=SELECTIVE, length=7),
    Case("pp 2", "gemma2", fsdp=SELECTIVE, window=2),
]
FOUR = [
    Case("dp_shard 2 x tp 2", "llama", fsdp=SELECTIVE, window=2),
    Case("dp_shard 2 x tp 2", "tied llama", fsdp={**SELECTIVE, **SECOND}),
    Case("dp_shard 2 x tp 2", "llama", fsdp=COLLECTIVES, window=2),
    Case("dp_shard 2 x cp 2", "gpt2", fsdp=SELECTIVE),
    Case("pp 2 x dp_shard 2", "llama", fsdp=SELECTIVE),
    Case("pp 2 x tp 2", "deep llama", fsdp=SELECTIVE, pipeline={"schedule": "interleaved1f1b"}),
    Case("pp 2 x cp 2", "llama", fsdp=SELECTIVE, window=2),
    Case("pp 2 x sp 2", "gpt2", fsdp=SELECTIVE),
    Case("pp 2 x dp_replicate 2", "deep llama", fsdp={**SELECTIVE, **SECOND}),
    Case("pp 4", "deep tied llama", fsdp=SELECTIVE, pipeline={"num_microbatches": 4}),
]


def assert_equal(world: int, cases: list[Case]) -> None:
    for case, found in zip(cases, run_world(mesh_steps, world, cases, timeout=500)[0], strict=True):
        assert deviation(found, plain_step(case)) < 1e-5, case


def test_two_ranks_train_as_one_process() -> None:
    assert_equal(2, TWO)


@pytest.mark.slow  # more models and axes than above
@pytest.mark.parametrize(("world", "cases"), [(2, MORE), (4, FOUR)], ids=["two ranks", "four ranks"])
def test_every_mesh_trains_as_one_process(world: int, cases: list[Case]) -> None:
    assert_equal(world, cases)


OFFLOADED = {**FULL, "activation_checkpointing_offload": True}
MODES = [SELECTIVE, SECOND, OFFLOADED]


def accelerator_with(settings: dict[str, Any], version: int = 2, window: int = 1) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **BLOCKS, **settings)
    return Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=window)


def trained() -> list[dict[str, Any]]:
    return [train(accelerator_with(mode, version, window=2), "own", 4, 2) for version in (1, 2) for mode in MODES]


def test_both_versions_train_as_one_process() -> None:
    expected = plain("own", 4, 2)
    for mode, found in zip(MODES * 2, run_world(trained, 2, timeout=250)[0], strict=True):
        assert_same(found, expected, mode)


def operations() -> dict[str, tuple[int, int]]:
    """Floating-point operations of a forward and a backward pass."""
    found = {}
    for name, settings in {"none": {}, "full": FULL, "second": SECOND, "selective": SELECTIVE}.items():
        accelerator = accelerator_with(settings)
        model = accelerator.prepare(build("llama"))
        with FlopCounterMode(display=False) as forward:
            loss = loss_of(model, batches(1))
        with FlopCounterMode(display=False) as backward:
            accelerator.backward(loss)
        found[name] = forward.get_total_flops(), backward.get_total_flops()
        accelerator.free_memory()
    return found


def test_products_and_attention_are_computed_once_and_half_of_the_blocks_again() -> None:
    found = run_world(operations, 2, timeout=250)[0]
    forward, without = found["none"]
    again = {name: backward - without for name, (_, backward) in found.items()}
    assert all(value == forward for value, _ in found.values())
    # The head, outside of the blocks, is not computed again.
    assert again["selective"] == 0 and 0.5 * forward < again["full"] < forward
    assert again["second"] == again["full"] / 2


def tensor_parallel_steps(precision: str, sequence: bool) -> dict[str, tuple[Counter[str], list[torch.Tensor]]]:
    """Collectives and FLOPs of a step under tensor parallelism, and this rank's part of the gradients, by mode."""
    found = {}
    modes = {"none": {}, "full": FULL, "selective": SELECTIVE, "sums": SUMS, "collectives": COLLECTIVES}
    for name, settings in modes.items():
        with context.isolated():
            config = ParallelismConfig(tp_size=2, tp_sequence_parallel=sequence)
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **BLOCKS, **settings)
            accelerator = Accelerator(mixed_precision=precision, fsdp_plugin=plugin, parallelism_config=config)
            model = accelerator.prepare(build("llama"))
            with CommDebugMode() as messages, FlopCounterMode(display=False) as flops:
                accelerator.backward(loss_of(model, batches(1)))
            counts = Counter({str(name).split(".")[-1]: count for name, count in messages.get_comm_counts().items()})
            counts["flops"] = flops.get_total_flops()
            found[name] = counts, [local(parameter.grad).clone() for parameter in model.parameters()]
            accelerator.free_memory()
    return found


@needs_transformers_5
@pytest.mark.parametrize(("precision", "sequence"), [("no", True), ("bf16", True), ("no", False)])
def test_sums_over_tensor_parallel_ranks_are_kept(precision: str, sequence: bool) -> None:
    """Modes other than "full" neither multiply nor add up again in row-wise layers. No mode changes a bit."""
    found = run_world(tensor_parallel_steps, 2, precision, sequence, timeout=250)[0]
    none, full, selective, sums, collectives = (counts for counts, _ in found.values())
    adds_up = "_reduce_scatter_base_" if sequence else "allreduce_"
    # Two blocks: "full" repeats the sum of each attention. Inputs of norms and of column-wise layers are made again.
    assert full[adds_up] - none[adds_up] == 2
    assert selective[adds_up] == sums[adds_up] == collectives[adds_up] == none[adds_up]
    gathers = {mode["_allgather_base_"] - none["_allgather_base_"] for mode in (full, selective, sums)}
    assert gathers == ({4} if sequence else {0}) and collectives["_allgather_base_"] == none["_allgather_base_"]
    assert selective["flops"] == none["flops"] < sums["flops"] == collectives["flops"] < full["flops"]
    for name in ("full", "selective", "sums", "collectives"):
        for gradient, expected in zip(found[name][1], found["none"][1], strict=True):
            assert torch.equal(gradient, expected), name


def test_a_kept_sum_that_was_changed_in_place_is_refused() -> None:
    results = KeptResults(KeptKinds(last=True))
    with results.recorded(nullcontext()):
        out = keep(lambda: torch.ones(2))
    with results.reused(nullcontext()):
        assert torch.equal(keep(lambda: torch.zeros(2)), torch.ones(2))
    out.add_(1)
    with results.reused(nullcontext()), pytest.raises(RuntimeError, match="was changed in place"):
        keep(lambda: torch.ones(2))


def test_the_last_result_is_kept_only_where_it_is_computed_again() -> None:
    kinds = KeptKinds()
    for step in range(2):
        results = KeptResults(kinds)
        with results.recorded(nullcontext()):
            for value in (1.0, 2.0):
                keep(lambda value=value: torch.tensor(value))
        with results.reused(nullcontext()):
            again = [keep(lambda: torch.tensor(5.0)) for _ in range(2)]
        assert again == [1.0, 5.0 if step == 0 else 2.0]


def with_a_cache() -> list[dict[str, Any]]:
    """Transformers returns keys and values for generation by default; computed again, they would be there twice."""
    runs = []
    for settings in (FULL, SELECTIVE):
        accelerator = accelerator_with(settings)
        model = build("llama")
        model.set_attn_implementation("eager")
        model = accelerator.prepare(model)
        output = model(batches(1)[:, :-1])
        accelerator.backward(output.logits.square().mean())
        gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
        cached = output.past_key_values.get_seq_length()
        model.eval()
        # Generation has its cache.
        runs.append({"gradients": gradients, "trained": cached, "eval": _cached(model)})
        accelerator.free_memory()
    return runs


def _cached(model: nn.Module) -> int:
    length: int = model(batches(1)[:, :-1]).past_key_values.get_seq_length()
    return length


@needs_transformers_5
def test_keys_and_values_of_generation_are_not_collected() -> None:
    from torch.testing import assert_close

    model = build("llama")
    model.set_attn_implementation("eager")
    model(batches(1)[:, :-1]).logits.square().mean().backward()
    for run in run_world(with_a_cache, 2, timeout=250)[0]:
        assert (run["trained"], run["eval"]) == (0, batches(1).shape[1] - 1)
        assert_close(run["gradients"], [parameter.grad for parameter in model.parameters()], rtol=0, atol=1e-6)


def prefix() -> None:
    accelerator, tokens = accelerator_with(FULL), batches(1)
    model = build("llama")
    past = model(tokens[:, :2]).past_key_values
    assert past.get_seq_length() == 2
    with pytest.raises(ConfigurationError, match="trained with 2 positions in its cache"):
        accelerator.prepare(model)(tokens[:, 2:], past_key_values=past)


def test_a_prefix_of_keys_and_values_is_refused() -> None:
    run_world(prefix, 2, timeout=250)


def test_settings_are_checked_and_come_from_the_launcher() -> None:
    for settings, words in [
        ({"activation_checkpointing_mode": "selective"}, "needs activation_checkpointing=True"),
        ({"activation_checkpointing_every": 2}, "needs activation_checkpointing=True"),
        ({**FULL, "activation_checkpointing_every": 0}, "activation_checkpointing_every=0"),
        ({**FULL, "activation_checkpointing_every": 1.5}, "activation_checkpointing_every=1.5"),
        ({**FULL, "activation_checkpointing_mode": "some"}, "'some'"),
        ({**SELECTIVE, "activation_checkpointing_offload": True}, "Leave one of them out"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            FullyShardedDataParallelPlugin(**settings)
    launched = {"FSDP_ACTIVATION_CHECKPOINTING": "true", "FSDP_ACTIVATION_CHECKPOINTING_EVERY": "3"}
    with patch_environment(**launched, FSDP_ACTIVATION_CHECKPOINTING_MODE="selective"):
        plugin = FullyShardedDataParallelPlugin()
        assert (plugin.activation_checkpointing_mode, plugin.activation_checkpointing_every) == ("selective", 3)
        with patch_environment(FSDP_ACTIVATION_CHECKPOINTING_EVERY="1"):
            assert (
                FullyShardedDataParallelPlugin(activation_checkpointing_mode="full").activation_checkpointing_every == 1
            )


def with_experts() -> tuple[list[dict[str, Any]], int, str]:
    """Trainings with distributed experts, the products that are computed again, and what is refused."""
    sizes = {"dp_shard_size": 2, "ep_size": 2}
    settings = {"fsdp_version": 2, **BLOCKS, **SELECTIVE}
    trained = [train_experts(accelerator_for(sizes, settings), kind, 2) for kind in ("deepseek", "gpt oss")]
    accelerator = accelerator_for(sizes, settings)
    model = accelerator.prepare(build_experts("deepseek"))
    loss = loss_of(model, batches(1))
    with FlopCounterMode(display=False) as backward:
        accelerator.backward(loss)
    accelerator.free_memory()
    with context.isolated(), pytest.raises(ConfigurationError) as raised:
        accelerator_for(sizes, settings, dynamo_backend="eager").prepare(build_experts("deepseek"))
    return trained, backward.get_total_flops(), str(raised.value)


@pytest.mark.slow  # four models; dense models are fast
def test_distributed_experts_that_are_gathered_inside_of_a_checkpoint() -> None:
    found, flops, refused = run_world(with_experts, 2, timeout=250)[0]
    for kind, run in zip(("deepseek", "gpt oss"), found, strict=True):
        worst = compare(run, plain_experts(kind, 2))
        assert worst["losses"] < 1e-5 and worst["gradients"] < 1e-5, (kind, worst)
    model = build_experts("deepseek")
    loss = loss_of(model, batches(1))
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert flops <= backward.get_total_flops()
    assert "activation_checkpointing_mode='selective' in a compiled model" in refused


class Normed(nn.Module):
    """Blocks with batch norms: with a running mean, with a cumulative one, and without statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        norms = [nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None), nn.BatchNorm1d(6, track_running_stats=False)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), norm, nn.Tanh()) for norm in norms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train_normed(accelerator: Accelerator | None, compiles: bool = False) -> dict[str, torch.Tensor]:
    """The weights and statistics after three batches, which are the same on all ranks."""
    model: Any = Normed()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    step = torch.compile(model, backend="aot_eager") if compiles else model
    for number in range(3):
        loss = step(torch.randn(8, 6, generator=torch.Generator().manual_seed(number))).square().mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    return {name: value.clone() for name, value in state.items()}


def train_normed_all() -> list[dict[str, torch.Tensor]]:
    found = []
    for version, mode in product((0, 1, 2), ("full", "selective")):
        with context.isolated():
            given: dict[str, Any] = {"kwargs_handlers": [ActivationCheckpointingKwargs(["Sequential"], mode)]}
            if version:
                settings = {**FULL, "activation_checkpointing_mode": mode, **BLOCKS, "fsdp_version": version}
                plugin = FullyShardedDataParallelPlugin(**settings, transformer_cls_names_to_wrap=["Sequential"])
                given = {"fsdp_plugin": plugin}
            found.append(train_normed(Accelerator(cpu=True, **given)))
    return found


def test_batch_norms_count_each_batch_once() -> None:
    expected = train_normed(None)
    for found in run_world(train_normed_all, 2, timeout=200)[0]:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for mode in ("full", "selective"):
        with context.isolated():
            accelerator = Accelerator(cpu=True, kwargs_handlers=[ActivationCheckpointingKwargs(["Sequential"], mode)])
            compiled = train_normed(accelerator, compiles=True)
        torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_two_backward_passes_through_a_graph(mode: str) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    plain: Any = nn.Sequential(*Normed().blocks)
    with context.isolated():
        accelerator = Accelerator(cpu=True, kwargs_handlers=[ActivationCheckpointingKwargs(["Sequential"], mode)])
        model = accelerator.prepare(Normed())
        for module in (plain, model):
            loss = module(x).square().mean()
            loss.backward(retain_graph=True)
            if module is model and mode == "selective":
                with pytest.raises(RuntimeError, match="under selective activation checkpoint"):
                    loss.backward()
                return
            loss.backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    for found, expected in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected)
