"""Models in stages: the losses, norms and weights of one process, in every schedule and with every other axis."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import (
    BATCH,
    LENGTH,
    VOCABULARY,
    Own,
    build,
    dataset,
    loss_of,
    optimizer_of,
    plain,
    sharding,
    shifted_loss,
    stack,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from windows import TOLERANCE, assert_same, train_windows

from accel import Accelerator, GradScalerKwargs
from accel.core.fused_dtensor import full_tensor
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.axis_settings import PipelineParallelConfig
from accel.parallel.config import ParallelismConfig
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

EXAMPLE = (torch.arange(2 * LENGTH).view(2, -1) % VOCABULARY,)
Case = tuple[str, dict[str, Any], dict[str, int], dict[str, Any], int, str]


def pipeline(kind: str, settings: dict[str, Any]) -> PipelineParallelConfig:
    if kind == "own":
        settings = {**settings, "loss_fn": shifted_loss, "example": EXAMPLE}
    return PipelineParallelConfig(**settings)


def train(case: Case, steps: int = 20) -> dict[str, Any]:
    kind, shape, sizes, settings, window, order = case
    config = ParallelismConfig(**sizes, pp_handler=pipeline(kind, settings))
    accelerator = Accelerator(
        parallelism_config=config, fsdp_plugin=sharding(sizes), gradient_accumulation_steps=window
    )
    model = build(kind, **shape)
    if order == "optimizer first":
        optimizer = accelerator.prepare(optimizer_of(model))
        model = accelerator.prepare(model)
    elif order == "together":
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
    else:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer_of(model))
    loader = accelerator.prepare(DataLoader(dataset(steps * window), batch_size=BATCH // config.data_parallel_size))
    stage = accelerator.pipeline_parallel_rank

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        output = model(batch["input_ids"], labels=batch["labels"])
        accelerator.backward(output.loss)
        return output.loss

    return {**train_windows(accelerator, model, [optimizer], loader, step), "stage": stage}


def train_all(cases: list[Case]) -> list[dict[str, Any]]:
    return [train(case) for case in cases]


def check(size: int, cases: list[Case]) -> None:
    ranks = run_world(train_all, size, cases, timeout=250)
    for number, (kind, shape, sizes, settings, window, _) in enumerate(cases):
        copies = sizes.get("dp_shard_size", 1) * sizes.get("dp_replicate_size", 1)
        # A loss of one's own is a mean of those of the micro batches.
        parts = copies * settings.get("num_microbatches", sizes["pp_size"]) if kind == "own" else copies
        assert_same(ranks[0][number], plain(kind, 20, window, parts=parts, **shape), cases[number])
        assert all(rank[number]["losses"] == ranks[0][number]["losses"] for rank in ranks)
        assert all(rank[number]["weights"] == {} for rank in ranks[1:]), "only rank 0 holds whole weights"
        whole = sum(parameter.numel() for parameter in build(kind, **shape).parameters())
        assert all(rank[number]["held"] < 0.75 * whole for rank in ranks), "no rank has all stages"


FOUR = {"layers": 4}


@pytest.mark.slow  # a dozen trainings in two ranks; stages and schedules have fast tests
def test_two_stages_train_as_one_process_does() -> None:
    pp2 = {"pp_size": 2}
    check(
        2,
        [
            ("llama", {"layers": 3}, pp2, {}, 1, "together"),
            (
                "llama",
                {**FOUR, "tied": True},
                pp2,
                {"schedule": "interleaved1f1b", "num_microbatches": 4},
                2,
                "optimizer first",
            ),
            ("gpt2", FOUR, pp2, {"num_microbatches": 4}, 2, "model first"),
            ("own", FOUR, pp2, {"schedule": "gpipe", "num_microbatches": 4}, 1, "together"),
            ("llama", {**FOUR, "tied": True}, pp2, {"schedule": "zbv", "num_microbatches": 4}, 2, "optimizer first"),
            ("own", {"layers": 5}, pp2, {"schedule": "dualpipev", "num_microbatches": 8}, 1, "model first"),
        ],
    )


@pytest.mark.slow  # trainings in four ranks; test_mesh_matrix.py has the other combinations of axes
def test_pipelines_of_shards_copies_and_shared_layers() -> None:
    check(
        4,
        [
            ("gpt2", FOUR, {"pp_size": 2, "dp_shard_size": 2}, {"schedule": "interleaved1f1b"}, 1, "optimizer first"),
            ("llama", FOUR, {"pp_size": 4}, {}, 1, "together"),
            ("llama", {"layers": 8}, {"pp_size": 4}, {"schedule": "zbv", "num_microbatches": 2}, 2, "together"),
            ("llama", {"layers": 9}, {"pp_size": 4}, {"schedule": "dualpipev"}, 1, "optimizer first"),
        ],
    )


def in_half_precision(precision: str, schedule: str = "1f1b", **shape: int) -> dict[str, Any]:
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(pp_size=2, pp_handler=PipelineParallelConfig(schedule)),
        mixed_precision=precision,
        kwargs_handlers=[GradScalerKwargs(init_scale=256.0)] if precision == "fp16" else None,
    )
    model, optimizer = accelerator.prepare(*((whole := build("llama", **shape)), optimizer_of(whole)))
    losses, norms = [], []
    for start in range(0, 4 * BATCH, BATCH):
        batch = stack(dataset(4)[start : start + BATCH])
        output = model(**batch, attention_mask=torch.ones_like(batch["input_ids"]))
        accelerator.backward(output.loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output["loss"].item())
    scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
    accelerator.free_memory()
    return {"losses": losses, "norms": norms, "scale": scale}


def sharded_in_bf16_with_example() -> list[float]:
    each = BATCH // 2
    config = ParallelismConfig(
        pp_size=2,
        dp_shard_size=2,
        pp_handler=PipelineParallelConfig(example={"input_ids": torch.zeros(each // 2, LENGTH, dtype=torch.long)}),
    )
    accelerator = Accelerator(
        parallelism_config=config,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        mixed_precision="bf16",
    )
    model, optimizer = accelerator.prepare(*((whole := build("llama")), optimizer_of(whole)))
    rank = accelerator.strategy.data_collectives.rank
    losses = []
    for start in range(0, 3 * BATCH, BATCH):
        batch = stack(dataset(3)[start + rank * each : start + (rank + 1) * each])
        assert batch["input_ids"].shape == (each, LENGTH)
        output = model(**batch)
        accelerator.backward(output.loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(output.loss.detach(), "mean").item())
    accelerator.free_memory()
    return losses


@pytest.mark.slow  # four ranks
def test_an_example_of_the_trained_shape_with_shards_that_compute_in_bf16() -> None:
    """The example is recorded in float32, before sharding casts the weights."""
    expected = plain("llama", 3)["losses"]
    for losses in run_world(sharded_in_bf16_with_example, 4, timeout=250):
        assert losses == pytest.approx(expected, rel=3e-2)


def evaluation_and_refusals() -> dict[str, Any]:
    halves = {precision: in_half_precision(precision) for precision in ("bf16", "fp16")}
    in_a_v = {precision: in_half_precision(precision, "zbv", **FOUR) for precision in ("bf16", "fp16")}
    accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2))
    model = accelerator.prepare(build("gpt2"))
    model.eval()
    batch = stack(dataset(1))
    with torch.no_grad():
        output = model(input_ids=batch["input_ids"], labels=batch["labels"])
        shorter = model(batch["input_ids"][:4, :8])
    model.train()
    tokens = batch["input_ids"]
    for args, call, message in (
        ((tokens,), {}, "got no labels"),
        ((tokens,), {"input_ids": tokens, "labels": tokens}, "multiple values for argument .input_ids"),
        ((tokens[:3],), {"labels": tokens[:3]}, "a batch of 3 samples on a rank is not a multiple of it"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            model(*args, **call)
    accelerator.free_memory()
    for sizes, settings, whole, message in (
        ({"pp_size": 2}, {"schedule": "interleaved1f1b"}, build("llama"), "fewer than the 4 stages"),
        ({"pp_size": 2}, {}, build("own"), "Own has no loss_function"),
        ({"pp_size": 2}, {"loss_fn": shifted_loss}, build("own"), "Own is not a model of Transformers, so how it is"),
        ({"pp_size": 2}, {"loss_fn": shifted_loss, "example": EXAMPLE}, nn.Linear(2, 2), "has no nn.ModuleList of"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            config = ParallelismConfig(**sizes, pp_handler=PipelineParallelConfig(**settings))
            Accelerator(parallelism_config=config).prepare(whole)
    values = {"loss": output.loss.item(), "logits": output.logits, "shorter": shorter.logits}
    return {**values, "halves": halves, "in_a_v": in_a_v}


class Odd(Own):
    """Computes outside its blocks, and adds what it gave the first one to what the last one returns."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = first = self.embedding(tokens) * 4
        for block in self.blocks:
            x = block(x, self.turns)
        return self.head(self.norm(x + first))


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[function.name()] += 1
        return function(*args, **(kwargs or {}))


def counted_stages() -> list[Counter[str]]:
    """The operators of a second step, with one and with two blocks per stage: the first exchanges shapes."""
    found = []
    for layers in (4, 8):
        config = ParallelismConfig(pp_size=4, pp_handler=PipelineParallelConfig(num_microbatches=4))
        accelerator = Accelerator(parallelism_config=config)
        model, batch = accelerator.prepare(build("llama", layers=layers)), stack(dataset(1))
        for _ in range(2):
            model.zero_grad()
            with Operators() as counter:
                accelerator.backward(model(**batch).loss)
        found.append(counter.calls)
        accelerator.free_memory()
    return found


def test_a_block_runs_in_its_stage_only() -> None:
    """Four more blocks cost four stages together what they cost one process that runs the same micro-batches.

    What a model computes outside its blocks, such as rotary tables, each stage computes, however many blocks it has.
    """
    few, many = Operators(), Operators()
    batch = stack(dataset(1))
    for layers, counter in ((4, few), (8, many)):
        model = build("llama", layers=layers)
        with counter:
            for part in range(4):
                micro = {name: value.chunk(4)[part] for name, value in batch.items()}
                model(**micro, use_cache=False).loss.backward()
    ranks = run_world(counted_stages, 4, timeout=250)
    more = sum((rank[1] for rank in ranks), Counter())
    more.subtract(sum((rank[0] for rank in ranks), Counter()))
    many.calls.subtract(few.calls)
    # The factor of the loss multiplies every gradient, once per step.
    many.calls["aten::mul_.Tensor"] += 4 * len(list(build("llama").model.layers[0].parameters()))
    assert {name: calls for name, calls in more.items() if calls} == {
        name: calls for name, calls in many.calls.items() if calls
    }
    assert all(rank[1]["aten::silu"] == many.calls["aten::silu"] // 2 for rank in ranks)


def counted_losses() -> tuple[list[float], list[int]]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2))
    model = accelerator.prepare(build("llama"))
    losses, calls = [], []
    for autocast in (False, False, True, True):
        with Operators() as counter, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(model(**stack(dataset(1))).loss.item())
        calls.append(counter.calls["c10d::broadcast_"])
    accelerator.free_memory()
    return losses, calls


def test_the_loss_is_one_message_a_step() -> None:
    with torch.no_grad():
        expected = build("llama")(**stack(dataset(1))).loss.item()
    for losses, calls in run_world(counted_losses, 2, timeout=250):
        assert losses[:2] == [pytest.approx(expected, rel=1e-5)] * 2
        assert losses[2:] == [pytest.approx(expected, rel=1e-2)] * 2
        # The first step of a kind tells more: the dtype of the loss, and the shapes of what stages pass on.
        assert calls[1::2] == [1, 1] and min(calls[::2]) > 1


def odd_gradients() -> dict[str, torch.Tensor]:
    config = ParallelismConfig(pp_size=2, pp_handler=pipeline("own", {}))
    accelerator = Accelerator(parallelism_config=config)
    torch.manual_seed(0)
    model = accelerator.prepare(Odd())
    batch = stack(dataset(1))
    accelerator.backward(model(batch["input_ids"], labels=batch["labels"]).loss)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    accelerator.free_memory()
    return gradients


def test_code_outside_the_blocks_is_trained_too() -> None:
    torch.manual_seed(0)
    model, batch = Odd(), stack(dataset(1))
    for tokens, labels in zip(batch["input_ids"].chunk(2), batch["labels"].chunk(2), strict=True):
        (shifted_loss(model(tokens), labels) / 2).backward()
    ranks = run_world(odd_gradients, 2, timeout=250)
    assert {name for gradients in ranks for name in gradients} == dict(model.named_parameters()).keys()
    for gradients in ranks:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=0, atol=TOLERANCE, msg=name)


def test_outputs_losses_half_precision_and_what_is_refused() -> None:
    batch = stack(dataset(1))
    with torch.no_grad():
        whole = build("gpt2").eval()
        expected, shorter = whole(**batch), whole(batch["input_ids"][:4, :8]).logits
    ranks = run_world(evaluation_and_refusals, 2, timeout=250)
    curves = {"halves": plain("llama", 4), "in_a_v": plain("llama", 4, **FOUR)}
    for found in ranks:
        torch.testing.assert_close(found["logits"], expected.logits, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(found["shorter"], shorter, rtol=0, atol=TOLERANCE)
        assert found["loss"] == pytest.approx(expected.loss.item(), abs=TOLERANCE)
        # bf16 keeps 8 bits and fp16 11: a hundredth and a thousandth of losses and norms, which are near 3.
        for precision, tolerance in (("bf16", 3e-2), ("fp16", 5e-3)):
            for name, whole_curve in curves.items():
                half = found[name][precision]
                torch.testing.assert_close(half["losses"], whole_curve["losses"], rtol=tolerance, atol=0)
                torch.testing.assert_close(half["norms"], whole_curve["norms"], rtol=5 * tolerance, atol=0)
        assert found["halves"]["fp16"]["scale"] == 256.0


def test_settings_that_contradict_each_other_are_refused() -> None:
    for settings, message in (
        ({"schedule": "zb1p"}, "schedule='zb1p' is not one of gpipe, 1f1b, interleaved1f1b"),
        ({"num_microbatches": 0}, "num_microbatches=0 must be a positive integer"),
        ({"stages_per_rank": 2}, "stages_per_rank=2 does not go with schedule='1f1b'"),
        ({"schedule": "zbv", "stages_per_rank": 3}, "stages_per_rank=3 .* schedule='zbv', which has two stages"),
        ({"schedule": "dualpipev", "stages_per_rank": 1}, "schedule='dualpipev', which has two stages"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            PipelineParallelConfig(**settings)
    with pytest.raises(ConfigurationError, match="1f1b needs at least"):
        PipelineParallelConfig(num_microbatches=2).check_batch(8, 4)
    with pytest.raises(ConfigurationError, match="interleaved1f1b.*the 4 ranks"):
        PipelineParallelConfig(schedule="interleaved1f1b", num_microbatches=6).check_batch(12, 4)
    with pytest.raises(ConfigurationError, match=r"num_microbatches=4: dualpipev.*stages in the pipeline \(8\)"):
        PipelineParallelConfig(schedule="dualpipev", num_microbatches=4).check_batch(8, 4)
    assert PipelineParallelConfig(schedule="dualpipev").check_batch(8, 4) == 8


def steps_of(accelerator: Accelerator, model: Any, optimizer: Any, begin: int, end: int) -> None:
    samples = dataset(4)
    rank, size = accelerator.strategy.data_collectives.rank, accelerator.strategy.data_collectives.world_size
    each = BATCH // size
    for step in range(begin, end):
        start = step * BATCH + rank * each
        batch = stack(samples[start : start + each])
        # As many labels on each rank, so that the mean of means is the same on any mesh.
        accelerator.backward(model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss)
        optimizer.step()
        optimizer.zero_grad()


def groups_of(model: nn.Module) -> torch.optim.Optimizer:
    """One group of matrices, one of the head alone, which the first stage has nothing of."""
    head = [parameter for name, parameter in model.named_parameters() if "lm_head" in name]
    rest = [parameter for name, parameter in model.named_parameters() if "lm_head" not in name]
    groups = [{"params": rest}, *([{"params": head, "lr": 5e-3}] if head else [])]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-6)


Save = tuple[str, dict[str, Any], dict[str, int], dict[str, Any], str]


def prepared(case: Save, seed_offset: int = 0) -> tuple[Accelerator, Any, Any]:
    kind, shape, sizes, settings, saved = case
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=saved)
    config = ParallelismConfig(**sizes, pp_handler=PipelineParallelConfig(**settings))
    accelerator = Accelerator(parallelism_config=config, fsdp_plugin=fsdp)
    whole = build(kind, **shape)
    if seed_offset:
        for parameter in whole.parameters():
            parameter.data.add_(seed_offset)
    model, optimizer = accelerator.prepare(whole, groups_of(whole))
    return accelerator, model, optimizer


def save_and_load(cases: list[Save], folder: str) -> list[dict[str, Any]]:
    found = []
    for number, case in enumerate(cases):
        accelerator, model, optimizer = prepared(case)
        steps_of(accelerator, model, optimizer, 0, 2)
        path = accelerator.save_state(f"{folder}/{number}")
        steps_of(accelerator, model, optimizer, 2, 4)
        expected = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        accelerator.free_memory()
        accelerator, model, optimizer = prepared(case, seed_offset=1)
        accelerator.load_state(path)
        steps_of(accelerator, model, optimizer, 2, 4)
        resumed = accelerator.get_state_dict(model)
        assert all(torch.equal(value, expected[name]) for name, value in resumed.items()), case
        accelerator.free_memory()
        found.append(expected)
    return found


def load_elsewhere(
    cases: list[Save], folder: str, sizes: dict[str, int], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rest of the steps on another mesh, or on none."""
    found = []
    for number, (kind, shape, _, _, saved) in enumerate(cases):
        accelerator, model, optimizer = prepared((kind, shape, sizes, settings, saved), seed_offset=2)
        accelerator.load_state(f"{folder}/{number}")
        steps_of(accelerator, model, optimizer, 2, 4)
        found.append({name: value.clone() for name, value in accelerator.get_state_dict(model).items()})
        accelerator.free_memory()
    return found


@pytest.mark.slow  # saves and loads in four ranks; stages and schedules have fast tests
def test_states_go_on_in_the_same_pipeline_in_another_and_without_one(tmp_path: Path) -> None:
    sharded = {"pp_size": 2, "dp_shard_size": 2}
    cases: list[Save] = [
        ("llama", {"layers": 4}, sharded, {}, "SHARDED_STATE_DICT"),
        ("gpt2", {"layers": 4}, sharded, {"schedule": "interleaved1f1b"}, "FULL_STATE_DICT"),
        ("llama", {"layers": 4, "tied": True}, {"pp_size": 2, "tp_size": 2}, {}, "FULL_STATE_DICT"),
        ("gpt2", {"layers": 8}, {"pp_size": 4}, {"schedule": "zbv"}, "SHARDED_STATE_DICT"),
        ("llama", {"layers": 4}, {"pp_size": 2, "tp_size": 2}, {"schedule": "dualpipev"}, "FULL_STATE_DICT"),
    ]
    expected = run_world(save_and_load, 4, cases, str(tmp_path), timeout=250)[0]
    for sizes, settings, ranks in (
        ({"pp_size": 2}, {}, 2),
        ({"pp_size": 2}, {"schedule": "zbv"}, 2),
        ({"dp_shard_size": 2}, {}, 2),
    ):
        found = run_world(load_elsewhere, ranks, cases, str(tmp_path), sizes, settings, timeout=250)[0]
        for number, weights in enumerate(expected):
            for name, value in weights.items():
                torch.testing.assert_close(
                    found[number][name],
                    value,
                    rtol=0,
                    atol=TOLERANCE,
                    msg=f"{cases[number]} on {sizes}, {settings}: {name}",
                )


ZERO_BUBBLES = ("interleaved_zero_bubble", "zbv", "dualpipev")


def zero_bubbles(schedule: str) -> dict[str, Any]:
    """Refusals of a schedule that computes gradients of weights separately, a step with it, and outputs."""
    settings = PipelineParallelConfig(schedule=schedule)
    config = ParallelismConfig(pp_size=2, pp_handler=settings)
    accelerator = Accelerator(parallelism_config=config)
    frozen, recomputed = build("llama", layers=4), build("llama", layers=4)
    frozen.model.embed_tokens.weight.requires_grad_(False)
    recomputed.gradient_checkpointing_enable()
    for model, message in ((frozen, "embed_tokens.weight is frozen"), (recomputed, "checkpoints its activations")):
        with pytest.raises(ConfigurationError, match=message):
            accelerator.prepare(model)
    model = accelerator.prepare(build("llama", layers=4))
    accelerator.backward(model(**stack(dataset(1))).loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9).item()
    model.eval()
    with torch.no_grad():  # another length: its shapes are exchanged first, and known the second time
        logits = [model(input_ids=stack(dataset(1))["input_ids"][:, :8]).logits for _ in range(2)]
    blocks = sorted({name.split(".")[2] for name, _ in model.named_parameters() if "layers" in name})
    accelerator.free_memory()
    return {"norm": norm, "logits": logits, "blocks": blocks}


def all_zero_bubbles() -> list[dict[str, Any]]:
    return [zero_bubbles(schedule) for schedule in ZERO_BUBBLES]


def test_gradients_of_weights_may_be_computed_later() -> None:
    model, batch = build("llama", layers=4), stack(dataset(1))
    loss_of(model, batch).backward()
    expected = nn.utils.get_total_norm([item.grad for item in model.parameters()]).item()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"][:, :8]).logits
    ranks = run_world(all_zero_bubbles, 2, timeout=250)
    for found in ranks:
        for result in found:
            assert result["norm"] == pytest.approx(expected, rel=1e-5)
            for own in result["logits"]:
                torch.testing.assert_close(own, logits, rtol=0, atol=TOLERANCE)
    in_turns, *in_a_v = ([rank[number]["blocks"] for rank in ranks] for number in range(len(ZERO_BUBBLES)))
    assert in_turns == [["0", "2"], ["1", "3"]]
    assert in_a_v == [[["0", "3"], ["1", "2"]]] * 2


def train_with_frozen_embedding(accelerator: Accelerator | None) -> tuple[Any, Any]:
    """Two steps with a frozen embedding that the head shares; the optimizer has it, and decays weights."""
    model = build("gpt2")
    model.transformer.wte.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    for number in range(2):
        loss = loss_of(model, stack(dataset(2)[number * BATCH : (number + 1) * BATCH]))
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model, model.state_dict() if accelerator is None else accelerator.get_state_dict(model)


def frozen_embedding() -> dict[str, torch.Tensor]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2))
    model, weights = train_with_frozen_embedding(accelerator)
    weights = {name: value.clone() for name, value in weights.items()}
    batch = stack(dataset(1))
    output = model(**batch)
    assert output["loss"] is output[0] is output.loss and "loss" in output and "logits" not in output
    with pytest.raises(IndexError):
        output[1]
    with pytest.raises(ConfigurationError, match="a pipeline does not generate"):
        model.generate(batch["input_ids"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" not in name)
    with pytest.raises(ConfigurationError, match="lm_head.weight is tied to transformer.wte.weight, and one of them"):
        model(**batch)
    return weights


def test_a_frozen_embedding_that_two_stages_share_keeps_its_values() -> None:
    _, expected = train_with_frozen_embedding(None)
    found = run_world(frozen_embedding, 2, timeout=250)[0]
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)
    assert torch.equal(found["transformer.wte.weight"], build("gpt2").transformer.wte.weight)


def items() -> dict[str, torch.Tensor]:
    """The gradients of a batch whose labels are unevenly distributed over two ranks, as sums."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2, dp_replicate_size=2))
    model = accelerator.prepare(build("llama"))
    ranks = accelerator.strategy.data_collectives
    batch = {name: value.chunk(2)[ranks.rank] for name, value in stack(dataset(1)).items()}
    count = (batch["labels"][:, 1:] != -100).sum()
    with pytest.raises(ConfigurationError, match="reduction='mean' does not support pp_size=2 and batches of 2 ranks"):
        accelerator.backward(model(**batch).loss, num_items=count)
    with pytest.raises(ConfigurationError, match="2 ranks multiply their losses by different factors, from 0.5 to 1.5"):
        accelerator.backward(model(**batch).loss * (0.5 + ranks.rank))
    model.zero_grad()
    loss = model(**batch, num_items_in_batch=torch.tensor(0.5)).loss * 0.5
    accelerator.backward(loss, num_items=count, reduction="sum")
    return {name: full_tensor(item.grad).clone() for name, item in model.named_parameters()}


@pytest.mark.slow  # four ranks
def test_losses_of_items_are_sums_where_ranks_have_batches_of_their_own() -> None:
    model = build("llama")
    loss_of(model, stack(dataset(1))).backward()
    ranks = run_world(items, 4, timeout=250)
    assert {name for found in ranks for name in found} == dict(model.named_parameters()).keys()
    for found in ranks:
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-5, atol=1e-6, msg=name)


def freed() -> None:
    for schedule in ZERO_BUBBLES:
        for fsdp, message in (
            ({}, "reshard_after_forward=True"),
            ({"reshard_after_forward": False, "activation_checkpointing": True}, "activation_checkpointing=True"),
        ):
            with context.isolated(), pytest.raises(ConfigurationError, match=f"{schedule}.*{message}"):
                in_shards(schedule, **fsdp)
    with pytest.raises(ConfigurationError, match="'zbv': lm_head.weight is tied to model.embed_tokens.weight"):
        in_shards("zbv", reshard_after_forward=False).prepare(build("llama", layers=4, tied=True))


def in_shards(schedule: str, **fsdp: Any) -> Accelerator:
    settings = PipelineParallelConfig(schedule=schedule)
    return Accelerator(
        parallelism_config=ParallelismConfig(pp_size=2, dp_shard_size=2, pp_handler=settings),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **fsdp),
    )


def test_zero_bubbles_are_refused_where_parameters_are_freed() -> None:
    run_world(freed, 4, timeout=250)
