"""Split sequences in models that something is wrapped around: PEFT, torch.compile, a module of the user's."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from language_models import BATCH, LENGTH, build, dataset, optimizer_of, shifted_loss, stack
from torch import nn
from transformers_5 import needs_transformers_5
from windows import assert_same

from accel import Accelerator
from accel.parallel.config import ParallelismConfig
from accel.parallel.sequence_inputs import SequenceShard, shift_labels
from accel_state.errors import ConfigurationError
from accel_state.operations import send_to_device
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]
STEPS = 3


class Forwarding(nn.Module):
    """Built as PEFT builds its models: any arguments, passed on, and the attributes of the model inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


class Described(Forwarding):
    """Names the arguments that it knows, and positions are not among them."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return self.base_model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)


class OwnHead(nn.Module):
    """A library's decoder under a head of its own, which is given no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = build("llama").model
        self.head = nn.Linear(16, 16, bias=False)
        self.config = self.decoder.config

    def set_attn_implementation(self, name: str) -> None:
        self.decoder.set_attn_implementation(name)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.head(self.decoder(input_ids=input_ids).last_hidden_state)
        return logits if labels is None else shifted_loss(logits, labels)


def compiled_wrapper() -> nn.Module:
    return torch.compile(build("llama"), backend="eager")


def compiled_in_place() -> nn.Module:
    model = Forwarding(build("llama"))
    model.compile(backend="eager")
    return model


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = build("llama")
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def forwarding() -> nn.Module:
    return Forwarding(build("llama"))


def described() -> nn.Module:
    return Described(build("gpt2"))


def compiled_own() -> nn.Module:
    return torch.compile(build("own"), backend="eager")


def own_head() -> nn.Module:
    torch.manual_seed(0)
    return OwnHead()


def loss_of(accelerator: Accelerator | None, model: nn.Module, batch: dict[str, Any], size: int) -> torch.Tensor:
    """The loss in one process, or this rank's share of it, with the backward pass."""
    if accelerator is not None and "shift_labels" in batch:  # split by the loader
        shifted = batch["shift_labels"]
    else:
        shifted = shift_labels(batch["labels"])
    if hasattr(model, "head"):
        logits = model(batch["input_ids"]).flatten(0, 1)
        total = nn.functional.cross_entropy(logits, shifted.flatten(), reduction="sum")
        loss = total * size / (shift_labels(batch["full"]) != -100).sum()
    else:
        known = ("input_ids", "labels", "position_ids", "shift_labels")
        loss = model(**{name: value for name, value in batch.items() if name in known}).loss
    loss.backward() if accelerator is None else accelerator.backward(loss)
    return loss


def train(make: Callable[[], nn.Module], axis: str | None) -> dict[str, Any]:
    """Three steps on split sequences, or in one process of plain PyTorch."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**{axis: 2})) if axis else None
    size = 2 if axis else 1
    model = seeded(make)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer_of(model) if len(trainable) == len(list(model.parameters())) else torch.optim.AdamW(trainable)
    losses, norms = [], []
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    for number in range(STEPS):
        batch = stack(dataset(STEPS)[number * BATCH : (number + 1) * BATCH])
        if accelerator is not None:
            batch = send_to_device(batch, accelerator.device)
        full = batch["labels"].clone()
        if axis == "sp_size":
            batch = accelerator.strategy.ulysses.split(batch)
        if axis == "cp_size":
            shifted, tables = shift_labels(batch["labels"]), [model.turns] if hasattr(model, "turns") else []
            tensors = [batch["input_ids"], batch["labels"], shifted]
            with accelerator.maybe_context_parallel([*tensors, *tables], [*(1 for _ in tensors), *(0 for _ in tables)]):
                extra = {"shift_labels": shifted} if hasattr(model, "head") else {}
                loss = loss_of(accelerator, model, {**batch, **extra, "full": full}, size)
        else:
            loss = loss_of(accelerator, model, {**batch, "full": full}, size)
        clip = nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
        norms.append(clip(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.detach() if accelerator is None else accelerator.reduce(loss.detach(), "mean")).item())
    if accelerator is not None:
        accelerator.free_memory()
    return {"losses": losses, "norms": norms, "weights": {}}


def train_all(cases: list[tuple[Callable[[], nn.Module], str]]) -> list[dict[str, Any]]:
    return [train(*case) for case in cases]


def check(cases: list[tuple[Callable[[], nn.Module], str]]) -> None:
    plain = {make: train(make, None) for make, _ in cases}
    for rank in run_world(train_all, 2, cases, timeout=500):
        for (make, axis), found in zip(cases, rank, strict=True):
            assert_same(found, plain[make], (make.__name__, axis), 1e-5)


def test_wrapped_models_train_as_one_process_does() -> None:
    makers = (forwarding, described, own_head)
    check([(make, axis) for axis in ("cp_size", "sp_size") for make in makers])


@pytest.mark.slow  # compiles three models, 15 s; test_facade.py compiles in the fast tier
def test_models_compiled_before_prepare_train_as_one_process_does() -> None:
    check([(compiled_in_place, "sp_size"), (compiled_wrapper, "sp_size"), (compiled_own, "cp_size")])


@pytest.mark.skipif(find_spec("peft") is None, reason="the clients' environment has PEFT")
def test_low_rank_adapters_train_as_one_process_does() -> None:
    check([(lora, "cp_size"), (lora, "sp_size")])


def refusals(axis: str) -> None:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**{axis: 2}))
    batch = send_to_device(stack(dataset(1)), accelerator.device)
    positions = torch.arange(LENGTH, device=accelerator.device).repeat(BATCH, 1)
    packed = positions % (LENGTH // 2)
    repeated = torch.where(positions < LENGTH - 2, positions, 1)  # what collators give to padding
    mask = (positions < LENGTH - 2).long()

    def call(model: nn.Module, given: dict[str, torch.Tensor]) -> Any:
        if axis == "sp_size":
            return model(**accelerator.strategy.ulysses.split(dict(given)))
        given = {name: value.clone() for name, value in given.items()}
        buffers = [value for value in given.values() if value.ndim > 1]
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers)):
            return model(**given)

    whole, own = (accelerator.prepare(make()) for make in (forwarding, own_head))
    with pytest.raises(ConfigurationError, match="documents packed"):
        call(whole, {**batch, "position_ids": packed, "attention_mask": torch.ones_like(packed)})
    for name in ("cu_seq_lens_q", "seq_idx"):
        with pytest.raises(ConfigurationError, match=name):
            call(whole, {**batch, name: positions})
    with pytest.raises(ConfigurationError, match="do not rise"):
        call(whole, {name: value[:1] for name, value in batch.items()} | {"cu_seq_lens_q": positions[0]})
    if axis == "sp_size":  # attention that does not hear of the documents
        for layer in whole.model.layers:
            layer.register_forward_pre_hook(
                lambda _, args, given: (args, {k: v for k, v in given.items() if k != "accel_documents"}),
                with_kwargs=True,
            )
        with pytest.raises(ConfigurationError, match="did not receive the boundaries of packed documents"):
            call(whole, {**batch, "position_ids": packed})
    call(whole, {**batch, "position_ids": positions + 3})
    call(whole, {**batch, "position_ids": repeated, "attention_mask": mask})
    if axis == "cp_size":
        with pytest.raises(ConfigurationError, match="OwnHead"):
            call(own, batch)
        unknown = accelerator.prepare(build("own"))
        with pytest.raises(ConfigurationError, match=r"Own\.forward"):
            call(unknown, {"tokens": batch["input_ids"]})
        compiled = accelerator.prepare(compiled_wrapper())
        with pytest.raises(ConfigurationError, match="use_regional_compilation"):
            call(compiled, batch)


@pytest.mark.parametrize("axis", ["cp_size", pytest.param("sp_size", marks=needs_transformers_5)])
def test_packed_documents_and_unknown_models_are_refused(axis: str) -> None:
    run_world(refusals, 2, axis, timeout=250)


def test_positions_of_padding_are_not_those_of_a_document() -> None:
    shard = SequenceShard(4, torch.arange(2), 2)
    tokens = torch.zeros(3, 2)
    assert shard.mask_for(tokens) is shard.mask_for(tokens)
    assert shard.mask_for(tokens).shape == (3, 2)
