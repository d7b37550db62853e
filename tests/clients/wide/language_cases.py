"""Programs for language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import support
import torch
from harness import Cases, history, weights

cases = Cases()


@cases((1,))
def aqlm(folder: Path) -> Any:
    """A Llama of which the layers are AQLM's, saved and loaded with `device_map`; logits"""
    import numba
    from aqlm import QuantizedLinear
    from transformers import AqlmConfig, AutoModelForCausalLM, LlamaForCausalLM

    numba.set_num_threads(1)  # its kernel adds to one place from several threads: the same call gives other numbers

    settings = {"in_group_size": 8, "out_group_size": 1, "num_codebooks": 2, "nbits_per_codebook": 8}
    quantized = AqlmConfig(**settings, linear_weights_not_to_quantize=["lm_head"])
    model = LlamaForCausalLM(support.llama_config())
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            new = QuantizedLinear(layer.in_features, layer.out_features, **settings, bias=False)
            new.codes.data = torch.randint(-128, 128, new.codes.shape, dtype=torch.int8)
            new.codebooks.data.normal_(std=0.05)
            new.scales.data.fill_(1.0)
            model.set_submodule(name, new)
    model.config.quantization_config = quantized
    loaded = AutoModelForCausalLM.from_pretrained(support.saved(folder, model), device_map="auto")
    layers = sum(isinstance(module, QuantizedLinear) for module in loaded.modules())
    return {
        "layers": layers,
        "logits": loaded(torch.arange(5, 21)[None]).logits,
        "weights": weights(loaded.state_dict()),
    }


@cases((1, 2))
def smolagents(folder: Path) -> Any:
    """`PipelineTool` with a BERT, through `PartialState` and `send_to_device`"""
    from smolagents.tools import PipelineTool
    from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

    class Classify(PipelineTool):
        name, description, output_type = "classify", "classifies a text", "number"
        inputs = {"text": {"type": "string", "description": "a text"}}  # noqa: RUF012
        default_checkpoint = support.saved(folder, BertForSequenceClassification(support.bert_config(num_labels=3)))
        pre_processor_class = type(support.tokenizer())
        model_class = AutoModelForSequenceClassification

        def encode(self, text: str) -> Any:
            return self.pre_processor(text, return_tensors="pt", return_token_type_ids=False)

        def decode(self, outputs: Any) -> Any:
            return outputs.logits.softmax(-1).tolist()

        def forward(self, inputs: Any) -> Any:
            return super().forward(inputs)

    tool = Classify()
    return {"answers": [tool(text) for text in support.SENTENCES[:3]], "device": str(tool.device)}


@cases((1,))
def outlines(folder: Path) -> Any:
    """A Llama loaded with `device_map`, generation held to a regular expression and to a choice"""
    import outlines as library
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    path = support.saved(folder, LlamaForCausalLM(support.llama_config()))
    model = library.from_transformers(
        AutoModelForCausalLM.from_pretrained(path, device_map="auto"), support.tokenizer()
    )
    number = library.Generator(model, library.regex("[0-9]{3}-[a-f]{4}"))
    choice = library.Generator(model, library.types.Choice(["yes", "no", "maybe"]))
    texts = support.SENTENCES[:3]
    return {
        "regex": [number(text, max_new_tokens=12, do_sample=True) for text in texts],
        "choice": [choice(text, max_new_tokens=8, do_sample=True) for text in texts],
    }


@cases((1,))
def fschat(folder: Path) -> Any:
    """FastChat's 8-bit loader, which builds the model in `init_empty_weights`; logits and generated tokens"""
    from fastchat.model.compression import load_compress_model
    from transformers import LlamaForCausalLM

    path = support.saved(folder, LlamaForCausalLM(support.llama_config()))
    model, _ = load_compress_model(path, "cpu", torch.float32, use_fast=True)
    ids = torch.arange(5, 21)[None]
    return {"logits": model(ids).logits, "tokens": model.generate(ids, max_new_tokens=6, do_sample=False)}


@cases((1, 2))
def pysentimiento(folder: Path) -> Any:
    """Its analyzer of a BERT: texts go through the `predict` of a Trainer"""
    from pysentimiento.analyzer import AnalyzerForSequenceClassification
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(support.bert_config(num_labels=3))
    analyzer = AnalyzerForSequenceClassification(model, support.tokenizer(), task="sentiment", lang="en")
    return [[found.output, found.probas] for found in analyzer.predict(support.SENTENCES[:11])]


@cases((1,))
def minicons(folder: Path) -> Any:
    """`IncrementalLMScorer` with a Llama, loaded with `device_map`: scores of sentences and of their tokens"""
    from minicons.scorer import IncrementalLMScorer
    from transformers import LlamaForCausalLM

    path = support.saved(folder, LlamaForCausalLM(support.llama_config()))
    model = IncrementalLMScorer(path, "auto")
    return [model.sequence_score(support.SENTENCES[:3]), model.token_score(support.SENTENCES[:1])]


def trainer_arguments(folder: Path, **more: Any) -> Any:
    from transformers import TrainingArguments

    chosen = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        **more,
    }
    return TrainingArguments(str(folder / "output"), **chosen)


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        return self.texts[index]


@cases((1, 2))
def colpali_engine(folder: Path) -> Any:
    """`ContrastiveTrainer` with `BiEncoderLoss` over queries and documents: losses and weights"""
    from colpali_engine.loss import BiEncoderLoss
    from colpali_engine.trainer import contrastive_trainer as program
    from transformers import BertModel

    class Encoder(BertModel):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.nn.functional.normalize(super().forward(*args, **kwargs).last_hidden_state[:, 0], dim=-1)

    words = support.tokenizer()

    def collate(rows: list[str]) -> dict[str, torch.Tensor]:
        parts = {"query_": [row[:20] for row in rows], "doc_": [row[20:80] for row in rows]}
        return {
            prefix + name: value
            for prefix, texts in parts.items()
            for name, value in words(texts, padding=True, return_tensors="pt", return_token_type_ids=False).items()
        }

    for name, prefix in (("query_prefix", "query_"), ("pos_doc_prefix", "doc_"), ("neg_doc_prefix", "neg_doc_")):
        setattr(collate, name, prefix)

    def trained() -> Any:
        torch.manual_seed(0)
        model = Encoder(support.bert_config())
        trainer = program.ContrastiveTrainer(
            loss_func=BiEncoderLoss(),
            is_vision_model=False,
            model=model,
            train_dataset=Texts(support.SENTENCES[:24]),
            eval_dataset=None,
            args=trainer_arguments(folder, remove_unused_columns=False),
            data_collator=collate,
        )
        trainer.train()
        return {"history": history(trainer), "weights": model}

    def gather_with_contiguous_gradients(outputs: torch.Tensor) -> torch.Tensor:
        gathered = gather(outputs)
        gathered.register_hook(lambda gradient: gradient.contiguous())
        return gathered

    result = {"transposed gradients": trained()}
    gather = program.concat_all_gather
    program.concat_all_gather = gather_with_contiguous_gradients
    return {**result, "contiguous gradients": trained()}


@cases((1, 2))
def be_great(folder: Path) -> Any:
    """`GReaT.fit` on a table of numbers with a Llama: losses and weights"""
    import pandas
    from be_great import GReaT
    from sklearn.datasets import load_iris
    from transformers import LlamaForCausalLM

    data = load_iris(as_frame=True).frame.iloc[::6]
    path = support.saved(folder, LlamaForCausalLM(support.llama_config()))
    model = GReaT(
        path, str(folder / "great"), epochs=2, batch_size=4, save_strategy="no", logging_steps=1, use_cpu=True
    )
    trainer = model.fit(pandas.DataFrame(data))
    return {"history": history(trainer), "weights": model.model}


@cases((1, 2))
def dptrainer(folder: Path) -> Any:
    """`DPTrainer`: a classifier with clipped gradients and noise, by Opacus: losses, the privacy spent, weights"""
    from dptrainer import DPTrainer, PrivacyArguments
    from transformers import LlamaForSequenceClassification

    words = support.tokenizer()
    rows = [
        {
            **words(text, padding="max_length", max_length=32, truncation=True, return_token_type_ids=False),
            "labels": index % 3,
        }
        for index, text in enumerate(support.SENTENCES[:24])
    ]
    model = LlamaForSequenceClassification(support.llama_config(num_labels=3))
    privacy = PrivacyArguments(noise_multiplier=0.5, per_sample_max_grad_norm=1.0)
    trainer = DPTrainer(model=model, args=trainer_arguments(folder), train_dataset=rows, privacy_args=privacy)
    trainer.train()
    return {"history": history(trainer), "weights": model}


@cases((1,))
def nvidia_modelopt(folder: Path) -> Any:
    """`mtq.quantize` to int8 of a Llama in memory, and with a layer on the disk: logits, scales"""
    import modelopt.torch.quantization as mtq
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    path = support.saved(folder, LlamaForCausalLM(support.llama_config()))
    where = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "disk",
        "model.layers.1": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    result = {}
    for name, placed in (("memory", {"": "cpu"}), ("disk", where)):
        model = AutoModelForCausalLM.from_pretrained(path, device_map=placed, offload_folder=str(folder / "disk"))
        ids = torch.arange(5, 37).view(2, 16)
        model = mtq.quantize(model, mtq.INT8_DEFAULT_CFG, lambda model, ids=ids: model(ids))
        scales = {key: value for key, value in model.state_dict().items() if "amax" in key}
        result[name] = {"logits": model(ids).logits, "scales": weights(scales)}
    return result


@cases((1,))
def auto_round(folder: Path) -> Any:
    """`AutoRound` to 4 bits of a Llama on the CPU, tuned for five steps per block: the quantized weights"""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    path = support.saved(folder, LlamaForCausalLM(support.llama_config()))
    data = [
        support.tokenizer()(" ".join(support.SENTENCES)[i * 40 : i * 40 + 32], return_tensors="pt")["input_ids"]
        for i in range(6)
    ]
    model = AutoModelForCausalLM.from_pretrained(path, device_map="cpu", dtype=torch.float32)
    rounding = AutoRound(
        model,
        support.tokenizer(),
        bits=4,
        group_size=16,
        iters=5,
        nsamples=6,
        seqlen=32,
        batch_size=2,
        dataset=data,
        device_map="cpu",
        enable_torch_compile=False,
    )
    found, _ = rounding.quantize()
    return weights(found.state_dict())
