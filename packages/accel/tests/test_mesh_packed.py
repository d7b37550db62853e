"""Documents packed into sequences that ranks share: losses and gradients of each document alone, in one process."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from language_models import VOCABULARY, build
from torch import nn
from torch.nn import functional
from transformers_5 import needs_transformers_5

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.axis_settings import TorchContextParallelConfig
from accel.parallel.config import ParallelismConfig
from accel.parallel.documents import FLEX_BLOCK, Documents, are_packed_positions, flex_mask
from accel_state.errors import ConfigurationError
from accel_state.operations import send_to_device
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

LENGTH, STEPS = 32, 4
# Lengths of documents by step and sequence: of one token, longer than a rank's share, many, one; the rest is padding.
PACKED = (
    ((1, 20, 1, 6), (16, 16)),
    ((31,), (2, 3, 5, 7, 11, 4)),
    ((32,), (8, 8, 8, 8)),
    ((4, 24), (1, 1, 1, 29)),
)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Two sequences of packed documents; the first label of each document is left out, as collators do."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
    labels, positions = tokens.clone(), torch.zeros_like(tokens)
    for row, lengths in enumerate(PACKED[step]):
        end = 0
        for length in lengths:
            positions[row, end : end + length] = torch.arange(length)
            labels[row, end] = -100
            end += length
        labels[row, end:] = -100  # padding, every token of which is a document of its own
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


WINDOW = 5


def windowed(kind: str) -> Any:
    """A model whose layers attend to the last tokens only: all of them (mistral), or every second one (qwen3)."""
    from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LENGTH}
    sizes |= {"num_hidden_layers": 2, "sliding_window": WINDOW}
    torch.manual_seed(0)
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**sizes))
    kinds = ["sliding_attention", "full_attention"]
    return Qwen3ForCausalLM(Qwen3Config(**sizes, use_sliding_window=True, layer_types=kinds))


def adapted(kind: str) -> nn.Module:
    if kind in ("mistral", "qwen3"):
        return windowed(kind)
    torch.manual_seed(0)
    if kind != "lora":
        model = build(kind)
        if kind == "gpt2":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(build("llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.5)


def each_alone(kind: str) -> dict[str, list[float]]:
    """One process of plain PyTorch, which gives the model one document at a time."""
    model = adapted(kind)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for step in range(STEPS):
        batch, total = batch_of(step), torch.zeros(())
        items = (batch["labels"] != -100).sum()
        for row, lengths in enumerate(PACKED[step]):
            end = 0
            for length in lengths:
                tokens = batch["input_ids"][row : row + 1, end : end + length]
                logits = model(input_ids=tokens).logits[0, :-1]
                total = total + functional.cross_entropy(logits, tokens[0, 1:], reduction="sum") / items
                end += length
        total.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return {"losses": losses, "norms": norms}


def train(kind: str, axes: dict[str, int], settings: dict[str, Any]) -> dict[str, list[float]]:
    handler = TorchContextParallelConfig(cp_balance=settings["balance"]) if "cp_size" in axes else None
    sharded = "dp_shard_size" in axes
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**axes, cp_handler=handler),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None,
    )
    model = adapted(kind)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    losses, norms, rows = [], [], accelerator.strategy.data_collectives
    for step in range(STEPS):
        batch = batch_of(step)
        count = (batch["labels"] != -100).sum()
        if rows.world_size > 1:
            batch = {name: value[rows.rank : rows.rank + 1] for name, value in batch.items()}
        share = (batch["labels"] != -100).sum() * rows.world_size / count  # the mean over ranks is that over tokens
        if settings["marks"] == "boundaries":
            batch = bounded(batch, step, rows.rank)
        batch, share = send_to_device((batch, share), accelerator.device)
        loss = once(accelerator, model, batch, share, "sp_size" in axes)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss, "mean").item())
    accelerator.free_memory()
    return {"losses": losses, "norms": norms}


def bounded(batch: dict[str, torch.Tensor], step: int, row: int) -> dict[str, torch.Tensor]:
    """Boundaries in the place of positions, as kernels for documents of different lengths take them."""
    starts = (batch.pop("position_ids")[0] == 0).nonzero().flatten()
    boundaries = torch.cat([starts, torch.tensor([LENGTH])]).int()
    return {**batch, "cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": LENGTH}


def once(accelerator: Accelerator, model: Any, batch: dict[str, Any], share: Any, is_split: bool) -> torch.Tensor:
    if is_split:
        loss = model(**accelerator.strategy.ulysses.split(batch)).loss * share
        accelerator.backward(loss)
        return loss.detach()
    buffers = [value for name, value in batch.items() if name in ("input_ids", "labels", "position_ids")]
    with accelerator.maybe_context_parallel(buffers, [1] * len(buffers)):
        output = model(**batch)
        loss = output.loss * share
        accelerator.backward(loss)
        whole = accelerator.strategy.whole_sequences(batch["input_ids"])
    assert torch.equal(whole, batch["input_ids"])
    return loss.detach()


def train_all(cases: list[Any]) -> list[dict[str, list[float]]]:
    return [train(*case) for case in cases]


def check(ranks: int, cases: list[tuple[str, dict[str, int], str, str]]) -> None:
    given = [(kind, axes, {"balance": balance, "marks": marks}) for kind, axes, balance, marks in cases]
    expected = {kind: each_alone(kind) for kind, *_ in cases}
    for found in run_world(train_all, ranks, given, timeout=500):
        for case, result in zip(cases, found, strict=True):
            for name, values in expected[case[0]].items():
                assert result[name] == pytest.approx(values, rel=2e-5), (case, name)


def test_two_ranks_train_on_packed_documents_as_one_process_on_each_alone() -> None:
    cp, sp = {"cp_size": 2}, {"sp_size": 2}
    cases = [
        (kind, axes, balance, "positions")
        for kind in ("llama", "gpt2", *(["lora"] if find_spec("peft") else []))
        for axes, balance in ((cp, "length"), (cp, "documents"), (sp, "length"))
    ]
    check(2, cases)


@needs_transformers_5
def test_layers_with_windows_train_as_in_one_process() -> None:
    cp, sp = {"cp_size": 2}, {"sp_size": 2}
    kinds = ((cp, "length"), (cp, "documents"), (sp, "length"))
    check(2, [(kind, axes, balance, "positions") for kind in ("mistral", "qwen3") for axes, balance in kinds])


def whole_batch() -> dict[str, torch.Tensor]:
    tokens = batch_of(0)["input_ids"]
    return {"input_ids": tokens, "labels": tokens.clone()}


def whole_with_windows(all_axes: list[dict[str, int]]) -> list[tuple[float, float]]:
    """Sequences that are one document each."""
    found = []
    for kind in ("mistral", "qwen3"):
        for axes in all_axes:
            accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**axes))
            model = accelerator.prepare(windowed(kind))
            batch = send_to_device(whole_batch(), accelerator.device)
            if "pp_size" not in axes:
                loss = once(accelerator, model, batch, 1.0, "sp_size" in axes)
            else:
                (batch,) = accelerator.deepspeed_ulysses_dl_adapter([batch], model)
                tokens, labels = batch["input_ids"], batch["labels"]
                with accelerator.maybe_context_parallel([tokens, labels], [1, 1], {tokens, labels}):
                    loss = model(tokens, labels=labels).loss
                    accelerator.backward(loss)
                loss = loss.detach()
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            found.append((accelerator.reduce(loss, "mean").item(), norm.item()))
            accelerator.free_memory()
    return found


def check_windows(ranks: int, all_axes: list[dict[str, int]]) -> None:
    expected = []
    for kind in ("mistral", "qwen3"):
        model = windowed(kind)
        loss = model(**whole_batch()).loss
        loss.backward()
        expected += [(loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())] * len(all_axes)
    for found in run_world(whole_with_windows, ranks, all_axes, timeout=250):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=2e-5)


@needs_transformers_5
def test_windows_of_whole_sequences_are_those_of_one_process() -> None:
    check_windows(2, [{"cp_size": 2}, {"sp_size": 2}])


@pytest.mark.slow  # windows of whole and of shared sequences are fast
def test_windows_in_pipelines_are_those_of_one_process() -> None:
    check_windows(4, [{"pp_size": 2, "cp_size": 2}, {"pp_size": 2, "sp_size": 2}])


@pytest.mark.slow
def test_four_ranks_train_on_packed_documents_as_one_process_on_each_alone() -> None:
    cases = [
        ("llama", {"cp_size": 4}, "length", "positions"),
        ("llama", {"cp_size": 4}, "documents", "positions"),
        ("gpt2", {"sp_size": 4}, "length", "positions"),
        ("llama", {"sp_size": 4}, "length", "positions"),
        ("llama", {"dp_shard_size": 2, "cp_size": 2}, "documents", "positions"),
        ("llama", {"dp_shard_size": 2, "cp_size": 2}, "length", "boundaries"),
        ("gpt2", {"dp_shard_size": 2, "cp_size": 2}, "length", "boundaries"),
        ("llama", {"dp_shard_size": 2, "sp_size": 2}, "length", "boundaries"),
        ("gpt2", {"dp_replicate_size": 2, "cp_size": 2}, "documents", "positions"),
        ("llama", {"tp_size": 2, "cp_size": 2}, "length", "positions"),
        ("llama", {"tp_size": 2, "sp_size": 2}, "length", "positions"),
        ("mistral", {"cp_size": 4}, "documents", "positions"),
        ("qwen3", {"sp_size": 4}, "length", "positions"),
        ("qwen3", {"dp_shard_size": 2, "cp_size": 2}, "length", "boundaries"),
        ("mistral", {"tp_size": 2, "cp_size": 2}, "documents", "positions"),
        ("qwen3", {"tp_size": 2, "sp_size": 2}, "length", "positions"),
    ]
    check(4, cases)


def drawn_documents(length: int, generator: torch.Generator) -> Documents:
    """Few long documents and many short ones."""
    lengths: list[int] = []
    while sum(lengths) < length:
        drawn = int(torch.randn((), generator=generator).mul(1.2).add(5).exp().item()) + 1
        lengths.append(min(drawn, length - sum(lengths)))
    return Documents.of_positions(torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0))


def test_ranks_get_about_the_same_work() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (2, 4, 8):
        for _ in range(20):
            documents = drawn_documents(4096, generator)
            order = documents.split_evenly(size)
            assert order.shape == (size, 4096 // size)
            assert torch.equal(order.flatten().sort().values, torch.arange(4096))
            loads = (documents.positions()[0][order] + 1).sum(1).double()
            assert loads.max() / loads.mean() < 1.1


def test_ranks_compute_about_as_many_blocks_of_flex_attention() -> None:
    """As flex attention itself counts them; and no more than with parts that lie side by side."""

    def computed(order: torch.Tensor) -> torch.Tensor:
        mask = flex_mask(documents.ids, order.flatten(), order.flatten())
        return (mask.kv_num_blocks + mask.full_kv_num_blocks).flatten().unflatten(0, (len(order), -1)).sum(1).double()

    generator = torch.Generator().manual_seed(0)
    for size in (2, 4, 8):
        documents = drawn_documents(4096, generator)
        order = documents.split_evenly(size, FLEX_BLOCK)
        assert torch.equal(order.flatten().sort().values, torch.arange(4096))
        blocks = computed(order)
        assert blocks.max() / blocks.mean() < 1.1
        assert blocks.sum() == computed(torch.arange(4096).unflatten(0, (size, -1))).sum()


def test_documents_by_positions_and_by_boundaries_are_the_same() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1]])
    documents = Documents.of_positions(positions)
    assert documents.ids.tolist() == [[0, 0, 0, 1, 2, 2]] and torch.equal(documents.positions(), positions)
    assert torch.equal(Documents.of_boundaries(torch.tensor([0, 3, 4, 6]), 6).ids, documents.ids)
    for wrong in ([0, 3, 3, 6], [1, 6], [0, 4], [0, 4, 2, 6]):
        with pytest.raises(ValueError, match="do not rise from 0 to 6"):
            Documents.of_boundaries(torch.tensor(wrong), 6)
    assert are_packed_positions(positions)
    for other in (torch.arange(6)[None], torch.tensor([[1, 2, 0, 1]]), torch.tensor([[0, 2, 0, 1]]), positions[0]):
        assert not are_packed_positions(other)


def test_the_mask_of_flex_attention_is_the_same() -> None:
    """Its backward pass does not run on CPUs."""
    from torch.nn.attention.flex_attention import flex_attention

    generator = torch.Generator().manual_seed(0)
    documents = Documents.of_positions(torch.cat([torch.arange(5), torch.arange(40), torch.arange(19)])[None])
    order = documents.split_evenly(2)
    queries, keys = order[0], order.flatten()
    query = torch.randn(1, 4, len(queries), 16, generator=generator)
    key, value = (torch.randn(1, 2, len(keys), 16, generator=generator) for _ in range(2))
    for window in (None, 7):
        expected = documents.attend(query, key, value, queries, keys, window=window)
        mask = flex_mask(documents.ids, queries, keys, window)
        torch.testing.assert_close(flex_attention(query, key, value, block_mask=mask, enable_gqa=True), expected)


def refusals() -> None:
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig(cp_balance="documents")),
    )
    model = accelerator.prepare(build("llama"))
    batch = send_to_device(batch_of(0), accelerator.device)
    names = ("input_ids", "position_ids")
    buffers = [batch[name] for name in names]
    with accelerator.maybe_context_parallel(buffers, [1, 1]):
        logits = model(**{name: batch[name] for name in names}).logits
        whole = accelerator.strategy.whole_sequences(logits.detach())
        with pytest.raises(ConfigurationError, match="other documents"):
            model(input_ids=batch["input_ids"], position_ids=batch_of(1)["position_ids"].to(accelerator.device))
    expected = build("llama")(**{name: batch[name].cpu() for name in names}, use_cache=False).logits
    torch.testing.assert_close(whole.cpu(), expected)
    with pytest.raises(ConfigurationError, match="cp_balance"):
        accelerator.strategy.whole_sequences(logits.detach())
    # Tokens that look like positions of documents are split by their work, and attended to as one sequence.
    counting = torch.arange(LENGTH, device=accelerator.device).remainder(8).repeat(2, 1)
    with accelerator.maybe_context_parallel([counting], [1]):
        logits = model(input_ids=counting).logits.detach()
        whole = accelerator.strategy.whole_sequences(logits)
    torch.testing.assert_close(whole.cpu(), build("llama")(input_ids=counting.cpu()).logits)


def test_documents_belong_to_one_block() -> None:
    run_world(refusals, 2, timeout=250)
