"""Programs that tune and evaluate language models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import support
import torch
from harness import RANK, Cases, weights
from torch import nn

cases = Cases()


@cases((1, 2))
def tunepac(folder: Path) -> Any:
    """`run_training` of a configuration: LoRA on a Llama by TRL, with an evaluation; losses, weights, files"""
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM
    from tunepac.config.schema import TunepacConfig
    from tunepac.training.trainer import run_training

    path = support.saved(folder, LlamaForCausalLM(support.llama_config()))
    rows = [{"text": text} for text in support.SENTENCES[:24]]
    (folder / f"rows-{RANK}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    os.environ["ACCELERATE_USE_CPU"] = "true"  # as `accelerate launch --cpu` sets it
    config = TunepacConfig.model_validate(
        {
            "base_model": {"name": path},
            "dataset": {
                "path": str(folder / f"rows-{RANK}.jsonl"),
                "format": "completion",
                "chat_template": None,
                "validation_split": 0.2,
            },
            "training": {
                "output_dir": str(folder / "output"),
                "max_steps": 4,
                "batch_size": 2,
                "gradient_accumulation_steps": 2,
                "max_seq_length": 64,
                "packing": False,
                "logging_steps": 1,
                "save_steps": 4,
                "eval_steps": 2,
                "optimizer": "adamw_torch",
                "report_to": "none",
            },
            "peft": {"adapter": "lora", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
            "hardware": {"bf16": False, "fp16": False, "gradient_checkpointing": False},
        }
    )
    target = run_training(config)
    state = json.loads((target / "checkpoint-4" / "trainer_state.json").read_text())
    kept = [{key: entry[key] for key in entry if "loss" in key or "norm" in key} for entry in state["log_history"]]
    saved = load_file(target / "adapter_model.safetensors")
    return {"history": kept, "weights": weights(saved), "files": sorted(support.file_digests(target))}


@cases((1,))
def lm_polygraph(folder: Path) -> Any:
    """`estimate_uncertainty` of a Llama that is loaded with `device_map`, by three estimators"""
    from lm_polygraph import WhiteboxModel, estimate_uncertainty
    from lm_polygraph.estimators import MaximumSequenceProbability, MeanTokenEntropy, Perplexity
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    path = support.saved(folder, LlamaForCausalLM(support.llama_config()))
    loaded = AutoModelForCausalLM.from_pretrained(path, device_map="auto", attn_implementation="eager")
    model = WhiteboxModel(loaded, support.tokenizer(), path)
    result = {}
    for estimator in (MaximumSequenceProbability(), MeanTokenEntropy(), Perplexity()):
        found = [estimate_uncertainty(model, estimator, text) for text in support.SENTENCES[:2]]
        result[str(estimator)] = [[one.uncertainty, one.generation_text] for one in found]
    return result


@cases((1, 2))
def lora_easy(folder: Path) -> Any:
    """`LoraModel.train` of a Llama, loaded with `device_map`, on conversations: losses, the adapter, a chat"""
    from lora_ez import LoraModel
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant\n"
    path = support.saved(folder, LlamaForCausalLM(support.llama_config()), chat_template=template)
    model = LoraModel(path, device="cpu", save_path=str(folder / f"adapter-{RANK}"))
    rows = [
        {"messages": [{"role": "user", "content": text[:16]}, {"role": "assistant", "content": text[16:40]}]}
        for text in support.SENTENCES[:16]
    ]
    output = folder / "output"
    more = {"logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "output_dir": str(output)}
    model.train(rows, save_checkpoints=True, max_length=64, epochs=2, lr=1e-3, **more)
    model.save()
    state = json.loads(next(output.glob("checkpoint-*/trainer_state.json")).read_text())
    return {
        "losses": [entry["loss"] for entry in state["log_history"] if "loss" in entry],
        "adapter": weights(load_file(folder / f"adapter-{RANK}" / "adapter_model.safetensors")),
        "files": sorted(support.file_digests(output)),
        "answer": model.chat("a", max_tokens=8),
    }


@cases((1,))
def sae_lens(folder: Path) -> Any:
    """`LanguageModelSAETrainingRunner`: an autoencoder of a Llama's layer, loaded with `device_map`: weights"""
    from datasets import Dataset
    from sae_lens import (
        LanguageModelSAERunnerConfig,
        LanguageModelSAETrainingRunner,
        LoggingConfig,
        StandardTrainingSAEConfig,
    )
    from transformers import LlamaForCausalLM

    path = support.saved(folder, LlamaForCausalLM(support.llama_config()))
    rows = Dataset.from_dict({"text": support.SENTENCES * 4})
    config = LanguageModelSAERunnerConfig(
        sae=StandardTrainingSAEConfig(d_in=32, d_sae=48, l1_coefficient=1.0),
        model_name=path,
        model_class_name="AutoModelForCausalLM",
        model_from_pretrained_kwargs={"device_map": "auto"},
        hook_name="model.layers.0",
        dataset_path="",
        is_dataset_tokenized=False,
        streaming=False,
        context_size=16,
        n_batches_in_buffer=4,
        store_batch_size_prompts=4,
        train_batch_size_tokens=64,
        training_tokens=512,
        n_eval_batches=1,
        logger=LoggingConfig(log_to_wandb=False),
        checkpoint_path=None,
        output_path=None,
        verbose=False,
    )
    return weights(LanguageModelSAETrainingRunner(config, override_dataset=rows).run().state_dict())


@cases((1,))
def unitxt(folder: Path) -> Any:
    """`HFAutoModelInferenceEngine` with a Llama, loaded with `device_map`: texts and the chances of their tokens"""
    from transformers import LlamaForCausalLM
    from unitxt.inference import HFAutoModelInferenceEngine

    path = support.saved(folder, LlamaForCausalLM(support.llama_config()))
    engine = HFAutoModelInferenceEngine(model_name=path, max_new_tokens=6, use_fp16=False, batch_size=2)
    rows = [{"source": text, "task_data": "{}"} for text in support.SENTENCES[:3]]
    return {"texts": engine.infer(rows), "chances": engine.infer_log_probs(rows)}


@cases((1, 2))
def torchdistill(folder: Path) -> Any:
    """`DistillationBox`: a teacher and a student of digits that both learn, with accumulation: losses and weights"""
    from accelerate import Accelerator
    from torchdistill.core.distillation import get_distillation_box

    images, labels = support.digits(48)
    rows = [(image.flatten(), label) for image, label in zip(images, labels, strict=True)]
    paths = {
        f"{who}_module_{what}": value
        for who in ("teacher", "student")
        for what, value in (("path", "."), ("io", "output"))
    }
    loss = {"key": "KDLoss", "kwargs": {**paths, "temperature": 2.0, "alpha": 0.5, "reduction": "batchmean"}}
    config = {
        "num_epochs": 2,
        "train_data_loader": {
            "dataset_id": "digits",
            "sampler": {"class_or_func": torch.utils.data.SequentialSampler},
            "kwargs": {"batch_size": 4},
        },
        "teacher": {"forward_proc": "forward_batch_only"},
        "student": {"forward_proc": "forward_batch_only"},
        "optimizer": {"key": "AdamW", "kwargs": {"lr": 1e-2}, "grad_accum_step": 2, "max_grad_norm": 1.0},
        "criterion": {"key": "WeightedSumLoss", "kwargs": {"sub_terms": {"kd": {"criterion": loss, "weight": 1.0}}}},
    }
    accelerator = Accelerator(cpu=True)
    teacher = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    student = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    # `distributed` is about its own samplers, which the Accelerator's loaders replace.
    box = get_distillation_box(
        teacher,
        student,
        {"digits": rows},
        config,
        accelerator.device,
        None,
        False,
        1.0,
        accelerator,
    )
    losses = []
    for epoch in range(box.num_epochs):
        box.pre_epoch_process(epoch=epoch)
        for batch, targets, more in box.train_data_loader:
            box.pre_forward_process()
            found = box.forward_process(batch, targets, more)
            box.post_forward_process(loss=found)
            losses.append(found.item())
        box.post_epoch_process()
    return {"losses": losses, "teacher": weights(teacher.state_dict()), "student": weights(student.state_dict())}
