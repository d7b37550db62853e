"""Sequences shared among ranks: the same attention, losses and weights as with whole sequences."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from language_models import (
    BATCH,
    LENGTH,
    VOCABULARY,
    build,
    dataset,
    optimizer_of,
    plain,
    sharding,
    stack,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.data import DataLoader
from windows import TOLERANCE, assert_same, train_windows

from accel import Accelerator
from accel.parallel import context_parallel
from accel.parallel.axis_settings import TorchContextParallelConfig
from accel.parallel.config import ParallelismConfig
from accel.parallel.context_parallel import ContextParallel, _sums_are_padded, positions_of
from accel.parallel.ring_kernels import _cpu_backward, _cpu_forward, _plain_backward, _plain_forward
from accel.parallel.sequence_inputs import SequenceCalls
from accel.utils import shift_labels
from accel_state import is_torch_version
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]


def attention(rotation: str, dtype: torch.dtype, kv_heads: int, values: int = 8) -> list[float]:
    """The largest errors of output and of the gradients of queries, keys and values, against whole sequences."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]
    ring = ContextParallel(mesh, TorchContextParallelConfig(rotation))
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (kv_heads, 8), (kv_heads, values), (4, values))
    whole = [torch.randn(2, heads, LENGTH, width, generator=generator).to(dtype) for heads, width in shapes]
    inputs = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    expected = functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=kv_heads != 4)
    (expected * whole[3]).sum().backward()
    parts = [tensor.clone() for tensor in whole]
    with ring.block(parts, [2, 2, -2, 2], None):
        assert torch.equal(ring.shard.positions, positions_of(dist.get_rank(), size, LENGTH))
        own = [tensor.clone().requires_grad_() for tensor in parts[:3]]
        out = functional.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=kv_heads != 4)
        (out * parts[3]).sum().backward()
    assert all(torch.equal(part, tensor) for part, tensor in zip(parts, whole, strict=True)), "buffers are whole again"
    pairs = [(out, expected), *((mine.grad, theirs.grad) for mine, theirs in zip(own, inputs, strict=True))]
    return [(ring.unshard(mine, 2) - theirs).abs().max().item() for mine, theirs in pairs]


def attentions() -> dict[Any, list[float]]:
    cases = [
        (rotation, dtype, heads)
        for rotation in ("allgather", "alltoall")
        for dtype in (torch.float32, torch.bfloat16)
        for heads in (4, 2)
    ]
    # Values that are smaller and larger than keys, as those of multi-head latent attention.
    cases += [("alltoall", torch.float32, 2, 4), ("allgather", torch.float32, 4, 12)]
    return {case: attention(*case) for case in cases}


@pytest.mark.parametrize("size", [2, 4])
def test_attention_over_shared_sequences_is_that_over_whole_ones(size: int) -> None:
    for found in run_world(attentions, size, timeout=250):
        for case, errors in found.items():
            # bf16 has 8 bits, and gradients near 4.
            assert max(errors) < (1e-5 if case[1] == torch.float32 else 0.05), case


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 0.05)], ids=str)
def test_devices_without_fused_kernels_compute_the_same(is_causal: bool, dtype: torch.dtype, tolerance: float) -> None:
    """A block of the ring in products, against the CPU's fused kernels: keys for two heads each, a given scale."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (2, 4, 6, 8), "key": (2, 2, 6, 8), "value": (2, 2, 6, 8)}
    inputs = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    settings = {"is_causal": is_causal, "dropout_p": 0.0}
    for scale in (None, 0.7):
        expected, found = (kernel(**inputs, **settings, scale=scale) for kernel in (_cpu_forward, _plain_forward))
        gradient = torch.randn(2, 4, 6, 8, generator=generator).to(dtype)
        # logsumexp is that of a row that has keys on other ranks too
        known = {"grad_out": gradient, "out": expected[0], "logsumexp": expected[1] + 0.3}
        expected += _cpu_backward(**inputs, **known, **settings, scale=scale)
        found += _plain_backward(**inputs, **known, **settings, scale=scale)
        assert len(found) == len(expected) == 5
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "length", "cast", "padded"),
    [
        (torch.float32, 64, False, False),
        (torch.float32, 96, False, True),  # its halves of 48
        (torch.float32, 96, True, False),  # autocast makes it bf16
        (torch.bfloat16, 96, False, False),
    ],
    ids=str,
)
def test_sums_of_the_memory_efficient_kernel_are_padded(
    dtype: torch.dtype, length: int, cast: bool, padded: bool
) -> None:
    """Torch's ring failed with them on an H100: "The size of tensor a (32) must match the size of tensor b (8)"."""
    query = torch.zeros(1, 2, length, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        assert _sums_are_padded(query) == padded


@pytest.mark.parametrize(("length", "kernels"), [(64, "torch's"), (96, "products")])
def test_what_torchs_ring_cannot_merge_is_computed_in_products(
    length: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice of a device with torch's kernels, which do not run here."""
    query = torch.zeros(1, 2, length, 8)
    monkeypatch.setattr(context_parallel, "has_ring_kernels", lambda kind: True)
    found = {"products": torch.ones(1), "torch's": torch.ones(1)}
    monkeypatch.setattr(context_parallel.Ring, "apply", lambda *inputs: found["products"])
    mesh = SimpleNamespace(get_group=lambda: None)
    attention = context_parallel.RingAttention(mesh, lambda *inputs, **settings: found["torch's"])
    assert attention(query, query, query, is_causal=True) is found[kernels]


def shared_memory() -> None:
    ring = ContextParallel(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"], TorchContextParallelConfig())
    tokens = torch.arange(18).view(2, 9)
    before = tokens.clone()
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    mine = positions_of(dist.get_rank(), 2, 8)
    with ring.block([inputs, labels], [1, 1], {labels}):
        assert torch.equal(inputs, before[:, :-1][:, mine]) and torch.equal(labels, before[:, 1:][:, mine])
        assert torch.equal(tokens, before), "what a buffer is a view of stays as it is"
        assert torch.equal(ring.unshard(labels, 1), before[:, 1:])
    assert torch.equal(inputs, before[:, :-1]) and inputs.data_ptr() == tokens.data_ptr()
    assert labels.shape == (2, 4), "not restored"
    # After an error too.
    with pytest.raises(KeyError), ring.block([inputs], [1], None):
        raise KeyError
    assert torch.equal(inputs, before[:, :-1]) and ring.shard is None
    assert functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


@pytest.mark.slow  # a world of two for one check; parts of the ring have fast tests
@pytest.mark.skipif(is_torch_version("<", "2.10"), reason="context parallelism on CPUs needs torch 2.10")
def test_buffers_that_share_memory_are_cut_and_restored() -> None:
    run_world(shared_memory, 2, timeout=250)


def refusals() -> None:
    ring = ContextParallel(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"], TorchContextParallelConfig())
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    for buffers, dims, kept, message in (
        (None, None, None, "got no buffers"),
        ([tokens], [1, 1], None, "1 buffers and 2 buffer_seq_dims"),
        ([tokens, tokens], [1, 1], None, "the same tensor twice"),
        ([tokens], [1], {tokens.clone()}, "that are not in buffers"),
        ([tokens], [2], None, "buffer_seq_dims has 2 for a buffer of shape"),
        ([torch.zeros(2, 4, requires_grad=True)], [1], None, "requires gradients"),
        ([tokens, tokens[:, :8].clone()], [1, 1], None, r"\[16, 8\] positions"),
        ([torch.zeros(2, 10)], [1], None, "sequences of 10 positions cannot be split over cp_size=2"),
    ):
        with pytest.raises(ConfigurationError, match=message), ring.block(buffers, dims, kept):
            pass
    refused_attention(ring)
    refused_models(ring)


def refused_attention(ring: ContextParallel) -> None:
    heads = torch.zeros(2, 4, LENGTH, 8)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    for settings, message in (
        ({"attn_mask": mask}, "got a mask of shape"),
        ({}, "is_causal=False"),
        ({"is_causal": True, "dropout_p": 0.1}, "dropout_p=0.1"),
    ):
        buffer = heads.clone()
        with ring.block([buffer], [2], None), pytest.raises(ConfigurationError, match=message):
            functional.scaled_dot_product_attention(buffer, buffer, buffer, **settings)
    with ring.block([heads], [2], None):
        with pytest.raises(ConfigurationError, match="within its own block"), ring.block([heads], [2], None):
            pass
        queries = heads.clone().requires_grad_()
        out = functional.scaled_dot_product_attention(queries, queries, queries, is_causal=True)
    with pytest.raises(ConfigurationError, match="backward was called after the block"):
        out.sum().backward()


def refused_models(ring: ContextParallel) -> None:
    model = build("llama")
    ring.prepare_model(model)
    batch = stack(dataset(1))
    tokens, labels = batch["input_ids"], batch["labels"]
    padding = torch.ones_like(tokens)
    padding[0, 0] = 0
    for buffers, call, message in (
        ([labels], {"input_ids": tokens}, "input_ids has 16 positions, and this rank has 8"),
        ([tokens], {"input_ids": tokens, "attention_mask": padding}, "hides more than padding at the end"),
        ([tokens], {"input_ids": tokens, "labels": labels[:, :8].clone()}, "loses the label at its end"),
        ([tokens], {"input_ids": tokens, "labels": labels[:, 0]}, "have one value for each sequence"),
    ):
        with ring.block(buffers, [1], None), pytest.raises(ConfigurationError, match=message):
            model(**call)
    for setting, value, message in (
        ("_attn_implementation", "eager", "attn_implementation='eager' attends to this rank's part"),
        ("sliding_window", 4, "sliding_window=4 is shorter than sequences of 16 .* LlamaAttention does not pass it on"),
        ("attention_chunk_size", 4, "attention_chunk_size=4 is shorter than sequences of 16"),
    ):
        before = getattr(model.config, setting, None)
        setattr(model.config, setting, value)
        if setting == "attention_chunk_size":
            model.config.layer_types = ["full_attention", "chunked_attention"]
        with ring.block([tokens], [1], None), pytest.raises(ConfigurationError, match=message):
            model(input_ids=tokens)
        setattr(model.config, setting, before)
    with ring.block([tokens], [1], None), pytest.raises(ConfigurationError, match="without saying so"):
        ring.shard.has_windows = True
        heads = torch.ones(1, 2, 8, 4)
        functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def test_what_would_be_computed_wrongly_is_refused() -> None:
    run_world(refusals, 2, timeout=250)


SMALL = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64},
    **{"num_key_value_heads": 2, "num_experts": 2, "num_local_experts": 2, "moe_intermediate_size": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MIXING = {
    "qwen3_next": ({}, "linear_attention"),
    "minimax": ({"layer_types": ["full_attention", "linear_attention"] * 2}, "linear_attention"),
    "lfm2": ({"layer_types": ["full_attention", "conv"] * 2}, "conv"),
    "falcon_h1": ({}, "FalconH1Model has layers"),
    "rwkv": ({}, "RwkvModel has layers"),
}


def small_model(name: str, **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(name, **SMALL, **settings))


@pytest.mark.parametrize("name", MIXING)
def test_layers_that_mix_positions_other_than_by_attention_are_refused(name: str) -> None:
    """With cp_size=2, losses of these models were off by 0.1 to 0.6, without an error."""
    settings, message = MIXING[name]
    model = small_model(name, **settings)
    with pytest.raises(ConfigurationError, match=f"{message}.*cp_size=1 and sp_size=1"):
        SequenceCalls(model, "sdpa", lambda *_: None)


@pytest.mark.parametrize("name", ["mistral", "gpt2", "gemma3_text", "llama4_text", "mixtral"])
def test_layers_of_attention_and_of_single_positions_are_not(name: str) -> None:
    SequenceCalls(small_model(name), "sdpa", lambda *_: None)


def test_labels_are_shifted_before_sequences_are_cut() -> None:
    labels = torch.tensor([[1, 2, 3], [4, 5, -100]])
    assert shift_labels(labels).tolist() == [[2, 3, -100], [5, -100, -100]]


Case = tuple[str, dict[str, int], str, int]


def train(case: Case, steps: int = 20) -> dict[str, Any]:
    kind, sizes, rotation, window = case
    handler = TorchContextParallelConfig(cp_comm_strategy=rotation)
    config = ParallelismConfig(**sizes, cp_handler=handler)
    accelerator = Accelerator(
        parallelism_config=config, fsdp_plugin=sharding(sizes), gradient_accumulation_steps=window
    )
    model = build(kind)
    optimizer = optimizer_of(model)
    loader = DataLoader(dataset(steps * window), batch_size=BATCH // config.data_parallel_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return train_windows(accelerator, model, [optimizer], loader, partial(step, accelerator, model))


def step(accelerator: Accelerator, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens, labels = batch["input_ids"], batch["labels"]
    if hasattr(model, "config"):
        with accelerator.maybe_context_parallel(
            buffers=[tokens, labels], buffer_seq_dims=[1, 1], no_restore_buffers={tokens, labels}
        ):
            loss: torch.Tensor = model(input_ids=tokens, labels=labels).loss
            accelerator.backward(loss)
        return loss
    # A model that is told nothing: its table of positions is cut too, and labels are shifted by hand.
    labels = shift_labels(labels)
    items = (labels != -100).sum()
    with accelerator.maybe_context_parallel(buffers=[tokens, labels, model.turns], buffer_seq_dims=[1, 1, 0]):
        logits = model(tokens).flatten(0, 1)
        loss = (
            functional.cross_entropy(logits, labels.flatten(), reduction="sum")
            * accelerator.parallelism_config.cp_size
            / items
        )
        accelerator.backward(loss)
    assert model.turns.shape[0] == LENGTH
    return loss


def train_all(cases: list[Case]) -> list[dict[str, Any]]:
    return [train(case) for case in cases]


def check(size: int, cases: list[Case]) -> None:
    ranks = run_world(train_all, size, cases, timeout=250)
    for number, (kind, sizes, _, window) in enumerate(cases):
        expected = plain(kind, 20, window, parts=sizes.get("dp_shard_size", 1) * sizes.get("dp_replicate_size", 1))
        assert_same(ranks[0][number], expected, cases[number])
        assert all(rank[number]["losses"] == ranks[0][number]["losses"] for rank in ranks)


@pytest.mark.slow  # four trainings in two ranks; parts of the ring have fast tests
def test_two_ranks_train_as_one_process_does() -> None:
    check(
        2,
        [
            ("llama", {"cp_size": 2}, "allgather", 1),
            ("llama", {"cp_size": 2}, "alltoall", 2),
            ("gpt2", {"cp_size": 2}, "allgather", 1),
            ("own", {"cp_size": 2}, "alltoall", 1),
        ],
    )


def evaluate() -> list[list[float]]:
    """Every sample's loss, in the order of the data, from logits that are gathered over the sequence."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2, dp_shard_size=2))
    model, loader = accelerator.prepare(build("llama"), DataLoader(dataset(1, 7), batch_size=2))
    model.eval()
    found: list[torch.Tensor] = []
    for batch in loader:
        tokens = batch["input_ids"]
        with torch.no_grad(), accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
            logits = accelerator.strategy.whole_sequences(model(input_ids=tokens).logits)
        each = functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none").mean(
            1
        )
        found.append(accelerator.gather_for_metrics(each))
    return torch.cat(found).tolist()


def test_metrics_count_each_sample_once() -> None:
    batch = stack(dataset(1, 7))
    logits = build("llama")(input_ids=batch["input_ids"]).logits
    expected = functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none").mean(
        1
    )
    assert logits.shape[-1] == VOCABULARY
    for found in run_world(evaluate, 4, timeout=250):
        torch.testing.assert_close(torch.tensor(found), expected.detach(), rtol=0, atol=TOLERANCE)
