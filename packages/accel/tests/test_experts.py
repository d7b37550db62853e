"""Mixtures whose experts are distributed train as in one process: losses, every gradient, norms and weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_runs import (
    BLOCKS,
    EXPERTS,
    SETTINGS,
    accelerator_for,
    batches,
    build,
    compare,
    deviation,
    full_gradients,
    loss_of,
    loss_on,
    optimizer_of,
    plain,
    train,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers_5 import needs_transformers_5

from accel import ParallelismConfig
from accel.parallel.axis_settings import ExpertParallelConfig, PipelineParallelConfig
from accel.parallel.expert_balance import LoadCounter
from accel.parallel.expert_dispatch import dispatched
from accel.parallel.experts import experts_in
from accel_state import context
from accel_state.env import patch_environment
from accel_state.errors import ArgumentTypeError, ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

TOLERANCE = 1e-5
# Of norms and weights after steps of Adam, which makes steps of rounding where gradients are small.
LATER = {"losses": TOLERANCE, "gradients": TOLERANCE, "norms": 1e-3, "weights": 1e-4}
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "parallelism.md"

SPLIT_BACKWARD = {name: PipelineParallelConfig(name) for name in ("interleaved_zero_bubble", "zbv", "dualpipev")}

Case = tuple[str, dict[str, int], dict[str, Any] | None, str, int, int]
"""Model, sizes of the mesh, settings of FSDP, routing, micro-batches a step, tokens a sample."""

TWO: list[Case] = [
    ("mixtral", {"dp_shard_size": 2, "ep_size": 2}, BLOCKS, "even", 2, 9),
    ("mixtral", {"dp_shard_size": 2, "ep_size": 2}, None, "two", 1, 9),
    ("qwen2", {"dp_shard_size": 2, "ep_size": 2}, BLOCKS, "idle", 1, 9),
    ("deepseek", {"dp_shard_size": 2, "ep_size": 2}, BLOCKS, "even", 1, 7),
    ("llama4", {"tp_size": 2, "ep_size": 2}, None, "even", 1, 9),
]
CHECKPOINTED = {**BLOCKS, "activation_checkpointing": True}
SELECTIVE = {**CHECKPOINTED, "activation_checkpointing_mode": "selective"}
FOUR: list[Case] = [
    ("mixtral", {"dp_shard_size": 4, "ep_size": 2}, BLOCKS, "even", 2, 9),
    ("mixtral", {"dp_shard_size": 4, "ep_size": 4}, None, "two", 1, 9),
    ("mixtral", {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2}, BLOCKS, "idle", 2, 9),
    ("mixtral", {"dp_shard_size": 2, "cp_size": 2, "ep_size": 4}, BLOCKS, "even", 1, 8),
    ("mixtral", {"dp_replicate_size": 2, "tp_size": 2, "ep_size": 2}, None, "even", 1, 9),
    ("qwen2", {"dp_shard_size": 4, "ep_size": 2}, CHECKPOINTED, "two", 2, 7),
    ("qwen2", {"dp_shard_size": 2, "tp_size": 2, "ep_size": 2}, BLOCKS, "even", 1, 7),
    ("qwen3", {"dp_shard_size": 4, "ep_size": 2}, BLOCKS, "idle", 1, 9),
    ("qwen3", {"dp_shard_size": 2, "tp_size": 2, "ep_size": 4}, CHECKPOINTED, "two", 2, 7),
    ("qwen3", {"cp_size": 4, "ep_size": 2}, BLOCKS, "even", 1, 16),
    ("deepseek", {"dp_shard_size": 4, "ep_size": 2}, CHECKPOINTED, "even", 1, 7),
    ("deepseek", {"tp_size": 4, "ep_size": 2}, None, "even", 1, 9),
    ("deepseek", {"dp_shard_size": 2, "tp_size": 2, "ep_size": 4}, BLOCKS, "two", 2, 9),
    ("gpt oss", {"dp_shard_size": 4, "ep_size": 4}, BLOCKS, "idle", 1, 9),
    ("gpt oss", {"dp_shard_size": 2, "tp_size": 2, "ep_size": 2}, BLOCKS, "even", 1, 9),
    ("llama4", {"dp_shard_size": 4, "ep_size": 2}, BLOCKS, "two", 2, 9),
    ("llama4", {"dp_shard_size": 2, "tp_size": 2, "ep_size": 4}, CHECKPOINTED, "even", 1, 7),
    ("olmoe", {"dp_shard_size": 4, "ep_size": 2}, BLOCKS, "even", 1, 9),
    ("mixtral", {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2}, None, "idle", 2, 9),
    ("deepseek", {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2}, CHECKPOINTED, "even", 1, 7),
    ("qwen3", {"pp_size": 2, "tp_size": 2, "ep_size": 2}, None, "two", 1, 9),
    ("mixtral", {"pp_size": 2, "cp_size": 2, "ep_size": 2}, BLOCKS, "idle", 2, 8),
    ("deepseek", {"dp_shard_size": 2, "tp_size": 2, "ep_size": 4}, SELECTIVE, "even", 2, 9),
    ("gpt oss", {"dp_shard_size": 4, "ep_size": 2}, SELECTIVE, "idle", 1, 7),
    ("llama4", {"dp_shard_size": 4, "ep_size": 2}, SELECTIVE, "two", 1, 9),
    ("qwen2", {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2}, SELECTIVE, "two", 1, 9),
    ("qwen3", {"cp_size": 2, "tp_size": 2, "ep_size": 2}, SELECTIVE, "even", 1, 8),
    ("deepseek", {"pp_size": 2, "cp_size": 2, "ep_size": 2}, CHECKPOINTED, "even", 1, 8),
]


def train_all(cases: list[Case], steps: int) -> list[dict[str, Any]]:
    found = []
    for kind, sizes, fsdp, routing, window, length in cases:
        accelerator = accelerator_for(sizes, fsdp, gradient_accumulation_steps=window)
        found.append(train(accelerator, kind, steps, window, routing, length, **changes_for(sizes)))
    return found


def changes_for(sizes: dict[str, int]) -> dict[str, Any]:
    """Pipelines have no auxiliary loss."""
    return {"output_router_logits": False} if "pp_size" in sizes else {}


def row(case: Case, worst: dict[str, float]) -> str:
    kind, sizes, fsdp, routing, window, length = case
    mesh = ", ".join(f"{name.removesuffix('_size')} {size}" for name, size in sizes.items())
    extras = [f"{routing} routing", f"{length} tokens"]
    modes = ((CHECKPOINTED, "checkpointing"), (SELECTIVE, "selective checkpointing"))
    extras += [name for mode, name in modes if fsdp is mode]
    extras += ["accumulation"] if window > 1 else []
    return f"| {SETTINGS[kind][0]} | {mesh} | {', '.join(extras)} | {max(worst['losses'], worst['gradients']):.0e} |"


def assert_all(ranks: list[list[dict[str, Any]]], cases: list[Case], steps: int) -> list[str]:
    rows = []
    for number, case in enumerate(cases):
        kind, sizes, _, routing, window, length = case
        expected = plain(kind, steps, window, routing, length, **changes_for(sizes))
        worst = compare(ranks[0][number], expected)
        assert all(value < LATER[name] for name, value in worst.items()), (case, worst)
        assert all(rank[number]["losses"] == ranks[0][number]["losses"] for rank in ranks), case
        whole = sum(
            item.numel() for module in experts_in(build(kind)).values() for item in module.parameters(recurse=False)
        )
        copies = sizes.get("dp_replicate_size", 1)
        held = [rank[number]["held"] for rank in ranks]
        assert sum(held) == whole * copies and ("pp_size" in sizes or len(set(held)) == 1), case
        rows.append(row(case, worst))
    return rows


@needs_transformers_5
def test_two_ranks_with_half_of_the_experts_each_train_as_one_process() -> None:
    assert_all(run_world(train_all, 2, TWO, 4, timeout=250), TWO, 4)


@pytest.mark.slow  # 28 trainings of 20 steps on 4 ranks
def test_every_mesh_with_experts_trains_as_one_process() -> None:
    ranks = run_world(train_all, 4, FOUR, 20, timeout=500)
    rows = assert_all(ranks, FOUR, 20)
    print("\n".join(rows))
    guide = GUIDE.read_text()
    for line in rows:
        # The last digits are those of one machine.
        assert line.rpartition("|")[0].rpartition("|")[0] in guide, line


LATE: list[tuple[str, dict[str, int], str, str, int]] = [
    ("mixtral", {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2}, "interleaved_zero_bubble", "idle", 5),
    ("llama4", {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2}, "zbv", "even", 4),
    ("qwen3", {"pp_size": 2, "cp_size": 2, "ep_size": 2}, "zbv", "even", 4),
    ("deepseek", {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2}, "dualpipev", "even", 4),
    ("gpt oss", {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2}, "dualpipev", "two", 4),
]
"""Mixtures whose gradients of weights are computed later: the schedule, routing and the number of blocks."""


def shape_of(kind: str, blocks: int) -> dict[str, Any]:
    types = {"layer_types": ["sliding_attention", "full_attention"] * 2} if kind == "gpt oss" else {}
    return {"output_router_logits": False, "num_hidden_layers": blocks, **types}


def train_late(steps: int) -> list[dict[str, Any]]:
    found = []
    for kind, sizes, schedule, routing, blocks in LATE:
        accelerator = accelerator_for(
            sizes, {**BLOCKS, "reshard_after_forward": False}, pipeline=SPLIT_BACKWARD[schedule]
        )
        found.append(train(accelerator, kind, steps, 1, routing, 8, **shape_of(kind, blocks)))
    return found


@pytest.mark.slow  # five trainings of 20 steps on 4 ranks
def test_gradients_of_experts_may_be_computed_later() -> None:
    ranks = run_world(train_late, 4, 20, timeout=400)
    for (kind, sizes, schedule, routing, blocks), found in zip(LATE, ranks[0], strict=True):
        worst = compare(found, plain(kind, 20, 1, routing, 8, **shape_of(kind, blocks)))
        assert all(value < LATER[name] for name, value in worst.items()), (kind, sizes, schedule, worst)


def half_precision() -> dict[str, dict[str, Any]]:
    return {
        str(sizes): train(accelerator_for(sizes, BLOCKS, mixed_precision="bf16"), "mixtral", 3)
        for sizes in ({"dp_shard_size": 2}, {"dp_shard_size": 2, "ep_size": 2})
    }


@pytest.mark.slow  # three models; distributed experts equal one process in a fast test
def test_half_precision_is_no_further_off_than_without_distributed_experts() -> None:
    expected = plain("mixtral", 3)
    without, distributed = run_world(half_precision, 2, timeout=250)[0].values()
    limits = compare(without, expected)
    for name, value in compare(distributed, expected).items():
        assert 0 < value < 2 * limits[name] < 0.3, (name, value, limits)


def compiled() -> dict[str, Any]:
    accelerator = accelerator_for({"dp_shard_size": 2, "ep_size": 2}, BLOCKS, dynamo_backend="eager")
    return train(accelerator, "mixtral", 3)


@pytest.mark.slow  # torch.compile takes 15 s; test_facade.py and test_mesh_wrappers.py compile smaller models
def test_compiled_blocks_train_as_one_process() -> None:
    worst = compare(run_world(compiled, 2, timeout=250)[0], plain("mixtral", 3))
    assert max(worst.values()) < TOLERANCE, worst


def kernels() -> dict[str, dict[str, torch.Tensor]]:
    weights = {}
    for name in ("foreach", "fused"):
        accelerator = accelerator_for({"dp_shard_size": 2, "ep_size": 2}, BLOCKS)
        model = build("mixtral")
        model, optimizer = accelerator.prepare(model, optimizer_of(model, **{name: True}))
        for tokens in batches(2):
            loss_on(accelerator, model, tokens)
            optimizer.step()
            optimizer.zero_grad()
        assert all(group[name] for group in optimizer.param_groups)
        weights[name] = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
        accelerator.free_memory()
    return weights


@needs_transformers_5
def test_one_kernel_updates_weights_on_both_meshes() -> None:
    expected = plain("mixtral", 2, max_norm=float("inf"))["weights"]
    for name, weights in run_world(kernels, 2, timeout=250)[0].items():
        assert deviation(weights, expected) < TOLERANCE, name


def unchanged_elsewhere() -> None:
    """Another model of the same class has the auxiliary loss of its own tokens; and placements are as documented."""
    accelerator = accelerator_for({"dp_shard_size": 2, "ep_size": 2}, BLOCKS)
    other, tokens = build("mixtral"), batches(1)[0]
    own = tokens.chunk(2)[accelerator.process_index]
    before = loss_of(other, own)
    model = accelerator.prepare(build("mixtral"))
    assert torch.equal(loss_of(other, own), before)
    mean = accelerator.reduce(loss_of(model, own).detach(), "mean")
    # The loss of the whole batch, which the mean of the losses of its halves is not.
    torch.testing.assert_close(mean, loss_of(other, tokens).detach(), rtol=1e-6, atol=1e-6)
    halves = accelerator.reduce(loss_of(other, own).detach(), "mean")
    assert abs(float(halves - mean)) > 1e-4
    stack = next(iter(experts_in(model).values()))
    weight = stack.gate_up_proj
    assert isinstance(weight, DTensor) and weight.placements == (Shard(1), Shard(0))
    assert weight.device_mesh.mesh_dim_names == ("efsdp", "ep") and stack.num_experts == EXPERTS // 2


def padded() -> None:
    """Tokens of padding do not count in the auxiliary loss; ranks have unequally many of them."""
    accelerator = accelerator_for({"dp_shard_size": 2, "ep_size": 2}, BLOCKS)
    other, tokens = build("mixtral"), batches(1)[0]
    mask = torch.ones_like(tokens)
    mask[0, 2:] = mask[1, 4:] = 0
    model = accelerator.prepare(build("mixtral"))
    own, own_mask = (whole.chunk(2)[accelerator.process_index] for whole in (tokens, mask))
    found = model(input_ids=own, attention_mask=own_mask, use_cache=False).aux_loss
    expected = other(input_ids=tokens, attention_mask=mask, use_cache=False).aux_loss
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def padded_in_parts() -> None:
    """Ranks have parts of the sequences, of which the last one is padding for the most part."""
    tokens = batches(1, 12)[0]
    mask = torch.ones_like(tokens)
    mask[:5, 7:] = mask[5, 2:] = 0
    whole = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    other = build("mixtral")
    expected = other(**whole, use_cache=False)
    expected.loss.backward()
    for sizes in ({"cp_size": 2, "ep_size": 2}, {"cp_size": 2}, {"sp_size": 2}):
        accelerator = accelerator_for(sizes, BLOCKS)
        model = accelerator.prepare(build("mixtral"))
        batch = {name: value.clone() for name, value in whole.items()}
        batch = next(iter(accelerator.deepspeed_ulysses_dl_adapter([batch], model)))
        with accelerator.maybe_context_parallel(buffers=[*batch.values()], buffer_seq_dims=[1] * len(batch)):
            found = model(**batch, use_cache=False)
            accelerator.backward(found.loss)
        torch.testing.assert_close(found.aux_loss, expected.aux_loss, rtol=1e-6, atol=1e-6)
        mean = accelerator.reduce(found.loss.detach(), "mean")
        torch.testing.assert_close(mean, expected.loss.detach(), rtol=1e-6, atol=1e-6)
        gradients = {name: item.grad for name, item in other.named_parameters()}
        assert deviation(full_gradients(model), gradients) < TOLERANCE, sizes
        accelerator.free_memory()


def routed_to_no_expert() -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    hidden = torch.full((3, 2), 1.0 + rank)
    index = torch.tensor([[0, 3], [-1, 2], [4, 1]])
    outputs, counts = dispatched(
        lambda rows, numbers: rows * (1 + numbers + 2 * rank).unsqueeze(-1), hidden, index, 4, mesh
    )
    assert torch.equal(outputs, torch.tensor([[1, 4], [0, 3], [0, 2]]).unsqueeze(-1) * hidden.unsqueeze(1))
    assert torch.equal(counts, torch.ones(4, dtype=torch.int64))
    counter = LoadCounter(4)
    counter.add(counts, index.numel())
    assert counter.counts.tolist() == [1, 1, 1, 1, 2]


def all_of(cases: list[Callable[[], None]]) -> None:
    for case in cases:
        with context.isolated():
            case()


@needs_transformers_5
def test_auxiliary_losses_count_the_tokens_of_all_ranks_and_no_padding() -> None:
    run_world(all_of, 2, [unchanged_elsewhere, padded, padded_in_parts, routed_to_no_expert], timeout=250)


@pytest.mark.parametrize(
    ("make", "error", "found"),
    [
        (lambda: ParallelismConfig(dp_shard_size=4, ep_size=3), ConfigurationError, "ep_size=3"),
        (lambda: ParallelismConfig(dp_replicate_size=4, ep_size=2), ConfigurationError, "tp_size=1 = 1"),
        (lambda: ParallelismConfig(dp_shard_size=2, ep_size=0), ConfigurationError, "ep_size=0"),
        (lambda: ParallelismConfig(pp_size=4, ep_size=2), ConfigurationError, "tp_size=1 = 1"),
        (lambda: ParallelismConfig(dp_shard_size=2, sp_size=2, ep_size=2), ConfigurationError, "sp_size=2"),
        *(
            (partial(ParallelismConfig, pp_size=2, tp_size=2, ep_size=2, pp_handler=pipeline), ConfigurationError, name)
            for name, pipeline in SPLIT_BACKWARD.items()
        ),
        (lambda: ParallelismConfig(dp_shard_size=2, ep_handler=object()), ArgumentTypeError, "ExpertParallelConfig"),  # type: ignore[arg-type]
        (lambda: ExpertParallelConfig(-1.0), ConfigurationError, "-1.0"),
        (lambda: ExpertParallelConfig(float("nan")), ConfigurationError, "nan"),
        (lambda: ExpertParallelConfig("1e-3"), ArgumentTypeError, "'1e-3'"),  # type: ignore[arg-type]
    ],
)
def test_what_a_mesh_cannot_hold_is_refused_before_processes_start(make: Any, error: Any, found: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert found in str(raised.value)


def test_the_size_divides_the_mesh_and_adds_no_processes() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4, tp_size=2, ep_size=8)
    assert (config.total_size, config.data_parallel_size, config.ep_enabled) == (16, 8, True)
    assert config.strategy == "mesh" and "ep" not in config.active_mesh_dims
    with patch_environment(PARALLELISM_CONFIG_EP_SIZE="2", PARALLELISM_CONFIG_DP_SHARD_SIZE="4"):
        assert ParallelismConfig().ep_size == 2 and ParallelismConfig(ep_size=4).ep_size == 4


class OwnExperts(nn.Module):
    """Stacked weights of a class that no test compares with one process."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.down_proj = nn.Parameter(torch.zeros(4, 2, 2))


SHARED = {"dp_shard_size": 2, "ep_size": 2}


def refused() -> None:
    def own() -> nn.Module:
        return nn.ModuleDict({"experts": OwnExperts()})

    for make, rate, part in (
        (lambda: nn.Linear(2, 2), 0.0, "Linear"),
        (own, 0.0, "OwnExperts"),
        (lambda: build("mixtral", num_local_experts=5), 0.0, "5 experts"),
        (lambda: build("mixtral"), 1e-3, "balance_rate=0.001"),
    ):
        accelerator = accelerator_for(SHARED, BLOCKS, balance_rate=rate)
        with pytest.raises(ConfigurationError, match=part):
            accelerator.prepare(make())
    for fsdp, settings, part in (
        ({}, {"mixed_precision": "fp16"}, "fp16"),
        ({}, {"deterministic_reduction": True}, "deterministic_reduction"),
        ({"cpu_offload": True}, {}, "cpu_offload"),
    ):
        with pytest.raises(ConfigurationError, match=part):
            accelerator_for(SHARED, {**BLOCKS, **fsdp}, **settings)


def auxiliary_losses_of_stages() -> None:
    """They would be left out by a pipeline."""
    message = "output_router_logits=True: the auxiliary loss needs the routers of all stages"
    accelerator = accelerator_for({"pp_size": 2})
    with pytest.raises(ConfigurationError, match=message):
        accelerator.prepare(build("mixtral"))
    model, tokens = accelerator.prepare(build("mixtral", output_router_logits=False)), batches(1)[0]
    with pytest.raises(ConfigurationError, match=message):
        model(input_ids=tokens, labels=tokens, output_router_logits=True)


@needs_transformers_5
def test_models_and_settings_that_were_not_compared_are_refused() -> None:
    run_world(all_of, 2, [refused, auxiliary_losses_of_stages], timeout=250)


def refused_in_a_pipeline() -> None:
    accelerator = accelerator_for({"pp_size": 2, **SHARED}, BLOCKS)
    model = build("mixtral", output_router_logits=False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ConfigurationError, match="use_reentrant=True"):
        accelerator.prepare(model)


@needs_transformers_5
def test_reentrant_checkpointing_in_a_pipeline_whose_tokens_would_not_be_counted_is_refused() -> None:
    run_world(refused_in_a_pipeline, 4, timeout=250)
