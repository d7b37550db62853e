"""Processes on as many devices compute what one process of plain PyTorch computes on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.parallelism_config import ParallelismConfig
from accel.utils import FullyShardedDataParallelPlugin, set_seed
from accel_state import PartialState
from accel_state.testing import run_world

STEPS, BATCH, RANKS = 4, 4, 2
WORLDS = {"fsdp2+tp": 4}  # other numbers of ranks
COPIES = {
    "ddp": 2,
    "fsdp2": 2,
    "fsdp2+tp": 2,
}  # groups of ranks with batches of their own; in the others, all have the same
LAYERS = 12  # of the model that is too large

# Next to other suites, on two cores, operators that fall back to the CPU take several times as long.
pytestmark = pytest.mark.timeout(400)


def _model(layers: int = 2, is_tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    set_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=is_tied,
    )
    return LlamaForCausalLM(config)


def _tokens(samples: int) -> torch.Tensor:
    return torch.randint(0, 32, (samples, 8), generator=torch.Generator().manual_seed(1))


def _plain(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, batch = _model(is_tied="tied" in kind), BATCH * COPIES.get(kind, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)
    losses = []
    for (tokens,) in DataLoader(TensorDataset(_tokens(STEPS * batch)), batch_size=batch):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def _settings(kind: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if kind.startswith("fsdp2"):
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            state_dict_type="FULL_STATE_DICT",
        )
    axes = {
        "tp": {"tp_size": 2},
        "cp": {"cp_size": 2},
        "pp": {"pp_size": 2},
        "pp tied": {"pp_size": 2},
        "fsdp2+tp": {"dp_shard_size": 2, "tp_size": 2},
    }
    if kind in axes:
        settings["parallelism_config"] = ParallelismConfig(**axes[kind])
    return settings


def _train(kind: str) -> dict[str, Any]:
    accelerator = Accelerator(**_settings(kind))
    model = _model(is_tied="tied" in kind)
    data = TensorDataset(_tokens(STEPS * BATCH * COPIES.get(kind, 1)))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6), DataLoader(data, batch_size=BATCH)
    )
    losses = []
    for (tokens,) in loader:
        with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    state = accelerator.get_state_dict(model) or {}
    return {
        "device": str(accelerator.device),
        "losses": losses,
        "weights": {name: value.cpu() for name, value in state.items()} if accelerator.is_main_process else {},
        "races": torch.simgpu.races(),
        "transfers": torch.simgpu.counters(),
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp", "cp", "pp", "pp tied", "fsdp2+tp"])
def test_trains_as_one_process(kind: str) -> None:
    losses, weights = _plain(kind)
    world = WORLDS.get(kind, RANKS)
    ranks = run_world(_train, world, kind, state=False, timeout=300)
    assert [rank["device"] for rank in ranks] == [f"simgpu:{index}" for index in range(world)]
    for rank in ranks:
        assert rank["races"] == []
    # With cp each rank has the loss of its part of the sequences.
    means = [sum(of_ranks) / world for of_ranks in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    assert set(ranks[0]["weights"]) >= {name for name in weights if "rotary" not in name}
    for name, value in ranks[0]["weights"].items():
        # The optimizer's eps is large: AdamW would make steps of the rounding of gradients that are nearly zero.
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)


def _generate(limits: dict[str, int]) -> tuple[list[list[int]], list[int]]:
    import tempfile

    import torch_simgpu  # noqa: F401 - before the Accelerator that would import it

    from accel import load_checkpoint_and_dispatch

    for index in range(2):
        torch.simgpu.set_memory_limit(limits["device"], index)
    model = _model(LAYERS).eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        options = {"offload_folder": f"{folder}/disk", "no_split_module_classes": ["LlamaDecoderLayer"]}
        memory = {0: limits["weights"], 1: limits["weights"], "cpu": limits["weights"]}
        model = load_checkpoint_and_dispatch(
            _model(LAYERS).eval(), folder, device_map="auto", max_memory=memory, **options
        )
        places = {str(place) for place in model.hf_device_map.values()}
        assert places == {"0", "1", "cpu", "disk"}, model.hf_device_map
        prompt = _tokens(2)[:, :4].to("simgpu:0")
        tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    peaks = [torch.simgpu.max_memory_allocated(index) for index in range(2)]
    return tokens.tolist(), peaks


def test_a_model_larger_than_both_devices_generates_the_same_tokens() -> None:
    model = _model(LAYERS).eval()
    size = sum(parameter.nbytes for parameter in model.parameters())
    with torch.no_grad():
        expected = model.generate(_tokens(2)[:, :4], max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
    limits = {"device": size // 2, "weights": size // 4}
    ((tokens, peaks),) = run_world(_generate, 1, limits, state=False, timeout=300)
    assert tokens == expected
    assert all(0 < peak <= limits["device"] for peak in peaks)


def _change_early(call: str, waits: bool) -> tuple[list[str], list[float]]:
    import torch.distributed as dist

    state = PartialState()
    rank, device = state.process_index, state.device
    given, got = torch.full((4096,), float(rank + 1), device=device), torch.zeros(4096 * RANKS, device=device)
    if call == "exchange":
        got = got[:4096]
        operations = [dist.P2POp(dist.isend, given, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
        works = dist.batch_isend_irecv(operations if rank == 0 else operations[::-1])
    else:
        works = [dist.all_gather_into_tensor(got, given, async_op=True)]
    if not waits:
        given.add_(7)
    for work in works:
        work.wait()
    if waits:
        given.add_(7)
    return torch.simgpu.races(), got.unique().tolist()


@pytest.mark.expects_races
@pytest.mark.parametrize("call", ["all_gather", "exchange"])
@pytest.mark.parametrize("waits", [False, True])
def test_tensors_may_change_when_a_collective_has_read_them(call: str, waits: bool) -> None:
    for rank, (races, values) in enumerate(run_world(_change_early, RANKS, call, waits, timeout=300)):
        assert (races == []) == waits, races
        assert values == ([1.0, 2.0] if call == "all_gather" else [2.0 - rank])
