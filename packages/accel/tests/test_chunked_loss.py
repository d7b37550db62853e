"""The loss in chunks is the loss on all logits, and so are its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel.utils import TorchDynamoPlugin, causal_lm_loss, chunked_causal_lm_loss
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

WORDS, WIDTH = 37, 8


def inputs(rows: int, length: int, seed: int, bias: bool) -> tuple[torch.Tensor, torch.Tensor, Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, length, WIDTH, generator=generator)
    weight = torch.randn(WORDS, WIDTH, generator=generator)
    labels = torch.randint(WORDS, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.3] = -100
    labels[0, -1] = 1  # one at least
    return hidden, weight, torch.randn(WORDS, generator=generator) if bias else None, labels


@given(
    rows=st.integers(1, 3),
    length=st.integers(2, 9),
    chunk=st.integers(1, 30),
    seed=st.integers(0, 1000),
    bias=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    items=st.sampled_from([None, 11, torch.tensor(13)]),
)
@settings(max_examples=60, deadline=None)
def test_it_is_the_loss_on_all_logits(
    rows: int, length: int, chunk: int, seed: int, bias: bool, smoothing: float, z_loss: float, items: Any
) -> None:
    hidden, weight, given_bias, labels = inputs(rows, length, seed, bias)
    asked = {"label_smoothing": smoothing, "z_loss": z_loss, "num_items": items}
    found = []
    for chunked in (False, True):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, given_bias) if x is not None]
        of_bias = leaves[2] if bias else None
        if chunked:
            loss = chunked_causal_lm_loss(leaves[0], leaves[1], labels, bias=of_bias, chunk_size=chunk, **asked)
        else:
            loss = causal_lm_loss(functional.linear(leaves[0], leaves[1], of_bias), labels, **asked)
        (3 * loss).backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for right, got in zip(*found, strict=True):
        # Small gradients are differences of large ones, in both: against float64 neither is nearer than the other.
        torch.testing.assert_close(got, right, rtol=2e-6, atol=1e-6 * max(1.0, right.abs().max().item()))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", "all"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    hidden, weight, bias, labels = inputs(2, 6, 0, True)
    leaves = {"hidden": hidden, "weight": weight, "bias": bias}
    trained = {name: x.requires_grad_() for name, x in leaves.items() if frozen not in (name, "all")}
    loss = chunked_causal_lm_loss(hidden, weight, labels, bias=bias, chunk_size=5)
    expected = causal_lm_loss(functional.linear(hidden, weight, bias), labels)
    assert loss.requires_grad == bool(trained) and loss.item() == pytest.approx(expected.item(), rel=1e-6)
    if trained:
        right = torch.autograd.grad(expected, list(trained.values()))
        loss.backward()
        for (name, leaf), gradient in zip(trained.items(), right, strict=True):
            torch.testing.assert_close(leaf.grad, gradient, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_exact_as_on_all_logits(dtype: torch.dtype) -> None:
    """Small gradients too: those of a mean over 50,000 labels, with a factor as of a gradient scaler."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, WIDTH), torch.randn(1000, WIDTH)
    labels, errors = torch.randint(1000, (64,)), []
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    (1024 * functional.cross_entropy(exact[0] @ exact[1].t(), labels, reduction="sum") / 50_000).backward()
    for chunked in (False, True):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        with torch.autocast("cpu", dtype):
            if chunked:
                loss = chunked_causal_lm_loss(*leaves, labels, chunk_size=7, num_items=50_000, shifted=True)
            else:
                loss = functional.cross_entropy(functional.linear(*leaves).float(), labels, reduction="sum") / 50_000
        (1024 * loss).backward()
        pairs = zip(leaves, exact, strict=True)
        errors.append([float((mine.grad - right.grad).norm() / right.grad.norm()) for mine, right in pairs])
        assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)
    assert all(chunked <= 1.1 * plain for plain, chunked in zip(*errors, strict=True)), errors


def peak_of(run: Callable[[], None]) -> int:
    """The largest sum of allocations in bytes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    total = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        total += size
        peak = max(peak, total)
    return peak


def test_all_logits_never_exist() -> None:
    hidden, weight = torch.randn(1, 512, WIDTH, requires_grad=True), torch.randn(4000, WIDTH, requires_grad=True)
    labels = torch.randint(4000, (1, 512))

    def evaluate() -> None:
        with torch.no_grad():
            chunked_causal_lm_loss(hidden, weight, labels, chunk_size=32)

    plain = peak_of(lambda: causal_lm_loss(functional.linear(hidden, weight), labels).backward())
    chunked = peak_of(lambda: chunked_causal_lm_loss(hidden, weight, labels, chunk_size=32).backward())
    assert plain >= 2 * 512 * 4000 * 4 and chunked < plain / 6, (plain, chunked)
    assert peak_of(evaluate) < 2.2 * 32 * 4000 * 4, "the logits of a chunk, and their logarithms"


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(WORDS, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, chunked: bool = True) -> torch.Tensor:
        hidden = self.body(self.embedding(tokens))
        if not chunked:
            return causal_lm_loss(self.head(hidden), tokens)
        return chunked_causal_lm_loss(hidden, self.head.weight, tokens, bias=self.head.bias, chunk_size=5)


def train(kind: str, chunked: bool) -> list[float]:
    version = int(kind[-1]) if kind.startswith("fsdp") else None
    plugin = None if version is None else FullyShardedDataParallelPlugin(fsdp_version=version)
    # Its code is that of autograd's own graph; inductor would compile C++.
    dynamo = TorchDynamoPlugin(backend="aot_eager") if kind == "compiled" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dynamo_plugin=dynamo)
    torch.manual_seed(0)
    model = LanguageModel()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for step in range(6):
        tokens = torch.randint(WORDS, (4, 10), generator=torch.Generator().manual_seed(step))
        share = tokens.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = model(share, chunked)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


# Sharded weights are the harder case; two of the others take more than 20 seconds on a busy machine.
@pytest.mark.parametrize(
    "kind", ["fsdp2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ddp", "fsdp1", "compiled"))]
)
def test_two_ranks_train_as_one_process_on_all_logits(kind: str) -> None:
    expected = train("ddp", chunked=False)
    for found in run_world(train, 2, kind, True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"chunk_size": 0}, "chunk_size=0 must be a positive number of tokens"),
        ({"chunk_size": 2.5}, "chunk_size=2.5"),
        ({"label_smoothing": 1.5}, "from 0 to 1"),
        ({"z_loss": -1.0}, "must not be negative"),
        ({"labels": torch.zeros(2, 5, dtype=torch.long)}, r"labels \[2, 5\] do not belong together"),
        ({"weight": torch.zeros(WORDS, 3)}, r"weight \[37, 3\]"),
    ],
)
def test_bad_input_is_refused(changed: dict[str, Any], words: str) -> None:
    hidden, weight, _, labels = inputs(2, 6, 0, False)
    with pytest.raises(ConfigurationError, match=words):
        chunked_causal_lm_loss(**{"hidden": hidden, "weight": weight, "labels": labels, **changed})


def sharded_weights() -> str:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(LanguageModel())
    with pytest.raises(ConfigurationError) as error:
        chunked_causal_lm_loss(torch.zeros(2, 4, WIDTH), model.head.weight, torch.zeros(2, 4, dtype=torch.long))
    return str(error.value)


def test_outside_of_the_model_sharded_weights_are_refused() -> None:
    assert all("in the forward of the model that is prepared" in text for text in run_world(sharded_weights, 2))
