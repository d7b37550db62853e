"""Losses on logits that are sharded along the vocabulary."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from mesh_runs import VOCABULARY, accelerator_for, batches, build, counted
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional

from accel import Accelerator, ParallelismConfig
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel import tp_collectives
from accel.parallel.axis_settings import TorchTensorParallelConfig
from accel.parallel.sequence_inputs import shift_labels
from accel.parallel.sharded_logits import _Shard
from accel.parallel.tp_collectives import share_of
from accel.parallel.vocabulary_loss import Vocabulary
from accel.utils import causal_lm_loss
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

SETTINGS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "num_items": 7},
    {"ignore_index": 2, "num_items": torch.tensor(5.0)},
]


def data(vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 6, vocabulary, generator=generator) * 3).to(dtype)
    labels = torch.randint(0, vocabulary, (2, 6), generator=generator)
    labels[0, 3:] = -100
    return logits, labels


def expected_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_items: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """The same of torch's functions on whole logits."""
    target = shift_labels(labels.masked_fill(labels == -100, ignore_index), ignore_index).flatten()
    x = logits.float().flatten(0, 1)
    loss = functional.cross_entropy(
        x, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
    )
    kept = target != ignore_index
    loss = loss + z_loss * x[kept].logsumexp(-1).square().sum()
    return loss / (kept.sum() if num_items is None else num_items)


def on_shards(vocabulary: int, dtype: torch.dtype) -> list[tuple[float, torch.Tensor]]:
    """The loss and this rank's part of its gradient, for each of the settings."""
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    begin, width = share_of(vocabulary, mesh)
    found = []
    for settings in SETTINGS:
        logits, labels = data(vocabulary, dtype)
        own = logits[..., begin : begin + width].clone().requires_grad_()
        labels = labels.masked_fill(labels == -100, settings.get("ignore_index", -100))
        loss = causal_lm_loss(_Shard(own, Vocabulary(vocabulary, mesh)), labels, **settings)
        (2 * loss).backward()
        found.append((loss.item(), own.grad))
    return found


@pytest.mark.parametrize(("ranks", "vocabulary"), [(2, 13), (3, 4)], ids=["uneven", "a rank without tokens"])
def test_losses_on_shards_are_those_of_whole_logits(ranks: int, vocabulary: int) -> None:
    results = run_world(on_shards, ranks, vocabulary, torch.float32, timeout=250)
    for number, settings in enumerate(SETTINGS):
        logits, labels = data(vocabulary, torch.float32)
        logits.requires_grad_()
        loss = expected_loss(logits, labels, **settings)
        (2 * loss).backward()
        gradient = torch.cat([rank[number][1] for rank in results], -1)
        torch.testing.assert_close(gradient, logits.grad, rtol=1e-5, atol=1e-7)
        assert all(rank[number][0] == pytest.approx(loss.item(), rel=1e-6) for rank in results), settings


def of_torchs_layers() -> list[torch.Tensor]:
    """Gradients where the logits are those of a ColwiseParallel."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = []
    for settings in SETTINGS[:2]:
        logits, labels = data(13, torch.float32)
        sharded = distribute_tensor(logits, mesh, [Shard(2)]).requires_grad_()
        causal_lm_loss(sharded, labels, **settings).backward()
        found.append(sharded.grad.full_tensor())
    with pytest.raises(ConfigurationError, match="Replicate"):
        causal_lm_loss(distribute_tensor(logits, mesh, [Replicate()]), labels)
    return found


def test_logits_may_be_a_sharded_dtensor() -> None:
    results = run_world(of_torchs_layers, 2, timeout=250)
    for settings, found in zip(SETTINGS, results[0], strict=False):
        logits, labels = data(13, torch.float32)
        expected_loss(logits.requires_grad_(), labels, **settings).backward()
        torch.testing.assert_close(found, logits.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("settings", SETTINGS)
def test_losses_in_one_process_are_those_of_torch(settings: dict[str, Any]) -> None:
    logits, labels = data(11, torch.bfloat16)
    own, others = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = causal_lm_loss(own, labels.masked_fill(labels == -100, settings.get("ignore_index", -100)), **settings)
    expected = expected_loss(others, labels, **settings)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(own.grad, others.grad)


def test_factors_out_of_range_are_refused() -> None:
    for settings in ({"label_smoothing": 1.5}, {"z_loss": -1.0}):
        with pytest.raises(ConfigurationError, match=str(next(iter(settings.values())))):
            causal_lm_loss(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long), **settings)


def gathers(kind: str, sizes: dict[str, int], **handler: Any) -> dict[str, Any]:
    """What is gathered in a step, and when logits are read."""
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(**sizes, tp_handler=TorchTensorParallelConfig(**handler)),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if "dp_shard_size" in sizes else None,
    )
    model = accelerator.prepare(build(kind))
    tokens = batches(1)
    counts = {}
    with counted(tp_collectives, "_all_joined") as made:
        output = model(tokens, labels=tokens)
        accelerator.backward(output.loss)
        assert output[0] is output.loss and output["loss"] is output.loss
        counts["training"] = made["_all_joined"]
        logits = output.logits.detach()
        assert output.logits.shape == logits.shape and output[1].shape == logits.shape
        counts["read"] = made["_all_joined"]
        with torch.no_grad():
            evaluated = model.eval()(tokens, labels=tokens)
        counts["evaluation"] = made["_all_joined"]
        as_tuple = model.train()(tokens, labels=tokens, return_dict=False)
    return {
        "counts": counts,
        "logits": logits,
        "evaluated": (evaluated.loss.item(), evaluated.logits),
        "tuple": (as_tuple[0].item(), as_tuple[1].detach()),
    }


def all_gathers() -> list[dict[str, Any]]:
    return [
        gathers("llama", {"tp_size": 2}),
        gathers("gemma2", {"dp_shard_size": 1, "tp_size": 2}),
        gathers("tied llama", {"tp_size": 2}),
        gathers("llama", {"tp_size": 2}, loss_parallel=False),
    ]


def test_logits_are_gathered_when_they_are_read() -> None:
    ranks = run_world(all_gathers, 2, timeout=250)
    for number, kind in enumerate(("llama", "gemma2", "tied llama", "llama")):
        model, tokens = build(kind), batches(1)
        expected = model(tokens, labels=tokens)
        for rank in ranks:
            found = rank[number]
            sharded = {"training": 0, "read": 1, "evaluation": 2}
            assert found["counts"] == (sharded if number < 3 else {"training": 1, "read": 1, "evaluation": 2})
            for loss, logits in (found["evaluated"], found["tuple"], (expected.loss.item(), found["logits"])):
                assert loss == pytest.approx(expected.loss.item(), rel=1e-5)
                torch.testing.assert_close(logits, expected.logits.detach(), rtol=1e-4, atol=1e-5)


def with_own_losses() -> list[float]:
    """Norms of gradients: of a loss on the output, on logits that were read, and of a loss function of the user."""
    norms, counts = [], []
    for kind in ("output", "logits", "function"):
        accelerator = accelerator_for({"dp_shard_size": 2, "tp_size": 2}, {"fsdp_version": 2})
        model = build("gemma2")
        if kind == "function":
            model.loss_function = lambda logits, labels, *rest, **more: causal_lm_loss(
                logits, labels, label_smoothing=0.1
            )
        model = accelerator.prepare(model)
        rank = accelerator.strategy.data_collectives.rank
        tokens = batches(1)[4 * rank : 4 * rank + 4]
        with counted(tp_collectives, "_all_joined") as made:
            output = model(tokens, labels=tokens)
        counts.append(made["_all_joined"])
        if kind != "function":
            loss = causal_lm_loss(output if kind == "output" else output.logits, tokens, label_smoothing=0.1)
        else:
            loss = output.loss
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e9).item())
        accelerator.free_memory()
    assert counts == [0, 0, 1], "fully_shard takes outputs apart and leaves logits sharded"
    return norms


def test_losses_of_the_user_work_on_outputs_and_on_logits() -> None:
    model, tokens = build("gemma2"), batches(1)
    causal_lm_loss(model(tokens), tokens, label_smoothing=0.1).backward()
    norm = torch.nn.utils.get_total_norm([item.grad for item in model.parameters()]).item()
    assert run_world(with_own_losses, 4, timeout=250)[0] == pytest.approx([norm] * 3, rel=1e-5)


def test_the_vocabulary_of_the_models_is_not_divisible() -> None:
    assert VOCABULARY % 2 == 1, "the tests above are about shards of unequal sizes"
