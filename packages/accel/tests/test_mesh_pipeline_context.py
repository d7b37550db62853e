"""Pipelines of split sequences: the losses, gradients and outputs of one process, and what is refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import (
    BATCH,
    VOCABULARY,
    build,
    dataset,
    optimizer_of,
    plain,
    shifted_loss,
    stack,
)
from mesh_matrix import Case, deviation, mesh_step, plain_step
from torch import nn
from torch.utils.data import DataLoader
from transformers_5 import needs_transformers_5
from windows import TOLERANCE, assert_same, train_windows

from accel import Accelerator
from accel.parallel.axis_settings import PipelineParallelConfig, TorchContextParallelConfig
from accel.parallel.config import ParallelismConfig
from accel.utils import shift_labels
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

Run = tuple[str, dict[str, Any], dict[str, Any], str, int]
"""Model, its shape, the pipeline, how attention is split, micro-batches of accumulation."""
HEADS = "heads"  # for which it is sp that splits sequences; otherwise cp, and this is how keys and values travel


def accelerator_for(settings: dict[str, Any], exchange: str = "allgather", **options: Any) -> Accelerator:
    by_heads = exchange == HEADS
    config = ParallelismConfig(
        pp_size=2,
        **{"sp_size" if by_heads else "cp_size": 2},
        pp_handler=PipelineParallelConfig(**settings),
        cp_handler=None if by_heads else TorchContextParallelConfig(cp_comm_strategy=exchange),
    )
    return Accelerator(parallelism_config=config, **options)


def split(accelerator: Accelerator, *buffers: torch.Tensor) -> Any:
    return accelerator.maybe_context_parallel(
        buffers=[*buffers], buffer_seq_dims=[1] * len(buffers), no_restore_buffers={*buffers}
    )


def train(run: Run, steps: int, folder: str) -> dict[str, Any]:
    """Train, and continue after half of the steps from a saved state, with weights that were spoiled before."""
    kind, shape, settings, exchange, window = run
    accelerator = accelerator_for(settings, exchange, gradient_accumulation_steps=window)
    model, optimizer = accelerator.prepare(*((whole := build(kind, **shape)), optimizer_of(whole)))
    loader = accelerator.prepare(DataLoader(dataset(steps * window), batch_size=BATCH))

    def batches() -> Any:
        for number, batch in enumerate(accelerator.deepspeed_ulysses_dl_adapter(loader, model)):
            if number == steps * window // 2:
                accelerator.save_state(folder)
                for parameter in model.parameters():
                    parameter.data.add_(1)
                accelerator.load_state(folder)
            yield batch

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens, labels = batch["input_ids"], batch["labels"]
        with split(accelerator, tokens, labels):
            loss = model(tokens, labels=labels).loss
            accelerator.backward(loss)
        return loss

    return train_windows(accelerator, model, [optimizer], batches(), step)


def train_all(runs: list[Run], steps: int, folder: str) -> list[dict[str, Any]]:
    return [train(run, steps, f"{folder}/{number}") for number, run in enumerate(runs)]


def check(runs: list[Run], steps: int, folder: Path) -> None:
    ranks = run_world(train_all, 4, runs, steps, str(folder), timeout=300)
    for number, (kind, shape, _, _, window) in enumerate(runs):
        assert_same(ranks[0][number], plain(kind, steps, window, **shape), runs[number])
        assert all(rank[number]["losses"] == ranks[0][number]["losses"] for rank in ranks)


FOUR, TIED = {"layers": 4}, {"layers": 3, "tied": True}


@pytest.mark.slow  # trains in four ranks and saves states; the other tests here are fast
def test_stages_with_parts_of_sequences_train_as_one_process_does(tmp_path: Path) -> None:
    check(
        [
            ("llama", TIED, {}, "alltoall", 2),
            ("gpt2", FOUR, {"schedule": "interleaved1f1b", "num_microbatches": 4}, "allgather", 1),
            ("gpt2", {"layers": 2}, {"schedule": "gpipe", "num_microbatches": 8}, "alltoall", 1),
            ("llama", TIED, {"schedule": "gpipe", "num_microbatches": 4}, HEADS, 2),
            ("gpt2", FOUR, {"schedule": "interleaved1f1b"}, HEADS, 1),
        ],
        20,
        tmp_path,
    )


def calls() -> dict[str, Any]:
    """What one step and one evaluation give, whichever arguments say where the labels and the positions are."""
    accelerator = accelerator_for({})
    model = accelerator.prepare(build("llama"))
    whole = stack(dataset(1))
    items = (whole["labels"][:, 1:] != -100).sum()
    positions = torch.arange(whole["input_ids"].shape[1]).expand_as(whole["input_ids"])
    padding = (whole["labels"] != -100).long()  # at the end, where it changes nothing
    found: dict[str, Any] = {"losses": [], "norms": []}
    for name, value in (
        (None, None),
        ("position_ids", positions),
        ("attention_mask", padding),
        ("shift_labels", shift_labels(whole["labels"])),
        ("num_items_in_batch", items / 2),
    ):
        batch = {name: value.clone() for name, value in whole.items()}
        if name not in (None, "num_items_in_batch"):
            batch[name] = value.clone()
        known = {name: value} if name == "num_items_in_batch" else {}
        with split(accelerator, *batch.values()):
            loss = model(**batch, **known).loss
            accelerator.backward(loss)
        found["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
        found["norms"].append(accelerator.clip_grad_norm_(model.parameters(), 1e9).item())
        model.zero_grad()
    model.eval()
    tokens, labels = whole["input_ids"].clone(), whole["labels"].clone()
    with torch.no_grad(), split(accelerator, tokens, labels):
        output = model(input_ids=tokens, labels=labels)
        found["logits"] = accelerator.strategy.whole_sequences(output.logits)
    found["loss"] = accelerator.reduce(output.loss, "mean").item()
    model.train()
    found["refused"] = refused_calls(accelerator, model, whole)
    accelerator.free_memory()
    return found


def refused_calls(accelerator: Accelerator, model: nn.Module, whole: dict[str, torch.Tensor]) -> list[str]:
    documents = torch.arange(8).repeat(2).expand(BATCH, -1).clone()
    hidden = torch.ones_like(documents)
    hidden[:, 0] = 0
    found = []
    for extra in ({"position_ids": documents}, {"attention_mask": hidden}, {"seq_idx": documents}):
        batch = {name: value.clone() for name, value in (whole | extra).items()}
        with split(accelerator, *batch.values()), pytest.raises(ConfigurationError) as raised:
            model(**batch)
        found.append(str(raised.value))
    return found


def test_calls_are_corrected_once_for_all_stages() -> None:
    whole, batch = build("llama"), stack(dataset(1))
    loss = whole(**batch).loss
    loss.backward()
    norm = nn.utils.get_total_norm([item.grad for item in whole.parameters()]).item()
    logits = whole(input_ids=batch["input_ids"]).logits
    for found in run_world(calls, 4, timeout=250):
        assert found["losses"] == [pytest.approx(loss.item(), rel=1e-5)] * 5
        assert found["norms"] == [pytest.approx(norm, rel=1e-5)] * 5
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(found["logits"], logits, rtol=0, atol=TOLERANCE)
        packed, hiding, marked = found["refused"]
        assert "packed into a sequence, and micro-batches of split" in packed
        assert "attention_mask of shape (8, 8) hides more than padding at the end" in hiding
        assert "seq_idx marks several documents" in marked


def refused_models() -> None:
    loss = "size=2 does not support a loss_fn, which is a mean over this rank's tokens"
    own = "pp_size=2 with cp_size=2 does not support Own: it trains causal language models of Transformers"
    for settings, model, exchange, message in (
        ({}, build("own"), "allgather", own),
        ({"loss_fn": shifted_loss}, build("llama"), "allgather", f"cp_{loss}"),
        ({"loss_fn": shifted_loss}, build("llama"), HEADS, f"sp_{loss}"),
    ):
        with context.isolated(), pytest.raises(ConfigurationError, match=message):
            accelerator_for(settings, exchange).prepare(model)


def test_models_and_losses_that_see_a_part_only_are_refused() -> None:
    run_world(refused_models, 4, timeout=250)


BY_HEADS = Case("pp 2 x sp 2", "qwen", length=6, window=2, pipeline={"num_microbatches": 4})


def stages_by_heads() -> tuple[Any, dict[str, Any]]:
    step = mesh_step(BY_HEADS)
    with context.isolated():
        accelerator = accelerator_for({}, HEADS)
        model, whole = accelerator.prepare(build("llama")).eval(), stack(dataset(1))
        batch = next(iter(accelerator.deepspeed_ulysses_dl_adapter([whole], model)))
        with torch.no_grad():
            output = model(**batch)
        found = {"logits": accelerator.strategy.whole_sequences(output.logits)}
        found["loss"] = accelerator.reduce(output.loss, "mean").item()
        with pytest.raises(ConfigurationError) as raised:
            model.train()(**whole)
        return step, found | {"refused": str(raised.value)}


@needs_transformers_5
def test_stages_exchange_parts_of_sequences_for_heads() -> None:
    expected, whole, batch = plain_step(BY_HEADS), build("llama"), stack(dataset(1))
    output = whole(**batch)
    ranks = run_world(stages_by_heads, 4, timeout=250)
    assert deviation(ranks[0][0], expected) < 1e-5
    for _, found in ranks:
        torch.testing.assert_close(found["logits"], output.logits.detach(), rtol=0, atol=TOLERANCE)
        assert found["loss"] == pytest.approx(output.loss.item(), rel=1e-5)
        assert "not those of a split batch" in found["refused"]


def numbers_of_items() -> list[float]:
    """A pipeline alone, told by how much to divide the loss, and given labels that were shifted before."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2))
    model, batch = accelerator.prepare(build("llama")), stack(dataset(1))
    losses = [
        model(**batch, num_items_in_batch=torch.tensor(50.0)).loss.item(),
        model(**batch, shift_labels=torch.full_like(batch["labels"], 3) % VOCABULARY).loss.item(),
    ]
    accelerator.free_memory()
    return losses


def test_a_pipeline_takes_the_number_of_items_and_shifted_labels_as_the_model_does() -> None:
    model, batch = build("llama"), stack(dataset(1))
    expected = [
        model(**batch, num_items_in_batch=torch.tensor(50.0)).loss.item(),
        model(**batch, shift_labels=torch.full_like(batch["labels"], 3)).loss.item(),
    ]
    for losses in run_world(numbers_of_items, 2, timeout=250):
        assert losses == pytest.approx(expected, rel=1e-5)


KEPT = {"reshard_after_forward": False}
EIGHT = [
    Case("pp 2 x cp 2 x tp 2", "llama"),
    Case("pp 2 x cp 2 x tp 2", "deep llama", fsdp=KEPT, pipeline={"schedule": "zbv"}),
    Case("pp 2 x dp_shard 2 x cp 2", "gpt2", window=2),
    Case("pp 2 x dp_replicate 2 x cp 2", "tied llama", pipeline={"schedule": "gpipe"}),
    Case("pp 2 x cp 4", "qwen", length=16),
    Case("pp 4 x cp 2", "deep tied llama"),
    Case("pp 2 x sp 2 x tp 2", "llama", window=2),
    Case("pp 2 x dp_shard 2 x sp 2", "deep llama", fsdp=KEPT, pipeline={"schedule": "zbv"}),
    Case("pp 2 x dp_replicate 2 x sp 2", "tied llama", pipeline={"schedule": "gpipe"}),
    Case("pp 2 x sp 4", "gpt2"),
]


def steps_of(cases: list[Case]) -> list[Any]:
    return [mesh_step(case) for case in cases]


@pytest.mark.slow  # eight ranks
def test_a_third_axis_changes_nothing() -> None:
    for case, found in zip(EIGHT, run_world(steps_of, 8, EIGHT, timeout=400)[0], strict=True):
        assert deviation(found, plain_step(case)) < 1e-5, case
