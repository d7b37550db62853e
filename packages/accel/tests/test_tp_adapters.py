"""LoRA and QLoRA under tensor parallelism, against one process with the dequantized weights."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from fine_tuning import Adapted, dequantized, quantized
from torch import nn

from accel import Accelerator
from accel.core.nf4_weights import store_as_bytes
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.axis_settings import TorchTensorParallelConfig
from accel.parallel.config import ParallelismConfig
from accel.parallel.tp_adapters import plan_with_adapters
from accel.parallel.tp_layers import Columns, Rows
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(400),
]
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is in the clients' environment")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="NF4Tensor is torchao's")
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="4-bit weights are bitsandbytes'")

STEPS, SAVED_AT, BATCH, LENGTH, VOCABULARY, WIDTH = 6, 3, 4, 16, 64, 128
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
OWN_PLAN = {
    **{f"*.{name}.{part}": "colwise" for name in COLUMNS for part in ("base", "up")},
    **{f"*.{name}.{part}": "rowwise" for name in ROWS for part in ("base", "down")},
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": LENGTH, "bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**sizes))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def model_of(kind: str, alone: bool) -> nn.Module:
    """Adapters of PEFT ("peft") or of our own ("own") on a Llama or a GPT-2, whose layers may be in 4 bits."""
    torch.manual_seed(0)
    model = gpt2() if "gpt2" in kind else llama()
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear) or "layers" not in name:
            continue
        base: Any = layer
        if "4bit" in kind:
            base = quantized(layer, next((storage for storage in ("float32", "NF4Tensor") if storage in kind), "uint8"))
            base = dequantized(base) if alone else base
        if "own" in kind:
            base = Adapted(base, layer.in_features, layer.out_features)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, base)
    if "peft" in kind:
        model.is_loaded_in_4bit = "4bit" in kind and not alone  # as from_pretrained sets it; PEFT asks for it
        model = with_peft(model, ["lm_head"] if "head" in kind else [])
    generator = torch.Generator().manual_seed(1)  # the layers of bitsandbytes have drawn random numbers
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 10
    return model


def with_peft(model: Any, more: list[str], **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    is_gpt2 = type(model).__name__ == "GPT2LMHeadModel"
    targets = ["c_attn", "c_proj", "c_fc"] if is_gpt2 else [*(set(COLUMNS) - {"k_proj"}), *ROWS, *more]
    return get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out=is_gpt2, **settings)
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=3e-3, eps=1e-2)


def steps(model: Any, optimizer: Any, accelerator: Any, begin: int, end: int) -> list[float]:
    """Losses of evaluation and training, and gradient norms, in turn."""
    found = []
    for number in range(begin, end):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))
        if accelerator is not None:
            ranks = accelerator.strategy.data_collectives
            tokens = tokens.chunk(ranks.world_size)[ranks.rank]
        model.eval()
        with torch.no_grad():
            evaluated = model(input_ids=tokens, labels=tokens).loss
        model.train()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        clip = nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
        norm = clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses = [evaluated, loss.detach()]
        if accelerator is not None:
            losses = [accelerator.reduce(item, "mean") for item in losses]
        found += [*(item.item() for item in losses), norm.item()]
    return found


def plain(kind: str) -> list[float]:
    model = model_of(kind, True)
    return steps(model, optimizer_of(model), None, 0, STEPS)


def accelerator_of(kind: str, sizes: dict[str, Any]) -> Accelerator:
    settings: dict[str, Any] = {}
    if "dp_shard_size" in sizes or "cp_size" in sizes:
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
        )
    if sizes:
        handler = TorchTensorParallelConfig(plan=OWN_PLAN) if "own" in kind and "tp_size" in sizes else None
        settings["parallelism_config"] = ParallelismConfig(**sizes, tp_handler=handler)
    return Accelerator(cpu=True, **settings)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Packed weights that are stored as floats may be no numbers."""
    return one.dtype == other.dtype and one.cpu().numpy().tobytes() == other.cpu().numpy().tobytes()


def train(kinds: tuple[str, ...], sizes: dict[str, Any], folder: str = "") -> list[Any]:
    """The figures, the whole state and the bytes of packed weights of each kind; a state saved half-way."""
    found = []
    for kind in kinds:
        with context.isolated():
            accelerator = accelerator_of(kind, sizes)
            model: Any = model_of(kind, False)
            whole = model_of(kind, False)
            store_as_bytes(whole)
            expected = whole.state_dict()
            model, optimizer = accelerator.prepare(model, optimizer_of(model))
            state = accelerator.get_state_dict(model)
            if accelerator.is_main_process:
                assert state.keys() == expected.keys()
                assert all(same_bits(state[name], value) for name, value in expected.items()), kind
            packed = [item for name, item in model.named_parameters() if item.dtype == torch.uint8]
            figures = steps(model, optimizer, accelerator, 0, SAVED_AT)
            if folder:
                accelerator.save_state(folder)
            figures += steps(model, optimizer, accelerator, SAVED_AT, STEPS)
            held = sum(getattr(item, "_local_tensor", item).nbytes for item in packed)
            found.append((figures, held))
            accelerator.free_memory()
    return found


def train_from_meta() -> list[float]:
    """Rank 0 alone has weights, also of the factors that are whole on each rank."""
    accelerator = accelerator_of("own", {"tp_size": 2})
    model: Any = model_of("own", False)
    model = model.to("meta") if accelerator.process_index else model
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    return steps(model, optimizer, accelerator, 0, 3)


def test_adapters_start_and_train_where_only_rank_0_has_weights() -> None:
    expected = plain("own")[:9]
    for found in run_world(train_from_meta, 2, timeout=200):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def check(ranks: list[list[Any]], kinds: tuple[str, ...], shards: int) -> None:
    for number, kind in enumerate(kinds):
        expected = plain(kind)
        for rank in ranks:
            figures, held = rank[number]
            torch.testing.assert_close(figures, expected, rtol=1e-5, atol=0, msg=partial("{}: {}".format, kind))
            elements = 2 * (WIDTH * WIDTH * 3 + 3 * 2 * WIDTH * WIDTH)  # keys and values have half of the heads
            if "NF4Tensor" in kind:
                # The tables of 14 layers are whole, unless FSDP shards them: 17 floats, and one for 16 blocks of 64.
                table = 14 * 4 * 17 + elements // 64 // 16 * 4
                share = (elements // 2 + elements // 64) // shards
                assert share < held <= share + table
            elif "4bit" in kind and "float32" not in kind:
                assert held == elements // 2 // shards


@needs_bitsandbytes
def test_adapters_on_4_bit_layers_with_a_plan() -> None:
    kinds = ("own", "own 4bit")
    check(run_world(train, 2, kinds, {"tp_size": 2}, timeout=300), kinds, 2)


@needs_bitsandbytes
@pytest.mark.slow  # the test above stores weights as bytes
def test_adapters_on_4_bit_layers_that_are_stored_as_floats() -> None:
    kinds = ("own 4bit float32",)
    check(run_world(train, 2, kinds, {"tp_size": 2}, timeout=300), kinds, 2)


@needs_torchao
def test_adapters_on_nf4_layers_with_a_plan() -> None:
    kinds = ("own 4bit NF4Tensor",)
    check(run_world(train, 2, kinds, {"tp_size": 2}, timeout=300), kinds, 2)


@needs_torchao
@pytest.mark.slow  # four ranks; the test above has two
@pytest.mark.parametrize("sizes", [{"dp_shard_size": 2, "tp_size": 2}, {"cp_size": 2, "tp_size": 2}])
def test_adapters_on_nf4_layers_on_meshes(sizes: dict[str, Any]) -> None:
    kinds = ("own 4bit NF4Tensor",)
    check(run_world(train, 4, kinds, sizes, timeout=300), kinds, 4)


@needs_peft
def test_adapters_of_peft_with_the_model_s_plan_and_a_derived_one() -> None:
    kinds = ("peft", "peft head", "peft gpt2")
    check(run_world(train, 2, kinds, {"tp_size": 2}, timeout=300), kinds, 2)


@needs_peft
@needs_bitsandbytes
@pytest.mark.slow  # four ranks; the tests above have two
@pytest.mark.parametrize("sizes", [{"dp_shard_size": 2, "tp_size": 2}, {"cp_size": 2, "tp_size": 2}])
def test_adapters_of_peft_on_meshes(sizes: dict[str, Any]) -> None:
    kinds = ("peft 4bit", "peft gpt2") if "dp_shard_size" in sizes else ("peft 4bit",)
    check(run_world(train, 4, kinds, sizes, timeout=300), kinds, 4)


def resume(kind: str, sizes: dict[str, Any], folder: str) -> list[float]:
    accelerator = accelerator_of(kind, sizes)
    model: Any = model_of(kind, False)
    store_as_bytes(model)
    for item in model.parameters():
        item.data.zero_()  # of packed weights too
        if hasattr(item, "quant_state"):
            item.quant_state.absmax.zero_()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    accelerator.load_state(folder)
    return steps(model, optimizer, accelerator, SAVED_AT, STEPS)


@pytest.mark.slow  # four worlds, 12 s; test_frozen_weights.py loads states of 4-bit layers in the fast tier
@pytest.mark.parametrize(
    "kind",
    [pytest.param("own 4bit", marks=needs_bitsandbytes), pytest.param("own 4bit NF4Tensor", marks=needs_torchao)],
)
def test_a_state_is_resumed_without_tensor_parallelism(kind: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    run_world(train, 2, (kind,), {"tp_size": 2}, folder, timeout=300)
    expected = plain(kind)[3 * SAVED_AT :]
    for ranks, sizes in ((2, {"dp_shard_size": 2}), (2, {"tp_size": 2}), (1, {})):
        for found in run_world(resume, ranks, kind, sizes, folder, timeout=300):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def refused_four_bit() -> None:
    layer: Any = quantized(nn.Linear(64, 128, bias=False), "uint8")
    for style, named in ((Rows(), "64 inputs.*tp_size=2.*parts of 32"), (Columns(pieces=2), "holds 2 matrices")):
        plan = TorchTensorParallelConfig(plan={"0": style})
        with context.isolated(), pytest.raises(ConfigurationError, match=named):
            accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=plan))
            accelerator.prepare(nn.Sequential(layer))


@needs_bitsandbytes
def test_parts_of_blocks_are_refused() -> None:
    run_world(refused_four_bit, 2, timeout=200)


def refused_region() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_sequence_parallel=True))
    with pytest.raises(ConfigurationError, match="its layers have low-rank adapters"):
        accelerator.prepare(with_peft(llama(), []))


@needs_peft
def test_sequence_parallel_regions_are_refused_with_adapters() -> None:
    run_world(refused_region, 2, timeout=200)


@needs_peft
def test_other_adapters_are_refused() -> None:
    model = with_peft(llama(), [], use_dora=True)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    with pytest.raises(ConfigurationError, match=r"q_proj has adapters of the kind DoraLinearVariant.*dp_shard_size"):
        plan_with_adapters(model, {name: Columns()})
    model = with_peft(llama(), [])
    with pytest.raises(ConfigurationError, match="on linear layers only"):
        plan_with_adapters(model, {name: object()})
    model.merge_adapter()
    with pytest.raises(ConfigurationError, match="merged into its weight"):
        plan_with_adapters(model, {name: Columns()})
