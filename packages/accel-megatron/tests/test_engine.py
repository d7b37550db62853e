"""What an engine refuses and saves, and steps with an overflow."""

from __future__ import annotations

import re
from typing import Any

import matrix
import torch

from accel_megatron import MegatronLMPlugin
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world


def refusals() -> list[str]:
    from accel import Accelerator
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    messages = []

    def attempt(build: Any, prepare: Any, **plugin: Any) -> None:
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
        try:
            prepare(accelerator, build)
            messages.append("no error")
        except ConfigurationError as error:
            messages.append(str(error))
        matrix.close(accelerator)

    def both(accelerator: Any, model: Any) -> Any:
        return accelerator.prepare(model, matrix.optimizer_of(model))

    def other_optimizer(accelerator: Any, model: Any) -> None:
        accelerator.prepare(model, torch.optim.RMSprop(model.parameters()))

    def split_groups(accelerator: Any, model: Any) -> None:
        names = dict(model.named_parameters())
        queries = [names.pop(name) for name in list(names) if "q_proj" in name]
        accelerator.prepare(model, torch.optim.AdamW([{"params": queries}, {"params": list(names.values())}]))

    def without_labels(accelerator: Any, model: Any) -> None:
        engine, _ = both(accelerator, model)
        engine(input_ids=torch.ones(2, 8, dtype=torch.long))

    def too_long(accelerator: Any, model: Any) -> None:
        engine, _ = both(accelerator, model)
        engine(**matrix.batches("t5", 1, 128)[0])

    def twice(accelerator: Any, model: Any) -> None:
        engine, _ = both(accelerator, model)
        batch = matrix.batches("llama", 1, 128)[0]
        engine(**batch)
        engine(**batch)

    def unequal(accelerator: Any, model: Any) -> None:
        engine, optimizer = both(accelerator, model)
        batch = matrix.batches("llama", 1, 128)[0]
        for factor in (1.0, 3.0):
            accelerator.backward(engine(**batch).loss * factor)
        optimizer.step()

    def not_cleared(accelerator: Any, model: Any) -> None:
        engine, optimizer = both(accelerator, model)
        batch = matrix.batches("llama", 1, 128)[0]
        for _ in range(2):
            accelerator.backward(engine(**batch).loss)
            optimizer.step()

    llama = matrix.create
    attempt(torch.nn.Linear(2, 2), both, tp_degree=2)
    attempt(llama("llama"), other_optimizer, tp_degree=2)
    attempt(llama("llama"), split_groups, tp_degree=2)
    attempt(llama("llama"), both, expert_model_parallel_size=2)
    attempt(llama("llama"), both, tp_degree=2, other_megatron_args={"vocab_file": "vocab.json"})
    attempt(llama("t5"), both, context_parallel_size=2)
    attempt(llama("gpt2"), both, tp_degree=2, use_rotary_position_embeddings=True)
    attempt(llama("llama"), both, tp_degree=2, other_megatron_args={"position_embedding_type": "alibi"})
    attempt(llama("gpt2"), both, tp_degree=2, encoder_seq_length=8)
    attempt(llama("t5"), too_long, tp_degree=2, decoder_seq_length=24)
    attempt(llama("llama"), both, pp_degree=2, num_layers_per_virtual_pipeline_stage=3)
    attempt(llama("mixtral"), both, tp_degree=2)
    attempt(llama("llama"), both, use_distributed_optimizer=True, use_precision_aware_optimizer=True)
    attempt(llama("llama"), without_labels, tp_degree=2)
    attempt(llama("llama"), twice, tp_degree=2)
    attempt(llama("llama"), unequal, tp_degree=2)
    attempt(llama("llama"), not_cleared, tp_degree=2)
    return messages


EXPECTED = [
    "Linear .*has no mapping.*gpt2.*entry point group accel_megatron.architectures",
    "RMSprop is not one of AdamW, Adam, SGD",
    "q_proj.weight.*one matrix.*one group",
    "expert_model_parallel_size=2, and the model has no experts",
    "vocab_file.*do not have",
    "context_parallel_size=2 needs a causal model",
    "use_rotary_position_embeddings=True, and a gpt2 has none",
    "position_embedding_type.*do not have.*position embeddings and heads follow from the model",
    "encoder_seq_length=8, and a gpt2 has no encoder. Leave it out",
    "sequences of 32 tokens, and decoder_seq_length=24. Set max_length=24 of the tokenizer, or a larger",
    "4 layers of the llama cannot be split over pp_degree=2.*num_layers_per_virtual_pipeline_stage=3",
    "tp_degree=2 of a model with experts needs sequence_parallelism=True",
    "use_precision_aware_optimizer=True needs Transformer Engine",
    "lacks labels",
    r"before backward\(\) of the last loss",
    "different factors .1, 3",
    "gradients of the last step were not cleared",
]


def test_refusals() -> None:
    for messages in run_world(refusals, 2):
        for message, expected in zip(messages, EXPECTED, strict=True):
            assert re.search(expected, message), (message, expected)


def on_the_cpu() -> str:
    from accel import Accelerator

    try:
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
    except ConfigurationError as error:
        return str(error)
    return "no error"


def test_a_cpu_is_refused_with_the_alternative() -> None:
    for message in run_world(on_the_cpu, 2):
        assert "uses cpu" in message and "ParallelismConfig(tp_size=" in message


def save_model(directory: str) -> bool:
    from transformers import AutoModelForCausalLM

    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    run = matrix.Run("gpt2", tp_degree=2)
    run.accelerator.save_model(run.model, f"{directory}/saved")
    run.accelerator.unwrap_model(run.model).save_pretrained(
        f"{directory}/unwrapped",
        is_main_process=run.accelerator.is_main_process,
        save_function=run.accelerator.save,
    )
    run.accelerator.wait_for_everyone()
    loaded = AutoModelForCausalLM.from_pretrained(f"{directory}/unwrapped").state_dict()
    expected = matrix.create("gpt2").state_dict()
    from safetensors.torch import load_file

    saved = load_file(f"{directory}/saved/model.safetensors")
    run.close()
    return all(torch.equal(loaded[name], expected[name]) for name in expected) and all(
        torch.equal(saved[name], expected[name]) for name in saved
    )


def test_models_are_saved_with_their_names(tmp_path: Any) -> None:
    assert run_world(save_model, 2, str(tmp_path)) == [True, True]


def overflow() -> list[Any]:
    from accel import Accelerator
    from accel.utils import GradScalerKwargs
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        megatron_lm_plugin=MegatronLMPlugin(tp_degree=2),
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0**40)],
    )
    model = matrix.create("llama")
    engine, optimizer = accelerator.prepare(model, matrix.optimizer_of(model))
    before = accelerator.get_state_dict(engine)
    skipped = []
    for batch in matrix.batches("llama", 30, 128):
        accelerator.backward(engine(**batch).loss)
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        if len(skipped) == 1:
            after = accelerator.get_state_dict(engine)
            unchanged = all(torch.equal(before[name], after[name]) for name in before)
        optimizer.zero_grad()
    matrix.close(accelerator)
    return [unchanged, skipped[0], skipped[-1]]


def test_a_step_with_an_overflow_is_skipped() -> None:
    assert run_world(overflow, 2) == [[True, True, False]] * 2
