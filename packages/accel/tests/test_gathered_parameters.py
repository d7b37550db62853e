"""Terms of the loss that use the weights of a sharded model outside of its forward, against one process."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from language_models import BATCH, build, dataset, optimizer_of, shifted_loss, stack
from windows import assert_same, copied

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.config import ParallelismConfig
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
]
TERMS = ("l2-sp", "ewc before the forward", "chunked head")
BLOCKS = {"auto_wrap_policy": "transformer_based_wrap"}
TWO = {
    "FSDP 2": ({"fsdp_version": 2, **BLOCKS}, {}),
    "FSDP 2, one unit": ({"fsdp_version": 2}, {}),
    "tp": (None, {"tp_size": 2}),
}
FOUR = {
    "HSDP": ({"fsdp_version": 2, **BLOCKS}, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "dp_shard x tp": ({"fsdp_version": 2, **BLOCKS}, {"dp_shard_size": 2, "tp_size": 2}),
    "dp_replicate x tp": (None, {"dp_replicate_size": 2, "tp_size": 2}),
}


def term_of(what: str, model: Any, anchor: dict[str, torch.Tensor], output: Any, labels: Any) -> torch.Tensor:
    """A term of the loss that reads parameters: a penalty, or logits of one half of the tokens after the other."""
    if what == "chunked head":
        halves = zip(output.hidden_states[-1].chunk(2), labels.chunk(2), strict=True)
        return torch.stack([shifted_loss(half @ model.lm_head.weight.T, own) for half, own in halves]).mean()
    named = [(name.replace("_fsdp_wrapped_module.", ""), item) for name, item in model.named_parameters()]
    scales = {name: anchor[name].abs() if what != "l2-sp" else 1.0 for name, _ in named}
    return torch.stack([(scales[name] * (item - anchor[name]).square()).sum() for name, item in named]).sum() * 0.1


def anchors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(item.shape, generator=generator) / 10 for name, item in build("llama").named_parameters()}


def train(what: str, accelerator: Accelerator | None, window: int = 1) -> dict[str, Any]:
    model: Any = build("llama")
    optimizer: Any = optimizer_of(model)
    ranks, rank, gathers = 1, 0, nullcontext
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        data = accelerator.strategy.data_collectives
        ranks, rank = data.world_size, data.rank
        gathers = lambda: accelerator.gathered_parameters(model)  # noqa: E731
    anchor, losses, norms = anchors(), [], []
    samples = dataset(4)
    for micro in range(4):
        batch = stack(samples[micro * BATCH : (micro + 1) * BATCH])
        batch["labels"] = batch["input_ids"]  # as many tokens on every rank
        batch = {name: value.chunk(ranks)[rank] for name, value in batch.items()}
        with nullcontext() if accelerator is None else accelerator.accumulate(model):
            term: Any = 0.0
            if "before" in what:
                with gathers():
                    term = term_of(what, model, anchor, None, None)
            output = model(**batch, output_hidden_states=True)
            if "before" not in what:
                with gathers():
                    term = term_of(what, model, anchor, output, batch["labels"])
            loss = output.loss + term
            (loss / window).backward() if accelerator is None else accelerator.backward(loss)
            if (micro + 1) % window == 0:
                clip = torch.nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
                norms.append(clip(model.parameters(), 0.5).item())
            if accelerator is not None or (micro + 1) % window == 0:
                optimizer.step()
                optimizer.zero_grad()
        total = loss.detach() if accelerator is None else accelerator.reduce(loss.detach(), "mean")
        losses.append(total.item())
    weights = copied(model.state_dict() if accelerator is None else accelerator.get_state_dict(model))
    return {"losses": losses, "norms": norms, "weights": weights}


def accelerator_of(settings: dict[str, Any] | None, mesh: dict[str, int], window: int) -> Accelerator:
    plugin = None if settings is None else FullyShardedDataParallelPlugin(**settings)
    sizes = ParallelismConfig(**mesh) if mesh else None
    return Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=sizes, gradient_accumulation_steps=window)


def train_all(cases: dict[str, Any]) -> dict[tuple[str, str, int], dict[str, Any]]:
    found = {}
    for case, settings in cases.items():
        for what, window in [*((term, 1) for term in TERMS), ("l2-sp", 2)]:
            with context.isolated():
                found[case, what, window] = train(what, accelerator_of(*settings, window), window)
    return found


def check(cases: dict[str, Any], ranks: int) -> None:
    for (case, what, window), found in run_world(train_all, ranks, cases, timeout=300)[0].items():
        assert_same(found, train(what, None, window), (case, what, window), 2e-5, 1e-4)


def test_terms_of_the_loss_have_the_gradients_of_one_process() -> None:
    check(TWO, 2)


@pytest.mark.slow
def test_terms_of_the_loss_on_meshes_of_two_axes() -> None:
    check(FOUR, 4)


def values_under_fsdp_1() -> bool:
    """Whether whole values are those of one process, and gradients are refused."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1, **BLOCKS))
    model: Any = accelerator.prepare(build("llama"))
    with pytest.raises(ConfigurationError, match=r"gathers values only.*torch\.no_grad\(\), or set fsdp_version=2"):
        accelerator.gathered_parameters(model).__enter__()
    with torch.no_grad(), accelerator.gathered_parameters(model.lm_head):
        head = model.lm_head.weight.clone()
    return torch.equal(head, build("llama").lm_head.weight)


def test_fsdp_1_gathers_values() -> None:
    assert all(run_world(values_under_fsdp_1, 2))


def calls_inside() -> None:
    for settings, mesh in TWO.values():
        with context.isolated():
            accelerator = accelerator_of(settings, mesh, 1)
            model: Any = accelerator.prepare(build("llama"))
            batch = stack(dataset(1)[:2])
            before = model(**batch).loss
            with (
                pytest.raises(ConfigurationError, match=r"was called inside gathered_parameters.* before or after"),
                accelerator.gathered_parameters(model),
            ):
                model(**batch)
            assert model(**batch).loss == before


def test_the_model_is_not_called_inside() -> None:
    run_world(calls_inside, 2)


def changes_inside() -> None:
    for settings, mesh in {**TWO, "FSDP 1": ({"fsdp_version": 1, **BLOCKS}, {})}.values():
        for data in (False, True):
            with context.isolated():
                accelerator = accelerator_of(settings, mesh, 1)
                model: Any = accelerator.prepare(build("llama"))
                with (
                    pytest.raises(ConfigurationError, match=r"^lm_head\.weight was changed inside gathered_parameters"),
                    torch.no_grad(),
                    accelerator.gathered_parameters(model),
                ):
                    (model.lm_head.weight.data if data else model.lm_head.weight).mul_(2)
                with torch.no_grad(), accelerator.gathered_parameters(model):
                    assert torch.equal(model.lm_head.weight, build("llama").lm_head.weight)


def test_weights_are_not_changed_inside() -> None:
    """The shards would keep their values, without an error."""
    run_world(changes_inside, 2, timeout=200)
