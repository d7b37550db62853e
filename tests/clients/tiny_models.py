"""Models of a few thousand weights, made from configurations, and what the cases do with them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import accelerate
import torch
from harness import RANK, timed
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

TOKENS = torch.arange(40).view(2, 20) * 3 % 120 + 3


def llama(tied: bool = False) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2)
    )


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=128,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
        )
    )


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip


MODELS = {"llama": llama, "llama_tied": lambda: llama(True), "gpt2": gpt2, "t5": t5, "mixtral": mixtral}


def saved(folder: Path, name: str, shard: str = "150KB") -> Path:
    torch.manual_seed(0)
    target = folder / name
    if RANK == 0 and not target.exists():
        part = folder / f"{name}.part"  # the other ranks must not see a directory that is half full
        MODELS[name]().save_pretrained(part, max_shard_size=shard)
        part.rename(target)
    while not target.exists():
        time.sleep(0.05)
    return target


def load(path: Path, **options: Any) -> Any:
    kind = AutoModelForSeq2SeqLM if path.name == "t5" else AutoModelForCausalLM
    return kind.from_pretrained(path, **options).eval()


@torch.no_grad()
def used(model: Any) -> dict[str, Any]:
    """Logits and a generated sequence."""
    more = {"decoder_input_ids": TOKENS[:, :5]} if model.config.model_type == "t5" else {}
    logits = timed(lambda: model(input_ids=TOKENS, **more).logits)
    generated = model.generate(input_ids=TOKENS, max_new_tokens=6, do_sample=False)
    return {"logits": logits, "generated": generated.tolist()}


def facts(model: Any) -> dict[str, Any]:
    return {
        "map": {k: str(v) for k, v in getattr(model, "hf_device_map", {}).items()},
        "meta": sorted(name for name, p in model.named_parameters() if p.is_meta),
        "hooks": sorted(name for name, m in model.named_modules() if hasattr(m, "_hf_hook")),
    }


def spread(path: Path) -> dict[str, str]:
    """A map with the embeddings in memory and every other layer on the disk."""
    with accelerate.init_empty_weights():
        model = MODELS[path.name]()
    names = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in names)
        if (not inside and not list(module.children())) or type(module).__name__ in (model._no_split_modules or ()):
            names.append(name)
    tied = {name.rpartition(".")[0] for pair in (model.all_tied_weights_keys or {}).items() for name in pair}
    return {name: "disk" if index % 2 and name not in tied else "cpu" for index, name in enumerate(names)}
