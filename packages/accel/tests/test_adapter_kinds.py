"""Kinds of LoRA of PEFT, also on 4-bit weights, on several ranks, against one process with the same weights."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from fine_tuning import quantized
from torch import nn

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.config import ParallelismConfig
from accel.parallel.tp_adapters import has_adapters
from accel.parallel.tp_layers import Columns, VocabularyRows
from accel.parallel.tp_plan import plan_of
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="4-bit weights are bitsandbytes'"),
    pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is in the clients' environment"),
    pytest.mark.timeout(900),
]

STEPS, SAVED_AT, WINDOW, BATCH, LENGTH, VOCABULARY, WIDTH = 6, 3, 2, 4, 16, 64, 128
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "copies": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "biases": {"bias": "lora_only"},
    "tokens": {"trainable_token_indices": [1, 40]},
}
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2},
    "dp_shard x tp": {"dp_shard_size": 2, "tp_size": 2},
}


def model_of(kind: str) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    name, *more = kind.split()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": LENGTH, "tie_word_embeddings": "tied" in more}
    sizes |= dict.fromkeys(("attention_bias", "mlp_bias"), name == "biases")
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None))
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    if "4bit" in more:
        for path, layer in list(model.model.layers.named_modules()):
            if isinstance(layer, nn.Linear):
                parent, _, child = path.rpartition(".")
                packed: Any = quantized(layer, "uint8")
                packed.bias = layer.bias
                setattr(model.model.layers.get_submodule(parent), child, packed)
        model.is_loaded_in_4bit = True  # as from_pretrained sets it; PEFT asks for it
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, **KINDS[name]))
    generator = torch.Generator().manual_seed(1)  # the layers of bitsandbytes have drawn random numbers
    for path, parameter in sorted(model.named_parameters()):
        if "lora_A" in path or "lora_B" in path:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 10
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=3e-3, eps=1e-2)


def tokens_of(number: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))


def plain(kind: str) -> tuple[list[float], Any]:
    """Losses of all micro batches, and the gradient norm of each step; and the trained model."""
    model = model_of(kind)
    optimizer = optimizer_of(model)
    figures = []
    for number in range(STEPS * WINDOW):
        loss = model(input_ids=tokens_of(number), labels=tokens_of(number)).loss
        (loss / WINDOW).backward()
        figures.append(loss.item())
        if (number + 1) % WINDOW == 0:
            figures.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return figures, model


def start(kind: str, strategy: str) -> tuple[Accelerator, Any, Any]:
    settings: dict[str, Any] = {}
    if strategy in ("fsdp2", "dp_shard x tp"):
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", activation_checkpointing=True
        )
    if strategy in SIZES:
        settings["parallelism_config"] = ParallelismConfig(**SIZES[strategy])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW, **settings)
    model = model_of(kind)
    return accelerator, *accelerator.prepare(model, optimizer_of(model))


def steps(accelerator: Accelerator, model: Any, optimizer: Any, begin: int, end: int) -> list[float]:
    figures = []
    ranks = accelerator.strategy.data_collectives
    for number in range(begin * WINDOW, end * WINDOW):
        own = tokens_of(number).chunk(ranks.world_size)[ranks.rank]
        with accelerator.accumulate(model):
            loss = model(input_ids=own, labels=own).loss
            accelerator.backward(loss)
            figures.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                figures.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return figures


def resume(kind: str, strategy: str, folder: str) -> list[float]:
    accelerator, model, optimizer = start(kind, strategy)
    for item in model.parameters():
        if item.requires_grad:
            item.data.zero_()
    accelerator.load_state(f"{folder}/state")
    return steps(accelerator, model, optimizer, SAVED_AT, STEPS)


def train(kind: str, strategy: str, folder: str) -> dict[str, Any]:
    """The figures of a run that saves a state and the adapter, those of a resumed one, and bytes of 4-bit weights."""
    with context.isolated():
        accelerator, model, optimizer = start(kind, strategy)
        figures = steps(accelerator, model, optimizer, 0, SAVED_AT)
        accelerator.save_state(f"{folder}/state")
        figures += steps(accelerator, model, optimizer, SAVED_AT, STEPS)
        trained = accelerator.get_state_dict(model, trainable_only=True)
        names = [name for name, _ in model.named_modules()]
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(f"{folder}/adapter", state_dict=trained)
        packed = [item for item in model.parameters() if item.dtype == torch.uint8]
        held = sum(getattr(item, "_local_tensor", item).nbytes for item in packed)
        assert [name for name, _ in model.named_modules()] == names  # saving has put the checkpoints back
        accelerator.free_memory()
    with context.isolated():
        return {"figures": figures, "resumed": resume(kind, strategy, folder), "held": held}


def train_all(cases: list[tuple[str, str]], folder: str) -> list[dict[str, Any]]:
    return [train(kind, strategy, f"{folder}/{kind} {strategy}") for kind, strategy in cases]


def check(cases: list[tuple[str, str]], world: int, folder: Path) -> None:
    from peft import PeftModel

    found = run_world(train_all, world, cases, str(folder), timeout=800)
    for number, (kind, strategy) in enumerate(cases):
        expected, model = plain(kind)
        same = partial(torch.testing.assert_close, rtol=5e-6, atol=0, msg=partial("{} {}: {}".format, kind, strategy))
        for rank in found:
            same(rank[number]["figures"], expected)
            same(rank[number]["resumed"], expected[SAVED_AT * (WINDOW + 1) :])
            whole = sum(item.nbytes for item in model.parameters() if item.dtype == torch.uint8)
            assert rank[number]["held"] == whole // (1 if strategy == "ddp" else world)
        # The saved adapter, on the base in one process, has the weights and the outputs of the model trained there.
        loaded = PeftModel.from_pretrained(
            model_of(kind).unload(), folder / f"{kind} {strategy}" / "adapter", is_trainable=True
        )
        trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
        weights = {name: item for name, item in loaded.named_parameters() if item.requires_grad}
        assert weights.keys() == trained.keys(), kind
        for name, item in trained.items():
            torch.testing.assert_close(weights[name], item, rtol=0, atol=1e-6)
        with torch.no_grad():  # in training mode: bitsandbytes rounds inputs to bfloat16 when it evaluates on a CPU
            outputs = [one.train()(input_ids=tokens_of(99)).logits for one in (loaded, model)]
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


def test_adapters_train_resume_and_are_saved_as_in_one_process(tmp_path: Path) -> None:
    check([("copies 4bit", "fsdp2"), ("copies tied", "tp"), ("biases 4bit", "tp")], 2, tmp_path)


@pytest.mark.slow  # 17 trainings, each with a resumed one; the test above has three of two ranks
def test_all_kinds_of_adapters_on_two_ranks(tmp_path: Path) -> None:
    kinds = ("lora 4bit", "rslora", "dora", "dora 4bit", "copies", "biases 4bit", "tokens")
    cases = [(kind, strategy) for kind in kinds for strategy in ("ddp", "fsdp2")]
    check([*cases, ("lora 4bit", "tp"), ("rslora", "tp"), ("copies 4bit", "tp")], 2, tmp_path)


@pytest.mark.slow  # four ranks; the tests above have two
def test_adapters_on_four_ranks(tmp_path: Path) -> None:
    cases = [("copies 4bit", "fsdp2"), ("lora", "dp_shard x tp"), ("copies 4bit", "dp_shard x tp")]
    check(cases, 4, tmp_path)
    expected = plain("copies 4bit")[0][SAVED_AT * (WINDOW + 1) :]
    for _, strategy in cases[::2]:
        folder = tmp_path / f"copies 4bit {strategy}"
        (alone,) = run_world(resume, 1, "copies 4bit", "one process", str(folder), timeout=200)
        torch.testing.assert_close(alone, expected, rtol=5e-6, atol=0)


def test_copies_are_planned_like_the_layer_that_they_replace() -> None:
    model = model_of("copies tied")
    plan, _ = plan_of(model, None, 2)
    for layer, style in (("lm_head", Columns), ("model.embed_tokens", VocabularyRows)):
        for name in ("original_module", "modules_to_save.default"):
            assert isinstance(plan[f"base_model.model.{layer}.{name}"], style)
    # What is refused with adapters (other axes, regions along the sequence) is refused with copies alone.
    assert has_adapters(["lm_head.modules_to_save.default"])
    assert not has_adapters(["lm_head"])


def refused() -> None:
    for kind, named in (("dora", "DoraLinearVariant.*dp_shard_size"), ("tokens", "does not support a TrainableTokens")):
        with context.isolated(), pytest.raises(ConfigurationError, match=named):
            start(kind, "tp")


def test_what_tensor_parallelism_refuses() -> None:
    run_world(refused, 2, timeout=200)
