"""Hidden states that are sharded along the sequence between tensor-parallel layers."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from mesh_matrix import Case, deviation, mesh_steps, plain_step
from mesh_runs import Block, Own, accelerator_for, batches, build, counted, gpt2, loss_of
from torch import nn
from transformers_5 import needs_transformers_5

from accel import ParallelismConfig
from accel.parallel import sequence_collectives, tp_sequence
from accel.parallel.sequence_structure import UnsupportedModelError, find_structure
from accel.parallel.tp_plan import plan_of
from accel_state.env import patch_environment
from accel_state.errors import AccelError, ConfigurationError
from accel_state.random import set_seed
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

RECOMPUTED = {"activation_checkpointing": True}
TWO = [
    Case("tp 2", "llama", length=7),
    Case("tp 2", "gpt2", length=5, window=2),
    Case("tp 2", "tied llama"),
    Case("tp 2", "qwen"),
    Case("tp 2", "phi"),  # whole hidden states
    Case("tp 2", "mistral"),
    Case("tp 2", "qwen2"),
    Case("tp 2", "gemma2"),
    Case("tp 2", "gemma", fsdp=RECOMPUTED),
    Case("tp 2", "llama", length=1, mesh={"tp_sequence_parallel": True}),
]


@needs_transformers_5
def test_losses_and_gradients_are_those_of_one_process() -> None:
    for case, found in zip(TWO, run_world(mesh_steps, 2, TWO, timeout=250)[0], strict=True):
        if case.length > 1:  # a sequence of one token has nothing to predict
            assert deviation(found, plain_step(case)) < 1e-5, case


class Keyed(Own):
    """Has its blocks in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(self.blocks)})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks.values():
            x = block(x)
        return self.lm_head(x) * self.scale


def moved_rows(kind: str) -> dict[str, int]:
    """How often rows are gathered and scattered in a forward and a backward pass of two blocks."""
    model = Keyed() if kind == "keyed" else build(kind)
    model = accelerator_for({"tp_size": 2, "tp_sequence_parallel": True}, None).prepare(model)
    loss_of(model, batches(1)).backward()  # blocks that are not known are compared
    with counted(sequence_collectives, "_all_rows", "summed_rows") as made:
        loss_of(model, batches(1)).backward()
    return made


KINDS = ("llama", "gpt2", "own", "keyed")


def all_moved_rows() -> dict[str, dict[str, int]]:
    return {kind: moved_rows(kind) for kind in KINDS}


@needs_transformers_5
def test_each_layer_gathers_once_and_scatters_once() -> None:
    # Two of each a block, forward and backward; hidden states are split at the start and joined at the end.
    expected = {"_all_rows": 2 * 4 + 2, "summed_rows": 2 * 4}
    for rank in run_world(all_moved_rows, 2, timeout=250):
        assert rank == dict.fromkeys(KINDS, expected)


def dropping(sequence: bool) -> dict[str, Any]:
    accelerator = accelerator_for({"tp_size": 2, "tp_sequence_parallel": sequence}, None)
    model = gpt2(dropout=0.3)
    for block in model.transformer.h:
        block.attn.attn_dropout.p = block.attn.config.attn_pdrop = 0.0
    model = accelerator.prepare(model)
    set_seed(3)
    losses = []
    for tokens in batches(2).split(8):
        loss = loss_of(model, tokens)
        accelerator.backward(loss)
        losses.append(loss.item())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
    return {"losses": losses, "norm": norm}


def dropping_in_one_process() -> dict[str, Any]:
    model = gpt2(dropout=0.3)
    for block in model.transformer.h:
        block.attn.attn_dropout.p = block.attn.config.attn_pdrop = 0.0
    set_seed(3)
    losses = []
    for tokens in batches(2).split(8):
        loss = loss_of(model, tokens)
        loss.backward()
        losses.append(loss.item())
    return {"losses": losses, "norm": nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()}


def dropping_twice() -> list[dict[str, Any]]:
    found = []
    for sequence in (True, False):
        torch.manual_seed(0)
        found.append(dropping(sequence))
    return found


def test_dropout_between_layers_drops_what_one_process_drops() -> None:
    torch.manual_seed(0)
    expected = dropping_in_one_process()
    for found in run_world(dropping_twice, 2, timeout=250)[0]:
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-4)


class ShiftingBlock(Block):
    """Also looks at the position before, which a rank may not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        return super().forward(x + before)


class Shifting(Own):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = ShiftingBlock


def shifting() -> dict[str, Any]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(tp_sequence.__name__).addHandler(handler)
    accelerator = accelerator_for({"tp_size": 2}, None)
    torch.manual_seed(0)
    model = accelerator.prepare(Shifting())
    losses = [loss_of(model, batches(1)).item() for _ in range(2)]
    accelerator.free_memory()
    refused = accelerator_for({"tp_size": 2, "tp_sequence_parallel": True}, None).prepare(Shifting())
    with pytest.raises(ConfigurationError, match="ShiftingBlock"):
        loss_of(refused, batches(1))
    return {"losses": losses, "messages": messages}


def test_a_block_that_mixes_positions_is_found_by_comparing_it() -> None:
    torch.manual_seed(0)
    expected = loss_of(Shifting(), batches(1)).item()
    ranks = run_world(shifting, 2, timeout=250)
    for rank in ranks:
        assert rank["losses"] == pytest.approx([expected] * 2, rel=1e-5)
    assert any("ShiftingBlock" in message for message in ranks[0]["messages"])


def recomputing() -> dict[str, Any]:
    """Two forward passes with sequences of other lengths before the backward pass of the first."""
    found: dict[str, Any] = {}
    for reentrant in (False, True):
        accelerator = accelerator_for({"tp_size": 2}, None)
        model = build("llama")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model = accelerator.prepare(model.train())
        losses = [loss_of(model, tokens) for tokens in (batches(1), batches(1)[:, :4])]
        try:
            sum(losses).backward()
            found["norm"] = nn.utils.get_total_norm(
                [
                    item.grad.full_tensor() if hasattr(item.grad, "full_tensor") else item.grad
                    for item in model.parameters()
                ]
            ).item()
        except AccelError as error:
            found["refused"] = str(error)
        accelerator.free_memory()
    return found


@needs_transformers_5
def test_recomputed_blocks_know_the_length_of_their_own_forward() -> None:
    model = build("llama")
    sum(loss_of(model, tokens) for tokens in (batches(1), batches(1)[:, :4])).backward()
    expected = nn.utils.get_total_norm([item.grad for item in model.parameters()]).item()
    for rank in run_world(recomputing, 2, timeout=250):
        assert rank["norm"] == pytest.approx(expected, rel=1e-5)
        assert "use_reentrant=False" in rank["refused"]


def asking() -> dict[str, Any]:
    model = accelerator_for({"tp_size": 2, "tp_sequence_parallel": True}, None).prepare(build("llama"))
    tokens = batches(1)[:2]
    hidden = model(tokens, output_hidden_states=True).hidden_states
    with torch.no_grad():
        generated = model.generate(tokens, max_new_tokens=5, do_sample=False)
        output = model(tokens)
    return {"hidden": [item.detach() for item in hidden], "generated": generated, "logits": output.logits}


@needs_transformers_5
def test_hidden_states_logits_and_generated_tokens_are_whole() -> None:
    model, tokens = build("llama").eval(), batches(1)[:2]
    hidden = model(tokens, output_hidden_states=True).hidden_states
    with torch.no_grad():
        generated = model.generate(tokens, max_new_tokens=5, do_sample=False)
        logits = model(tokens).logits
    for rank in run_world(asking, 2, timeout=250):
        for found, expected in zip(rank["hidden"], hidden, strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)
        assert torch.equal(rank["generated"], generated)
        torch.testing.assert_close(rank["logits"], logits, rtol=1e-4, atol=1e-5)


def kept() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The shapes of what a norm gets with and without sharding."""
    shapes = []
    for sequence in (True, False):
        model = accelerator_for({"dp_shard_size": 1, "tp_size": 2, "tp_sequence_parallel": sequence}).prepare(
            build("llama")
        )
        seen: list[tuple[int, ...]] = []
        model.model.layers[1].input_layernorm.register_forward_pre_hook(
            lambda module, args, seen=seen: seen.append(tuple(args[0].shape))
        )
        loss_of(model, batches(1))
        shapes.append(seen)
    return shapes[0], shapes[1]


@needs_transformers_5
def test_a_norm_sees_this_ranks_part_of_the_sequence() -> None:
    assert run_world(kept, 2, timeout=250)[0] == ([(8, 3, 16)], [(8, 5, 16)])


def refused() -> None:
    for sizes, kind in (({"tp_size": 2}, "phi"),):
        with pytest.raises(ConfigurationError, match="Phi3ForCausalLM"):
            accelerator_for({**sizes, "tp_sequence_parallel": True}).prepare(build(kind))
    compiled = build("llama")
    compiled.compile(backend="eager")
    with pytest.raises(ConfigurationError, match="compiled"):
        accelerator_for({"tp_size": 2, "tp_sequence_parallel": True}).prepare(compiled)


def test_models_that_are_not_supported_are_refused_when_it_is_asked_for() -> None:
    run_world(refused, 2, timeout=250)
    with pytest.raises(ConfigurationError, match="tp_size=1"):
        ParallelismConfig(tp_sequence_parallel=True)
    with pytest.raises(AccelError, match="'yes'"):
        ParallelismConfig(tp_size=2, tp_sequence_parallel="yes")  # type: ignore[arg-type]


def test_the_launcher_turns_it_off() -> None:
    with patch_environment(PARALLELISM_CONFIG_TP_SIZE="2", PARALLELISM_CONFIG_TP_SEQUENCE_PARALLEL="false"):
        assert ParallelismConfig().tp_sequence_parallel is False
    assert ParallelismConfig(tp_size=2).tp_sequence_parallel is None


def unsupported(change: Any, kind: str = "llama") -> str:
    model = build(kind)
    change(model)
    plan, _ = plan_of(model, None, 2)
    with pytest.raises(UnsupportedModelError) as caught:
        find_structure(model, plan)
    return str(caught.value)


@needs_transformers_5
def test_structures_that_are_not_known_are_named() -> None:
    def add(name: str, module: Any) -> Any:
        return lambda model: setattr(model.model.layers[1], name, module)

    assert "layers.1.router" in unsupported(add("router", nn.Linear(16, 4)))
    assert "layers.1.norm, a BatchNorm1d" in unsupported(add("norm", nn.BatchNorm1d(16)))
    assert "layers.1 has parameters of its own" in unsupported(add("scale", nn.Parameter(torch.ones(16))))
    assert "layers.1.drop is a Dropout1d" in unsupported(add("drop", nn.Dropout1d(0.1)))
    assert "hidden_dropout=0.1" in unsupported(add("hidden_dropout", 0.1))
    assert "layers.1.self_attn.inner" in unsupported(
        lambda model: setattr(model.model.layers[1].self_attn, "inner", nn.LayerNorm(16))
    )
    assert "has no row-wise layer" in unsupported(
        lambda model: model.model.layers.__setitem__(1, nn.Sequential(nn.LayerNorm(16)))
    )
