"""Transformers' Trainer."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from harness import WORLD, Cases, clock_of_trainer, endless, files, history, weights
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

TEXT = torch.tensor(list(pydoc_data.topics.topics["assignment"].encode("ascii", "replace")[:6000]))
LENGTH = 32
cases = Cases()


class Blocks(Dataset):
    """Blocks of text as token ids."""

    def __init__(self, count: int = 38, start: int = 0, lengths: bool = False) -> None:
        self.rows = []
        for index in range(count):
            length = 8 + (index * 7) % 25 if lengths else LENGTH
            ids = TEXT[start + index * LENGTH : start + index * LENGTH + length]
            self.rows.append({"input_ids": ids, "labels": ids})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class Stream(IterableDataset):
    """The same blocks, one after the other."""

    def __init__(self, count: int = 38) -> None:
        self.blocks = Blocks(count)

    def __iter__(self) -> Any:
        return iter(self.blocks.rows)


def causal_model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def arguments(folder: Path, kind: Any = TrainingArguments, **options: Any) -> TrainingArguments:
    given = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "ddp_timeout": 60,
        "use_cpu": True,
        "seed": 3,
        **options,
        **endless(),
    }
    return kind(output_dir=str(folder / "out"), **given)


def make(folder: Path, train: Any = None, model: Any = None, trainer: Any = Trainer, **options: Any) -> Trainer:
    more = {
        name: options.pop(name)
        for name in ("data_collator", "callbacks", "compute_metrics", "optimizers")
        if name in options
    }
    made = trainer(
        model=causal_model() if model is None else model,
        args=arguments(folder, **options),
        train_dataset=Blocks() if train is None else train,
        eval_dataset=Blocks(11, start=3000),
        **more,
    )
    made.remove_callback(PrinterCallback)
    made.add_callback(clock_of_trainer())
    return made


def full_state(trainer: Trainer) -> dict[str, Any]:
    return trainer.accelerator.get_state_dict(trainer.model_wrapped)


def trained(folder: Path, *args: Any, **options: Any) -> dict[str, Any]:
    """Train, and give everything that was logged, and the weights."""
    trainer = make(folder, *args, **options)
    output = trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    return {
        "loss": output.training_loss,
        "steps": trainer.state.global_step,
        "log": history(trainer),
        "weights": weights(model.state_dict()),
        "files": files(folder / "out") if (folder / "out").exists() else [],
        "tokens": trainer.state.num_input_tokens_seen,
    }


def on_mesh(folder: Path, axis: str, predicts: bool = False) -> dict[str, Any]:
    """Trained and evaluated by ranks that share each batch, or by one process; samples are padded."""

    def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = pad(rows)
        more = -batch["input_ids"].shape[1] % 4  # cp splits sequences into two pieces for each rank
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {name: torch.nn.functional.pad(value, (0, more), value=fill[name]) for name, value in batch.items()}

    config = {"parallelism_config": ParallelismConfig(**{f"{axis}_size": WORLD})} if WORLD > 1 else {}
    trainer = make(folder, Blocks(lengths=True), data_collator=padded, eval_strategy="epoch", **config)
    output = trainer.train()
    found = {"loss": output.training_loss, "log": history(trainer), "weights": weights(full_state(trainer))}
    if predicts:
        found["predictions"] = torch.tensor(trainer.predict(Blocks(11, start=3000)).predictions).double().abs().mean()
    return found


def add(name: str, *args: Any, worlds: tuple[int, ...] = (1, 2), **options: Any) -> None:
    def case(folder: Path) -> Any:
        return trained(
            folder,
            *[value() if isinstance(value, type) else value for value in args],
            **{k: v() if callable(v) and k in ("model", "train") else v for k, v in options.items()},
        )

    cases.add(name, case, worlds)


add("plain")
add("many_steps", max_steps=120, logging_steps=20)
add("accumulation", gradient_accumulation_steps=3)
add(
    "accumulation_tokens_across",
    gradient_accumulation_steps=3,
    data_collator=pad,
    train=lambda: Blocks(lengths=True),
    average_tokens_across_devices=True,
)
add(
    "accumulation_tokens_here",
    gradient_accumulation_steps=3,
    data_collator=pad,
    train=lambda: Blocks(lengths=True),
    average_tokens_across_devices=False,
)
add("label_smoothing", label_smoothing_factor=0.1)
add("iterable", train=Stream, max_steps=9)
add("iterable_epochs", train=Stream, num_train_epochs=2, max_steps=14)
add("iterable_no_dispatch", train=Stream, max_steps=9, accelerator_config={"dispatch_batches": False})
add("iterable_split", train=Stream, max_steps=9, accelerator_config={"dispatch_batches": True, "split_batches": True})
add(
    "iterable_split_shard",
    train=Stream,
    max_steps=9,
    accelerator_config={"dispatch_batches": False, "split_batches": True},
)
add("dispatch", accelerator_config={"dispatch_batches": True})
add("split_batches", accelerator_config={"split_batches": True})
add("uneven", accelerator_config={"even_batches": False})
add("no_seedable_sampler", accelerator_config={"use_seedable_sampler": False})
add("no_seedable_sampler_three_epochs", num_train_epochs=3, accelerator_config={"use_seedable_sampler": False})
add("data_seed", data_seed=11)
add("non_blocking", accelerator_config={"non_blocking": True}, dataloader_pin_memory=False)
add("group_by_length", train_sampling_strategy="group_by_length", train=lambda: Blocks(lengths=True), data_collator=pad)
add("sequential", train_sampling_strategy="sequential")
add("batch_rebalance", train_sampling_strategy="batch_rebalance", train=lambda: Blocks(lengths=True), data_collator=pad)
add("workers", dataloader_num_workers=2, num_train_epochs=1)
add("persistent_workers", dataloader_num_workers=1, dataloader_persistent_workers=True)
add("drop_last", dataloader_drop_last=True)
add("bf16", bf16=True)
add("no_clipping", max_grad_norm=0)
add("sgd_cosine", optim="sgd", lr_scheduler_type="cosine", warmup_steps=3)
add("adafactor", optim="adafactor")
add("plateau", lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch", metric_for_best_model="loss")
add("restarts", lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2})
add("gradient_checkpointing", gradient_checkpointing=True)
add("neftune", neftune_noise_alpha=5.0)
add("input_tokens", include_num_input_tokens_seen="all")
add("eval_steps", eval_strategy="steps", eval_steps=3)
add("eval_on_start", eval_strategy="epoch", eval_on_start=True, eval_accumulation_steps=2)
add(
    "eval_gather_object",
    eval_strategy="epoch",
    eval_use_gather_object=True,
    compute_metrics=lambda p: {"rows": float(len(p.label_ids))},
)
add("best_model", eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4, load_best_model_at_end=True)
add("save", save_strategy="steps", save_steps=3)
add("save_only_model", save_strategy="epoch", save_only_model=True)
add("fractional_epochs", num_train_epochs=1.5)
add("full_determinism", full_determinism=True)
add("nan_filter_off", logging_nan_inf_filter=False, logging_steps=4)
add("torch_compile", torch_compile=True, torch_compile_backend="eager", num_train_epochs=1)
add(
    "stateful_like",
    accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    gradient_accumulation_steps=2,
)
add("auto_find", auto_find_batch_size=True)
add("ddp_options", ddp_find_unused_parameters=True, ddp_bucket_cap_mb=5, ddp_broadcast_buffers=True)


class OutOfMemory(TrainerCallback):
    """The first attempts run out of memory, as on a GPU."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.train_batch_size > self.batch:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


add("auto_find_reduces", auto_find_batch_size=True, per_device_train_batch_size=16, callbacks=[OutOfMemory(13)])


def _resumed(interrupt: int, **options: Any) -> Any:
    def case(folder: Path) -> Any:
        set_seed(5)
        first = make(
            folder,
            save_strategy="steps",
            save_steps=interrupt,
            max_steps=interrupt + 3,
            **{k: v() if callable(v) and k == "train" else v for k, v in options.items()},
        )
        first.train()
        whole = weights(full_state(first))
        torch.manual_seed(99)
        again = make(
            folder,
            save_strategy="no",
            max_steps=interrupt + 3,
            **{k: v() if callable(v) and k == "train" else v for k, v in options.items()},
        )
        again.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{interrupt}"))
        return {
            "log": history(again),
            "whole": whole,
            "resumed": weights(full_state(again)),
            "files": files(folder / "out"),
        }

    return case


cases.add("resume_middle", _resumed(3))
cases.add("resume_second_epoch", _resumed(7))
cases.add("resume_epoch_end", _resumed(10 // WORLD))
cases.add("resume_accumulation", _resumed(2, gradient_accumulation_steps=2))
cases.add("resume_iterable", _resumed(3, train=Stream))
cases.add("resume_no_seedable", _resumed(3, accelerator_config={"use_seedable_sampler": False}))
cases.add("resume_no_seedable_second_epoch", _resumed(7, accelerator_config={"use_seedable_sampler": False}))
cases.add("resume_no_skip", _resumed(3, ignore_data_skip=True))
cases.add("resume_dispatch", _resumed(3, accelerator_config={"dispatch_batches": True}))
cases.add("resume_split", _resumed(3, accelerator_config={"split_batches": True}))
cases.add("resume_bf16", _resumed(3, bf16=True))


def _datasets_iterable(count: int = 38, shards: int = 2) -> Any:
    import datasets

    rows = [{"input_ids": row["input_ids"].tolist(), "labels": row["labels"].tolist()} for row in Blocks(count).rows]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=shards).with_format("torch")


add("datasets_iterable", train=_datasets_iterable, max_steps=9)
add(
    "datasets_iterable_no_dispatch",
    train=_datasets_iterable,
    max_steps=9,
    accelerator_config={"dispatch_batches": False},
)
add("datasets_iterable_shuffled", train=lambda: _datasets_iterable().shuffle(seed=2, buffer_size=10), max_steps=14)
cases.add("resume_datasets_iterable", _resumed(3, train=_datasets_iterable))


def rows_metric(prediction: Any) -> dict[str, float]:
    logits, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    return {"rows": float(len(labels)), "accuracy": (logits.argmax(-1)[:, :-1] == labels[:, 1:]).double().mean().item()}


def _plain_loss(data: Any) -> float:
    """The mean loss over all samples, without a trainer."""
    model, rows = causal_model().eval(), list(data)
    with torch.no_grad():
        losses = [
            model(input_ids=ids[None], labels=ids[None]).loss
            for ids in (torch.as_tensor(row["input_ids"]) for row in rows)
        ]
    return torch.stack(losses).double().mean().item()


def _evaluated(**options: Any) -> Any:
    def case(folder: Path) -> Any:
        data = options.get("data", Blocks(11, start=3000))
        trainer = make(folder, compute_metrics=rows_metric, **{k: v for k, v in options.items() if k != "data"})
        metrics = trainer.evaluate(data)
        prediction = trainer.predict(data)
        plain = {} if options.get("bf16_full_eval") else {"plain": _plain_loss(data)}
        return {
            "evaluate": {k: v for k, v in metrics.items() if "time" not in k and "per_second" not in k},
            "predictions": torch.as_tensor(prediction.predictions),
            "rows": len(prediction.predictions),
            "metrics": {k: v for k, v in prediction.metrics.items() if "time" not in k and "per_second" not in k},
            **plain,
        }

    return case


cases.add("evaluate", _evaluated())
cases.add("evaluate_iterable", _evaluated(data=Stream(11)))
cases.add("evaluate_iterable_no_dispatch", _evaluated(data=Stream(11), accelerator_config={"dispatch_batches": False}))
cases.add(
    "evaluate_iterable_split",
    _evaluated(data=Stream(11), accelerator_config={"dispatch_batches": True, "split_batches": True}),
)
cases.add("evaluate_datasets_iterable", lambda folder: _evaluated(data=_datasets_iterable(11))(folder))
cases.add("evaluate_bf16", _evaluated(bf16_full_eval=True))
cases.add("evaluate_group", _evaluated(train_sampling_strategy="group_by_length"))
cases.add("evaluate_batch_metrics", _evaluated(eval_accumulation_steps=1))


@cases()
def configured_state(folder: Path) -> Any:
    """The Accelerator exists before the Trainer."""
    from accelerate import Accelerator, PartialState

    PartialState(cpu=True)
    Accelerator(cpu=True)
    return trained(folder, accelerator_config={"use_configured_state": True})


@cases()
def classification(folder: Path) -> Any:
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = [
        {"input_ids": torch.tensor(pixels, dtype=torch.long), "labels": int(label)}
        for pixels, label in zip(digits.data[:96], digits.target[:96], strict=True)
    ]
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        num_labels=10,
        max_position_embeddings=64,
    )
    trainer = make(
        folder, train=rows, model=BertForSequenceClassification(config), eval_strategy="no", save_strategy="epoch",
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate(rows[:37])
    saved = AutoModelForSequenceClassification.from_pretrained(sorted((folder / "out").glob("checkpoint-*"))[-1])
    return {
        "log": history(trainer),
        "accuracy": metrics["eval_accuracy"],
        "loss": metrics["eval_loss"],
        "weights": weights(saved.state_dict()),
    }


class Pairs(Dataset):
    """Text, and the same text backwards, for models with an encoder and a decoder."""

    def __init__(self, count: int = 22) -> None:
        self.rows = []
        for index in range(count):
            ids = TEXT[index * 16 : index * 16 + 8 + index % 9]
            self.rows.append({"input_ids": ids, "labels": ids.flip(0)})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def translator() -> Any:
    torch.manual_seed(1)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=128, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0,
            pad_token_id=0, eos_token_id=2,
        )
    )  # fmt: skip


def pad_shifted(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """With the decoder's input, which a model cannot make when the trainer smooths the labels itself."""
    batch = pad(rows)
    shifted = batch["labels"].roll(1, 1).clamp(min=0)
    shifted[:, 0] = 0
    return {**batch, "decoder_input_ids": shifted}


def _sequences(data_collator: Any = pad, **options: Any) -> Any:
    def case(folder: Path) -> Any:
        given = arguments(folder, kind=Seq2SeqTrainingArguments, predict_with_generate=True, **options)
        trainer = Seq2SeqTrainer(
            model=translator(), args=given, train_dataset=Pairs(), eval_dataset=Pairs(7), data_collator=data_collator,
            compute_metrics=lambda p: {"tokens": float(len(p.predictions)), "sum": float(p.predictions.clip(0).sum())},
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock_of_trainer())
        trainer.train()
        prediction = trainer.predict(Pairs(7), max_new_tokens=9)
        return {
            "log": history(trainer),
            "weights": weights(full_state(trainer)),
            "predictions": torch.as_tensor(prediction.predictions),
            "rows": len(prediction.predictions),
        }

    return case


cases.add("seq2seq", _sequences(eval_strategy="epoch", generation_max_length=12))
cases.add("seq2seq_beams", _sequences(generation_num_beams=2, generation_max_length=8))
cases.add("seq2seq_label_smoothing", _sequences(pad_shifted, label_smoothing_factor=0.1, generation_max_length=8))
cases.add("seq2seq_accumulation", _sequences(gradient_accumulation_steps=2, sortish_sampler=True))


@cases()
def trained_twice(folder: Path) -> Any:
    trainer = make(folder)
    trainer.train()
    trainer.train()
    return {"log": history(trainer), "weights": weights(trainer.model.state_dict())}


@cases()
def two_trainers(folder: Path) -> Any:
    first, second = make(folder), make(folder, learning_rate=1e-3)
    return [{"log": (trainer.train(), history(trainer))[1]} for trainer in (first, second)]


LLAMA = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}


def _fsdp(
    version: int, interrupt: int = 4, model: Any = None, train: dict[str, Any] | None = None, **config: Any
) -> Any:
    def case(folder: Path) -> Any:
        options = {
            "fsdp": True,
            "fsdp_config": {"version": version, **LLAMA, **config},
            "max_steps": interrupt + 3,
            **(train or {}),
        }
        first = make(folder, save_strategy="steps", save_steps=interrupt, **options)
        first.train()
        evaluated = first.evaluate()["eval_loss"]
        state = full_state(first)
        first.save_model(str(folder / "final"))
        torch.manual_seed(99)
        again = make(folder, save_strategy="no", **options)
        again.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{interrupt}"))
        resumed = full_state(again)
        return {
            "log": history(first), "eval": evaluated, "weights": weights(state), "log_resumed": history(again),
            "resumed": weights(resumed), "files": files(folder / "out"), "final": files(folder / "final"),
        }  # fmt: skip

    return case


for _version in (1, 2):
    _name = f"fsdp{_version}"
    cases.add(_name, _fsdp(_version), (2,))
    cases.add(f"{_name}_sharded", _fsdp(_version, state_dict_type="SHARDED_STATE_DICT"), (2,))
    cases.add(f"{_name}_accumulation", _fsdp(_version, train={"gradient_accumulation_steps": 2}), (2,))
    cases.add(f"{_name}_bf16", _fsdp(_version, train={"bf16": True}), (2,))
    cases.add(f"{_name}_size_based", _fsdp(_version, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=2000), (2,))
    cases.add(f"{_name}_no_wrap", _fsdp(_version, auto_wrap_policy="NO_WRAP"), (2,))
    cases.add(f"{_name}_ram_efficient", _fsdp(_version, cpu_ram_efficient_loading=True), (2,))
    cases.add(f"{_name}_checkpointing", _fsdp(_version, activation_checkpointing=True), (2,))
    cases.add(f"{_name}_no_clipping", _fsdp(_version, train={"max_grad_norm": 0}), (2,))
cases.add("fsdp1_shard_grad_op", _fsdp(1, reshard_after_forward="shard_grad_op"), (2,))
cases.add("fsdp2_no_reshard", _fsdp(2, reshard_after_forward=False), (2,))
cases.add("fsdp2_cpu_offload", _fsdp(2, cpu_offload=True), (2,))


cases.add("trainer_tp", lambda folder: on_mesh(folder, "tp", predicts=True))
cases.add("trainer_cp", lambda folder: on_mesh(folder, "cp"))
