"""Generated tokens are those of Transformers' generate; train steps and the dummy scheduler."""

from __future__ import annotations

from typing import Any

import matrix
import pytest
import torch

from accel_state.errors import ConfigurationError
from accel_state.testing import run_world


def generate_all() -> dict[str, Any]:
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    found: dict[str, Any] = {}
    ids = torch.randint(2, 125, (3, 6), generator=torch.Generator().manual_seed(5))
    for name, plugin in [
        ("gpt2", {"tp_degree": 2}),
        ("llama", {"pp_degree": 2}),
        ("qwen3", {"tp_degree": 2}),
        ("gpt_neox", {"pp_degree": 2}),
        ("mistral", {"tp_degree": 2}),
    ]:
        plain = matrix.create(name).eval()
        plain.config.use_cache = plain.generation_config.use_cache = True
        run = matrix.Run(name, **plugin)
        options = {"max_new_tokens": 10, "eos_token_id": 7, "pad_token_id": 0}
        expected = plain.generate(ids, do_sample=False, **options)
        own = run.model.megatron_generate(ids, torch.ones_like(ids), **options)
        found[f"{name} greedy"] = torch.equal(own, expected[:, : own.shape[1]]) and own.shape == expected.shape
        for penalty in (1.0, 1.5):
            beams = {"num_beams": 4, "length_penalty": penalty, **options}
            expected = plain.generate(ids[:1], do_sample=False, **beams)
            found[f"{name} beams {penalty}"] = own_beams = run.model.megatron_generate(ids[:1], **beams)
            found[f"{name} beams {penalty}"] = torch.equal(own_beams, expected)
        one = run.model.megatron_generate(ids, max_new_tokens=4, top_k=1, temperature=0.7)
        found[f"{name} top_k=1"] = torch.equal(one[:, :7], run.model.megatron_generate(ids, max_new_tokens=1))
        drawn = [
            run.model.megatron_generate(ids, max_new_tokens=8, top_p=0.9, generator=torch.Generator().manual_seed(3))
            for _ in range(2)
        ]
        found[f"{name} top_p"] = torch.equal(*drawn)
        found[f"{name} training"] = run.model.training
        # Prompts of different lengths, padded on either side.
        alone = [run.model.megatron_generate(ids[row : row + 1, : 4 + row], **options)[0] for row in range(3)]
        for side in ("right", "left"):
            padded, mask = torch.zeros(3, 6, dtype=torch.long), torch.zeros(3, 6, dtype=torch.long)
            for row in range(3):
                where = slice(0, 4 + row) if side == "right" else slice(2 - row, 6)
                padded[row, where], mask[row, where] = ids[row, : 4 + row], 1
            together = run.model.megatron_generate(padded, mask, **options)
            for row in range(3):
                start = 0 if side == "right" else 2 - row
                own = together[row, start : start + len(alone[row])]
                found[f"{name} {side} {row}"] = torch.equal(own, alone[row])
        try:
            run.model.megatron_generate(ids, torch.zeros_like(ids))
        except ConfigurationError as error:
            found["message"] = str(error)
        run.close()
    return found


@pytest.mark.timeout(300)
def test_tokens_equal_those_of_transformers() -> None:
    for found in run_world(generate_all, 2, timeout=280):
        assert "a row of zeros" in found.pop("message")
        assert all(found.values()), [name for name, equal in found.items() if not equal]


def train_with_steps() -> dict[str, Any]:
    from functools import partial

    from accel import Accelerator
    from accel_megatron import (
        GPTTrainStep,
        MegatronLMDummyScheduler,
        MegatronLMPlugin,
        T5TrainStep,
        avg_losses_across_data_parallel_group,
    )
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()

    class Weighted(GPTTrainStep):
        """The mean over samples of their mean losses, weighted, as in the documents of Accelerate."""

        def __init__(self, megatron_args: Any, **kwargs: Any) -> None:
            super().__init__(megatron_args)
            self.kwargs = kwargs

        def get_loss_func(self) -> Any:
            def loss_func(inputs: Any, loss_mask: Any, output: Any) -> Any:
                per_sample = (output.float() * loss_mask).sum(1) / loss_mask.sum(1)
                weights = 1.0 + self.kwargs["alpha"] * (inputs == self.kwargs["key"]).float().sum(1)
                loss = (per_sample * weights).mean()
                return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}

            return loss_func

        def get_forward_step_func(self) -> Any:
            def forward_step(iterator: Any, model: Any) -> Any:
                tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(iterator)
                output = model(tokens, position_ids, attention_mask, labels=labels)
                return output, partial(self.loss_func, tokens, loss_mask)

            return forward_step

    found: dict[str, Any] = {}
    data = matrix.batches("llama", 4, 128)
    model = matrix.create("llama")
    optimizer = matrix.optimizer_of(model)
    expected, rates = [], []
    for step, batch in enumerate(data):
        rate = 1e-3 * (step / 2 if step <= 2 else 1 - (step - 2) / 4)
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = model(input_ids=batch["input_ids"]).logits
        labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        per_sample = losses.sum(1) / (labels >= 0).sum(1)
        loss = (per_sample * (1 + 0.25 * (batch["input_ids"] == 5).sum(1))).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
        rates.append(rate)
    for plugin in ({"tp_degree": 2}, {"num_micro_batches": 2}, {"pp_degree": 2, "num_micro_batches": 2}):
        settings = MegatronLMPlugin(custom_train_step_class=Weighted, **plugin)
        settings.custom_train_step_kwargs = {"key": 5, "alpha": 0.25}
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=settings)
        fresh = matrix.create("llama")
        user = matrix.optimizer_of(fresh)
        dummy = MegatronLMDummyScheduler(optimizer=user, total_num_steps=6, warmup_num_steps=2)
        engine, prepared, scheduler = accelerator.prepare(fresh, user, dummy)
        ranks = accelerator.strategy.data_collectives
        rows = matrix.ROWS // ranks.world_size
        own, own_rates = [], []
        for batch in data:
            own_rates.append(scheduler.get_last_lr()[0])
            part = {key: value[ranks.rank * rows : (ranks.rank + 1) * rows] for key, value in batch.items()}
            loss = engine(**part).loss
            own.append(loss.item())
            accelerator.backward(loss)
            prepared.step()
            scheduler.step()
            prepared.zero_grad()
        found[str(plugin)] = matrix.worst(own, expected) + matrix.worst(own_rates, rates)
        matrix.close(accelerator)
    # The default steps of all architectures are the usual losses where all micro batches have as many tokens.
    for name in ("gpt2", "t5", "megatron-bert"):
        batch = matrix.batches(name, 1, matrix.create(name).config.vocab_size)[0]
        batch["labels"] = batch["input_ids"].clone() if name != "megatron-bert" else batch["labels"]
        plain = matrix.create(name)(**batch).loss.item()
        kind = {"gpt2": GPTTrainStep, "t5": T5TrainStep}.get(name)
        if kind is None:
            from accel_megatron import BertTrainStep as kind
        run = matrix.Run(name, tp_degree=2, custom_train_step_class=kind)
        found[name] = abs(run.model(**batch).loss.item() - plain)
        run.close()
    return found


def test_train_steps_and_the_dummy_scheduler() -> None:
    for found in run_world(train_with_steps, 2):
        assert max(found.values()) < 1e-5, found
