"""The operations of a step equal the analytic count: dense, sharded, with checkpointing, and of mixtures of experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("accel")
pytest.importorskip("transformers")

import transformers

from accel import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accel_monitor import Part, attach, read_runs
from accel_monitor._torch_compat import PASSES_HIGHER_ORDER
from accel_monitor.flops import StepFlops
from accel_monitor.page import rows_of
from accel_monitor.recorder import Recorder
from accel_state import PartialState
from accel_state.testing import run_world

WIDTH, LENGTH, LAYERS, ROWS, WORDS, INNER = 64, 32, 2, 4, 256, 128
TOKENS = ROWS * LENGTH

counts_runs = pytest.mark.skipif(not PASSES_HIGHER_ORDER, reason="this torch is too old, which the report says")


def llama(attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention)


def analytic(tokens: int) -> tuple[int, int]:
    """Operations of a step: 6 for each weight of a matrix and token, and 12 x width x length for each token and layer
    of attention (Kaplan et al., 2020; PaLM, appendix B); and those of the forward pass of the blocks alone.
    """
    block = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER
    weights = LAYERS * block + WORDS * WIDTH
    forward_of_blocks = 2 * LAYERS * block * tokens + 4 * LAYERS * WIDTH * LENGTH * tokens
    return 6 * weights * tokens + 12 * LAYERS * WIDTH * LENGTH * tokens, forward_of_blocks


def counted(model: nn.Module, words: int = WORDS) -> tuple[int, int]:
    model.train()
    ids = torch.arange(TOKENS).view(ROWS, LENGTH) % words
    recorder = Recorder()
    with StepFlops(recorder) as flops:
        loss = model(input_ids=ids, labels=ids).loss
        recorder.mark(Part.BACKWARD)
        loss.backward()
    return flops.total, flops.recomputed


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_dense_model_and_what_checkpointing_computes_again(attention: str) -> None:
    # Transformers 4 computes angles by a product, and all of a block again.
    pytest.importorskip("transformers", minversion="5.0")
    total, forward = analytic(TOKENS)
    # The fused backward pass computes the scores of attention again: a product, where the forward pass has two.
    scores = LAYERS * 2 * WIDTH * LENGTH * TOKENS if attention == "sdpa" else 0
    assert counted(llama(attention)) == (total, scores)
    model = llama(attention)
    model.gradient_checkpointing_enable()
    # Recomputation stops where all that the backward pass needs is there: before the last product of a block.
    last = 2 * LAYERS * WIDTH * INNER * TOKENS
    assert counted(model) == (total, scores + forward - last)


def test_a_mixture_of_experts_counts_the_experts_that_a_token_uses() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    width, inner, experts, used = 32, 48, 4, 2
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=used,
    )
    attention = width * width * 2 + width * (width // 2) * 2
    weights = LAYERS * (attention + experts * width + used * 3 * width * inner) + 64 * width
    expected = 6 * weights * TOKENS + 12 * LAYERS * width * LENGTH * TOKENS
    for implementation in ("grouped_mm", "eager", "batched_mm"):
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM._from_config(config, experts_implementation=implementation)
        assert counted(model, 64)[0] == expected, implementation


class Ids(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(LENGTH) + index) % WORDS
        return {"input_ids": ids, "labels": ids}


def train(folder: str, kind: str) -> None:
    settings = {}
    if kind.startswith("fsdp2"):
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            activation_checkpointing=kind == "fsdp2-checkpointed",
        )
    if kind == "tp":
        settings["parallelism_config"] = ParallelismConfig(tp_size=2)
    accelerator = Accelerator(monitor=True, project_dir=folder, **settings)
    model = llama()
    if kind == "compiled":
        model = torch.compile(model, backend="aot_eager")
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader(Ids(), batch_size=ROWS)
    )
    for _, batch in zip(range(5), loader, strict=False):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def train_all(folder: str, kinds: list[str]) -> None:
    for kind in kinds:
        PartialState().reconnect()  # the end of a training ends the process group
        train(f"{folder}/{kind}", kind)


@counts_runs
@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        (2, ["ddp", "fsdp2", "fsdp2-checkpointed", "tp"]),
        pytest.param(1, ["compiled"], marks=pytest.mark.slow),  # compiles; the others count the same operations
    ],
)
def test_a_step_of_a_run_is_counted_once_on_each_rank(tmp_path: Path, ranks: int, kinds: list[str]) -> None:
    run_world(train_all, ranks, str(tmp_path), kinds, timeout=100)
    for kind in kinds:
        total, forward = analytic(TOKENS)
        again = LAYERS * 2 * WIDTH * LENGTH * TOKENS  # the scores of attention, in its fused backward pass
        if kind == "fsdp2-checkpointed":
            again += forward - 2 * LAYERS * WIDTH * INNER * TOKENS
        (run,) = read_runs(tmp_path / kind)
        share = 2 if kind == "tp" else 1
        for rank in range(ranks):
            attempt = run.attempts[0, rank][0]
            assert (attempt.step_flops, attempt.recomputed_flops) == (total // share, again // share), kind
            lines = (tmp_path / kind / "monitor" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
            assert [json.loads(line)["kind"] for line in lines].count("flops") == 1
            attempt.peak_flops = 1e12
        for row in rows_of(run):  # and the share of the peak
            assert row.flops and row.mfu == pytest.approx(row.flops / 1e12)


class Flexible(nn.Module):
    """A layer and a condition, which torch compiles in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        heads = self.layer(inputs)[None, None]
        return heads + torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (heads.detach(),))


def test_operators_that_compile_in_each_call_are_not_disturbed(tmp_path: Path) -> None:
    model = Flexible()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(torch.ones(20, 8), batch_size=2)
    monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir=tmp_path)
    for inputs in loader:
        model(inputs).mean().backward()
        optimizer.step()
    monitor.finish()
    (run,) = read_runs(tmp_path)
    reason = "torch.compile" if PASSES_HIGHER_ORDER else "is too old. Upgrade torch"
    assert run.attempts[0, 0][0].step_flops is None and any(reason in note for note in run.notes)
    assert run.attempts[0, 0][0].last_step == 10


def test_operators_that_cannot_be_counted_are_named_and_computed() -> None:
    flops = StepFlops(Recorder())
    product = torch.ops.aten.mm.default
    one = torch.ones(2, 2)
    assert torch.equal(flops.__torch_dispatch__(product, (), (one, one)), one @ one) and flops.total == 16
    assert flops.uncounted is None
    # One of a higher order, which flex_attention and torch.cond have, is a function of its own.
    assert flops.__torch_dispatch__(abs, (), (-3,)) == 3 and "abs" in str(flops.uncounted)
