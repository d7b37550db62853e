"""TRL's trainers on tiny models, with and without adapters."""

from __future__ import annotations

import os
import this as _zen  # prints the Zen of Python, whose text ships with Python
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import ParallelismConfig
from harness import RANK, WORLD, Cases, clock_of_trainer, endless, files, history, weights
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    PrinterCallback,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
    pack_dataset,
)

cases = Cases()
ZEN = "".join(_zen.d.get(letter, letter) for letter in _zen.s)
LINES = [line for line in ZEN.splitlines() if line.strip()]


def tokenizer() -> Any:
    letters = sorted(set(ZEN + "abcdefghijklmnopqrstuvwxyz ?"))
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *letters])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}"
    return fast


def model(kind: Any = LlamaForCausalLM, loading: dict[str, Any] | None = None, **options: Any) -> Any:
    """A model that was loaded from a folder: trainers load their reference model from the same one.

    Args:
        kind: its class.
        loading: arguments of ``from_pretrained``.
        options: of its configuration.
    """
    torch.manual_seed(1)
    made = kind(
        LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            **options,
        )
    )  # fmt: skip
    folder = Path(os.environ["CASES_FOLDER"]) / f"model-{RANK}-{kind.__name__}"
    made.config.architectures = [kind.__name__]
    made.config.save_pretrained(folder)  # save_pretrained of the model writes on rank 0 only
    save_file(made.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return kind.from_pretrained(folder, **(loading or {}))


TEXTS = [{"text": line} for line in LINES]
PAIRS = [{"prompt": line[:12], "chosen": line[12:], "rejected": LINES[-1 - i][5:]} for i, line in enumerate(LINES[:16])]
PROMPTS = [{"prompt": line[:10]} for line in LINES[:16]]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def trained(
    folder: Path, trainer: Any, config: Any, data: list[dict[str, str]], options: dict[str, Any], **more: Any
) -> dict[str, Any]:
    given = {
        "per_device_train_batch_size": 4 // WORLD, "num_train_epochs": 2, "learning_rate": 5e-3, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 3,
        "use_cpu": True, "ddp_timeout": 60,
        "bf16": False, **options, **endless(),
    }  # fmt: skip
    made = trainer(
        args=config(output_dir=str(folder / "out"), **given),
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer(),
        **{"model": model(), **more},
    )
    made.remove_callback(PrinterCallback)
    made.add_callback(clock_of_trainer())
    output = made.train()
    state = made.accelerator.get_state_dict(made.model_wrapped)
    return {
        "loss": output.training_loss,
        "log": history(made),
        "weights": weights(state),
        "files": files(folder / "out") if (folder / "out").exists() else [],
    }


def add(
    name: str,
    trainer: Any,
    config: Any,
    data: Any,
    worlds: tuple[int, ...] = (1, 2),
    more: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    cases.add(
        name,
        lambda folder: trained(
            folder, trainer, config, data, options, **{k: v() if callable(v) else v for k, v in (more or {}).items()}
        ),
        worlds,
    )


FSDP = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    "gradient_checkpointing": False,
}
FSDP1 = {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "version": 1}}
add("sft", SFTTrainer, SFTConfig, TEXTS)
add("sft_packing", SFTTrainer, SFTConfig, TEXTS, packing=True, max_length=64, packing_strategy="wrapped")
add("sft_accumulation", SFTTrainer, SFTConfig, TEXTS, gradient_accumulation_steps=2)
add("sft_save", SFTTrainer, SFTConfig, TEXTS, save_strategy="epoch")
add("sft_lora", SFTTrainer, SFTConfig, TEXTS, more={"peft_config": LORA}, save_strategy="epoch")
add("sft_chunked", SFTTrainer, SFTConfig, TEXTS, loss_type="dft")
add("sft_bf16", SFTTrainer, SFTConfig, TEXTS, bf16=True)
add(
    "sft_eval",
    SFTTrainer,
    SFTConfig,
    TEXTS,
    more={"eval_dataset": lambda: datasets.Dataset.from_list(TEXTS[:7])},
    eval_strategy="epoch",
    per_device_eval_batch_size=2,
)
add("sft_fsdp2", SFTTrainer, SFTConfig, TEXTS, worlds=(2,), **FSDP)
add("sft_fsdp1", SFTTrainer, SFTConfig, TEXTS, worlds=(2,), **FSDP1)
add(
    "sft_fsdp2_lora",
    SFTTrainer,
    SFTConfig,
    TEXTS,
    worlds=(2,),
    more={"peft_config": LORA},
    save_strategy="epoch",
    **FSDP,
)


# Ranks that share each batch: the numbers are those of one process.
def shared(folder: Path, data: list[dict[str, Any]], axis: str = "", **options: Any) -> dict[str, Any]:
    mesh = {"parallelism_config": ParallelismConfig(**{f"{axis}_size": WORLD})} if WORLD > 1 else {}
    given = {"per_device_train_batch_size": 4, "pad_to_multiple_of": 4, **mesh, **options}
    return trained(folder, SFTTrainer, SFTConfig, data, given)


def documents() -> list[dict[str, Any]]:
    """Lines of text that TRL has packed into sequences of 64 tokens."""
    letters = tokenizer()
    rows = [letters(f"{line}</s>").input_ids for line in LINES]
    packed = pack_dataset(datasets.Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in rows]), 64, "bfd")
    return packed.to_list()


def qlora(folder: Path) -> dict[str, Any]:
    """Adapters on a model in 4 bits, which two ranks shard. TRL keeps the adapters in bfloat16."""
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    options = {"save_strategy": "epoch", "save_only_model": True, **(FSDP if WORLD > 1 else {})}
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    base = model(loading={"quantization_config": quantized})
    found = trained(folder, SFTTrainer, SFTConfig, TEXTS, options, model=base, peft_config=lora)
    if WORLD > 1 and not any(isinstance(item, DTensor) and item.dtype == torch.uint8 for item in base.parameters()):
        raise RuntimeError("the weights in 4 bits are not sharded")
    saved = sorted((folder / "out").glob("checkpoint-*/adapter_model.safetensors"))
    adapters = load_file(saved[-1]) if RANK == 0 and saved else {}
    found["adapters"] = {name: list(value.shape) for name, value in adapters.items()}
    return found


# Not `packing=True`: TRL refuses it with cp, whatever computes attention.
cases.add("sft_cp", lambda folder: shared(folder, TEXTS, "cp"))
cases.add("sft_padding_free_cp", lambda folder: shared(folder, TEXTS, "cp", padding_free=True, max_length=None))
cases.add("sft_packed_cp", lambda folder: shared(folder, documents(), "cp", padding_free=True, max_length=None))
cases.add("sft_packing_cp", lambda folder: shared(folder, TEXTS, "cp", packing=True, max_length=64), worlds=(2,))
cases.add("sft_qlora", qlora)
add("dpo", DPOTrainer, DPOConfig, PAIRS)
add("dpo_accumulation", DPOTrainer, DPOConfig, PAIRS, gradient_accumulation_steps=2)
# On two processes TRL waits forever here, with the reference, too.
add("dpo_precomputed", DPOTrainer, DPOConfig, PAIRS, worlds=(1,), precompute_ref_log_probs=True)
add(
    "dpo_reference",
    DPOTrainer,
    DPOConfig,
    PAIRS,
    more={"ref_model": model},
    sync_ref_model=True,
    ref_model_sync_steps=2,
)
add("dpo_ipo", DPOTrainer, DPOConfig, PAIRS, loss_type=["ipo"])
add("dpo_lora", DPOTrainer, DPOConfig, PAIRS, more={"peft_config": LORA}, save_strategy="epoch")
add(
    "dpo_eval",
    DPOTrainer,
    DPOConfig,
    PAIRS,
    more={"eval_dataset": lambda: datasets.Dataset.from_list(PAIRS[:7])},
    eval_strategy="epoch",
    per_device_eval_batch_size=2,
)
add("dpo_fsdp2", DPOTrainer, DPOConfig, PAIRS, worlds=(2,), **FSDP)
# Not FSDP 1: TRL wraps the reference model with sync_module_states, which torch refuses on CPUs.
add(
    "reward",
    RewardTrainer,
    RewardConfig,
    PAIRS,
    more={"model": lambda: model(LlamaForSequenceClassification, num_labels=1)},
)
add(
    "reward_lora",
    RewardTrainer,
    RewardConfig,
    PAIRS,
    more={
        "model": lambda: model(LlamaForSequenceClassification, num_labels=1),
        "peft_config": LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS"),
    },
)


def vowels(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in completions]


add(
    "grpo",
    GRPOTrainer,
    GRPOConfig,
    PROMPTS,
    more={"reward_funcs": lambda: vowels},
    num_generations=4,
    max_completion_length=12,
    num_train_epochs=1,
    per_device_train_batch_size=4,
)
add(
    "grpo_reference",
    GRPOTrainer,
    GRPOConfig,
    PROMPTS,
    more={"reward_funcs": lambda: vowels},
    num_generations=4,
    max_completion_length=12,
    num_train_epochs=1,
    per_device_train_batch_size=4,
    beta=0.1,
    num_iterations=2,
)
