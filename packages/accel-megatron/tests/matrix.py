"""Runs in every rank of a test: models trained with Megatron-core, compared with plain Transformers and torch."""

from __future__ import annotations

import copy
import functools
import gc
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

if find_spec("megatron") is None:
    pytest.skip("scripts/test-megatron makes an environment with Megatron-core", allow_module_level=True)

Case = tuple[str, dict[str, Any]]
SEQUENCE = 32
ROWS = 8


@functools.cache
def models() -> dict[str, Any]:
    import transformers as t

    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    gated = {**sizes, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64}
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    bert = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "max_position_embeddings": 64}
    gpt2 = t.GPT2Config(vocab_size=125, n_positions=64, n_embd=64, n_layer=4, n_head=4, **no_dropout)
    experts = {**gated, "num_local_experts": 4, "num_experts_per_tok": 2}
    t5 = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 4, "num_heads": 4, "dropout_rate": 0}
    t5 = {**t5, "decoder_start_token_id": 0, "pad_token_id": 0}
    return {
        "gpt2": (t.GPT2LMHeadModel, gpt2),
        "gpt_neox": (
            t.GPTNeoXForCausalLM,
            t.GPTNeoXConfig(**sizes, intermediate_size=96, max_position_embeddings=64),
        ),
        "llama": (t.LlamaForCausalLM, t.LlamaConfig(**gated)),
        "mistral": (t.MistralForCausalLM, t.MistralConfig(**gated, sliding_window=8, head_dim=16)),
        "qwen2": (t.Qwen2ForCausalLM, t.Qwen2Config(**gated, tie_word_embeddings=True)),
        "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config(**gated, head_dim=16)),
        "mixtral": (t.MixtralForCausalLM, t.MixtralConfig(**experts)),
        "megatron-bert": (
            t.MegatronBertForPreTraining,
            t.MegatronBertConfig(**sizes, intermediate_size=128, **bert),
        ),
        "t5": (t.T5ForConditionalGeneration, t.T5Config(**t5)),
        "t5-gated": (
            t.T5ForConditionalGeneration,
            t.T5Config(**t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        ),
    }


def create(name: str) -> nn.Module:
    kind, config = models()[name]
    config = copy.deepcopy(config)
    config.use_cache = False
    torch.manual_seed(0)
    model = kind(config)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases and norms that are not 0 or 1
            parameter.data.add_(torch.randn_like(parameter) * 0.02)
    return model.train()


def batches(name: str, steps: int, vocab_size: int) -> list[dict[str, torch.Tensor]]:
    """Batches with losses on numbers of tokens that differ."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(steps):
        ids = torch.randint(2, vocab_size, (ROWS, SEQUENCE), generator=generator)
        lengths = torch.randint(8, SEQUENCE, (ROWS,), generator=generator)
        if name == "megatron-bert":
            mask = torch.ones_like(ids)
            mask[::2, 24:] = 0
            chosen = torch.rand(ROWS, SEQUENCE, generator=generator) < 0.3
            labels = torch.where(chosen & (mask == 1), ids, -100)
            types = (torch.arange(SEQUENCE) > 12).long().expand_as(ids).contiguous()
            following = torch.randint(0, 2, (ROWS,), generator=generator)
            batch = {"attention_mask": mask, "token_type_ids": types, "next_sentence_label": following}
            made.append({"input_ids": ids, "labels": labels, **batch})
            continue
        if name.startswith("t5"):
            mask = torch.ones_like(ids)
            mask[::2, 24:] = 0
            labels = torch.randint(2, vocab_size, (ROWS, SEQUENCE), generator=generator)
            labels[1::2, 20:] = -100
            made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
            continue
        labels = ids.clone()
        for row, length in enumerate(lengths.tolist()):
            labels[row, length:] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW with and without weight decay."""
    matrices = [item for item in model.parameters() if item.ndim > 1]
    vectors = [item for item in model.parameters() if item.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, **options)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step))


_references: dict[Any, Any] = {}
_norms: dict[Any, list[float]] = {}


def reference(name: str, steps: int, clip: float = 1.0, dtype: Any = None) -> tuple[list[float], dict[str, Any]]:
    """The losses and the weights of plain training in this process; in a half precision, from float32 weights."""
    key = (name, steps, clip, dtype)
    if key not in _references:
        model = create(name)
        optimizer = optimizer_of(model)
        copy_of = None if dtype is None else create(name).to(dtype)
        scheduler = schedule_of(optimizer)
        losses, norms = [], []
        for batch in batches(name, steps, model.config.vocab_size):
            loss = (model if copy_of is None else copy_of)(**batch).loss
            loss.backward()
            if copy_of is not None:
                for own, half in zip(model.parameters(), copy_of.parameters(), strict=True):
                    own.grad, half.grad = None if half.grad is None else half.grad.float(), None
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if copy_of is not None:
                for own, half in zip(model.parameters(), copy_of.parameters(), strict=True):
                    half.data.copy_(own.data)
            losses.append(loss.item())
        _norms[key] = norms
        _references[key] = losses, {name: value.clone() for name, value in model.state_dict().items()}
    return _references[key]


def reference_norms(name: str, steps: int) -> list[float]:
    """The norms of the gradients in the training of :func:`reference`."""
    reference(name, steps)
    return _norms[name, steps, 1.0, None]


class Run:
    """One Accelerator with a prepared model."""

    def __init__(self, name: str, precision: str = "no", model: Any = None, **plugin: Any) -> None:
        from accel import Accelerator
        from accel_megatron import MegatronLMPlugin

        self.name = name
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=precision,
            megatron_lm_plugin=MegatronLMPlugin(**plugin),
            step_scheduler_with_optimizer=False,
        )
        self.original = create(name) if model is None else model
        self.vocab_size = self.original.config.vocab_size
        optimizer = optimizer_of(self.original)
        scheduler = schedule_of(optimizer)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(self.original, optimizer, scheduler)

    def part(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        data = self.accelerator.strategy.data_collectives
        rows = ROWS // data.world_size
        return {key: value[data.rank * rows : (data.rank + 1) * rows] for key, value in batch.items()}

    def step(self, batch: dict[str, torch.Tensor], norms: list[float] | None = None) -> float:
        loss = self.model(**self.part(batch)).loss
        self.accelerator.backward(loss)
        if norms is not None:
            self.model.finish_gradients()
            self.model.optimizer.prepare()
            norms.append(self.model.optimizer.norm())
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()

    def close(self) -> None:
        close(self.accelerator)


def close(accelerator: Any) -> None:
    """End an Accelerator, and keep the process group."""
    from accel_state import AcceleratorState

    accelerator.free_memory()
    accelerator.strategy.close()
    AcceleratorState._reset_state()
    gc.collect()


def worst(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def weight_difference(state: dict[str, Any], expected: dict[str, Any]) -> float:
    assert set(state) == set(expected)
    return max(float((state[name].float() - expected[name].float()).abs().max()) for name in expected)


def train_all(cases: list[Case], steps: int) -> list[dict[str, Any]]:
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    results = []
    for name, plugin in cases:
        losses, weights = reference(name, steps)
        run = Run(name, **plugin)
        original = create(name).state_dict()
        state = run.accelerator.get_state_dict(run.model)
        same = not state or (
            set(state) == set(original) and all(torch.equal(state[key], original[key]) for key in state)
        )
        norms: list[float] = []
        trained = [run.step(batch, norms) for batch in batches(name, steps, run.vocab_size)]
        state = run.accelerator.get_state_dict(run.model)
        difference = weight_difference(state, weights) if state else 0.0
        ratios = [abs(own / plain - 1) for own, plain in zip(norms, reference_norms(name, steps), strict=True)]
        first, norm = max(ratios[:5]), max(ratios)
        results.append(
            {"same": same, "loss": worst(trained, losses), "first": first, "norm": norm, "weights": difference}
        )
        run.close()
    return results


def check(cases: list[Case], results: list[list[dict[str, Any]]]) -> None:
    for rank, found in enumerate(results):
        for (name, plugin), result in zip(cases, found, strict=True):
            where = f"{name} {plugin} on rank {rank}: {result}"
            assert result["same"], where
            assert result["loss"] < 1e-5, where
            # Adam's steps do not depend on the scale of the gradients, but their norm does, from the first step on.
            assert result["first"] < 1e-4, where
            # Adam divides by the root of the second moment: where gradients are near zero, roundings are enlarged.
            assert result["norm"] < 1e-3 and result["weights"] < 1e-3, where


def train_in_half_precision(cases: list[Any], steps: int) -> list[list[float]]:
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    differences = []
    for name, precision, plugin in cases:
        # Transformers computes the losses of T5 and Megatron-BERT in bf16, with three digits; they are float32 here.
        in_float32 = precision == "fp16" or name in ("t5", "megatron-bert")
        dtype = None if in_float32 else torch.bfloat16
        losses, _ = reference(name, steps, dtype=dtype)
        run = Run(name, precision, **plugin)
        original = create(name).state_dict()
        state = run.accelerator.get_state_dict(run.model)
        # The float32 weights are kept, so that nothing is lost before the first step.
        same = not state or all(torch.equal(state[key], original[key]) for key in original)
        trained = []
        skipped = 0
        for batch in batches(name, steps, run.vocab_size):
            trained.append(run.step(batch))
            skipped += run.accelerator.optimizer_step_was_skipped
        differences.append([same, worst(trained, losses), skipped])
        run.close()
    return differences
