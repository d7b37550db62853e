"""Training with Megatron-core gives the numbers of plain Transformers and torch in one process."""

from __future__ import annotations

from typing import Any

import matrix
import pytest
import torch
from torch import nn

from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

TWO_RANKS: list[matrix.Case] = [
    ("gpt2", {"tp_degree": 2}),
    ("gpt2", {"use_distributed_optimizer": True, "num_micro_batches": 2}),
    ("gpt_neox", {"tp_degree": 2, "sequence_parallelism": True}),
    ("llama", {"pp_degree": 2, "num_micro_batches": 2}),
    ("llama", {"pp_degree": 2, "num_micro_batches": 4, "num_layers_per_virtual_pipeline_stage": 1}),
    ("llama", {"context_parallel_size": 2}),
    ("llama", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    ("mistral", {"tp_degree": 2, "recompute_activations": True}),
    ("qwen2", {"pp_degree": 2, "decoder_last_pipeline_num_layers": 1}),
    ("qwen3", {"tp_degree": 2, "sequence_parallelism": True}),
    ("mixtral", {"expert_model_parallel_size": 2}),
    ("megatron-bert", {"tp_degree": 2, "sequence_parallelism": True}),
    ("megatron-bert", {"pp_degree": 2, "encoder_seq_length": 40}),
    ("t5", {"pp_degree": 2, "num_micro_batches": 2, "decoder_seq_length": 48}),
    ("t5", {"tp_degree": 2, "encoder_seq_length": 48, "decoder_seq_length": 36}),
    ("t5-gated", {"tp_degree": 2, "sequence_parallelism": True}),
]
SP = {"tp_degree": 2, "sequence_parallelism": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000}
# Gloo cannot gather tensors of different sizes, which the default dispatcher does where experts are split.
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
FOUR_RANKS: list[matrix.Case] = [
    ("gpt2", {**SP, "pp_degree": 2}),
    ("gpt2", {"pp_degree": 2, "use_distributed_optimizer": True, "num_micro_batches": 2}),
    ("gpt2", {**SP, "context_parallel_size": 2, "use_distributed_optimizer": True}),
    ("gpt_neox", {"tp_degree": 2, "pp_degree": 2}),
    ("llama", {**SP, "pp_degree": 2, "num_micro_batches": 2}),
    ("llama", {**SP, "use_distributed_optimizer": True}),
    ("llama", {"pp_degree": 4, "num_micro_batches": 4}),
    ("llama", {"use_distributed_optimizer": True, "other_megatron_args": OVERLAP}),
    ("llama", {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2, "decoder_last_pipeline_num_layers": 1}),
    ("llama", {"tp_degree": 2, "pp_degree": 2, "other_megatron_args": {"num_layers_in_first_pipeline_stage": 1}}),
    ("mistral", {"context_parallel_size": 2, "pp_degree": 2}),
    ("qwen2", {"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1}),
    (
        "qwen3",
        {
            "tp_degree": 2,
            "pp_degree": 2,
            "num_micro_batches": 2,
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 1,
        },
    ),
    ("mixtral", {"expert_model_parallel_size": 2, "pp_degree": 2, "use_distributed_optimizer": True}),
    ("mixtral", {**SP, "expert_model_parallel_size": 2, "other_megatron_args": ALLGATHER}),
    ("mixtral", {**SP, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    ("megatron-bert", {**SP, "pp_degree": 2}),
    ("t5", {**SP, "pp_degree": 2}),
    ("t5", {"pp_degree": 4, "num_micro_batches": 2}),
    ("t5-gated", {"tp_degree": 2, "use_distributed_optimizer": True}),
]


@pytest.mark.timeout(300)
def test_two_ranks_train_like_one_process() -> None:
    matrix.check(TWO_RANKS, run_world(matrix.train_all, 2, TWO_RANKS, 5, timeout=280))


# Twenty configurations on four ranks, of 20 steps each: minutes on two cores.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks_train_like_one_process() -> None:
    matrix.check(FOUR_RANKS, run_world(matrix.train_all, 4, FOUR_RANKS, 20, timeout=880))


TWO_HALF = [
    ("llama", "bf16", {"tp_degree": 2, "sequence_parallelism": True}),
    ("llama", "bf16", {"use_distributed_optimizer": True}),
    ("llama", "fp16", {"tp_degree": 2}),
]
FOUR_HALF = [
    ("gpt2", "bf16", {**SP, "pp_degree": 2}),
    ("llama", "bf16", {"tp_degree": 2, "use_distributed_optimizer": True, "num_micro_batches": 2}),
    ("llama", "bf16", {"context_parallel_size": 2, "pp_degree": 2}),
    ("mixtral", "bf16", {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}),
    ("megatron-bert", "bf16", {**SP, "pp_degree": 2}),
    ("t5", "bf16", {**SP, "pp_degree": 2}),
    ("llama", "fp16", {"tp_degree": 2, "pp_degree": 2}),
]


def test_half_precision() -> None:
    for found in run_world(matrix.train_in_half_precision, 2, TWO_HALF, 8):
        assert all(same and difference < 2e-3 and not skipped for same, difference, skipped in found), found


# Seven configurations on four ranks, of 20 steps each.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_half_precision_on_four_ranks() -> None:
    for found in run_world(matrix.train_in_half_precision, 4, FOUR_HALF, 20, timeout=580):
        # Sums in another order are rounded differently, and 20 steps enlarge it.
        assert all(same and difference < 1e-2 and not skipped for same, difference, skipped in found), found


def train_with_the_loop_of_a_script() -> dict[str, Any]:
    from torch.utils.data import DataLoader

    from accel import Accelerator
    from accel_megatron import MegatronLMPlugin
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    found: dict[str, Any] = {}
    # Accumulation over calls and clipping, against plain torch.
    model = matrix.create("llama")
    optimizer = matrix.optimizer_of(model)
    expected, norms = [], []
    data = matrix.batches("llama", 5, 128)
    for window in (data[:2], data[2:4], data[4:]):
        for batch in window:
            loss = model(**batch).loss
            (loss / len(window)).backward()
            expected.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, num_micro_batches=2),
    )
    samples = [{key: value[row] for key, value in batch.items()} for batch in data for row in range(matrix.ROWS)]
    megatron = matrix.create("llama")
    engine, prepared, loader = accelerator.prepare(
        megatron, matrix.optimizer_of(megatron), DataLoader(samples, batch_size=4)
    )
    found["sizes"] = (engine.plugin.micro_batch_size, engine.plugin.global_batch_size, len(loader))
    losses, own_norms = [], []
    for batch in loader:
        with accelerator.accumulate(engine):
            loss = engine(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            with pytest.raises(ConfigurationError, match="Megatron-core keeps its gradients elsewhere"):
                nn.utils.clip_grad_norm_(engine.parameters(), 0.5)
            if accelerator.sync_gradients:
                own_norms.append(float(accelerator.clip_grad_norm_(engine.parameters(), 0.5)))
            prepared.step()
            prepared.zero_grad()
    found["loss"] = matrix.worst(losses, expected)
    found["norm"] = matrix.worst(own_norms, norms)
    found["rate"] = prepared.param_groups[0]["lr"]
    # Evaluation, and the model for inference.
    engine.eval()
    model.eval()
    engine.plugin.return_logits = True
    with torch.no_grad():
        output, plain = engine(**data[0]), model(**data[0])
    found["logits"] = float((output.logits - plain.logits).abs().max())
    found["eval"] = abs(float(output.loss) - float(plain.loss))
    gathered = accelerator.gather_for_metrics(output.logits)
    found["gathered"] = tuple(gathered.shape)
    unwrapped = accelerator.unwrap_model(engine)
    found["class"] = type(unwrapped).__name__
    with torch.no_grad():
        found["unwrapped"] = float((unwrapped.eval()(**data[0]).logits - plain.logits).abs().max())
    found["ranks"] = (accelerator.tensor_parallel_rank, accelerator.pipeline_parallel_rank)
    found["type"] = accelerator.distributed_type.value
    found["plugin"] = accelerator.state.megatron_lm_plugin is engine.plugin
    matrix.close(accelerator)
    return found


def test_the_loop_of_a_script() -> None:
    for rank, found in enumerate(run_world(train_with_the_loop_of_a_script, 2)):
        assert found["sizes"] == (4, 8, 5)
        assert found["loss"] < 1e-5 and found["norm"] < 1e-4 and found["rate"] == 1e-3, found
        assert found["logits"] < 1e-4 and found["eval"] < 1e-5 and found["unwrapped"] < 1e-4, found
        assert found["gathered"] == (matrix.ROWS, matrix.SEQUENCE, 128)
        assert found["class"] == "LlamaForCausalLM" and found["ranks"] == (rank, 0), found
        assert found["type"] == "MEGATRON_LM" and found["plugin"], found


def accumulate_unequal_calls() -> list[float]:
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    data = matrix.batches("gpt2", 1, 125)[0]
    _, weights = matrix.reference("gpt2", 1)
    run = matrix.Run("gpt2", use_distributed_optimizer=True, calculate_per_token_loss=True)
    part = run.part(data)
    for rows in (slice(0, 3), slice(3, 4)):  # manual accumulation: the sum of the factors is 1
        loss = run.model(**{key: value[rows] for key, value in part.items()}).loss
        run.accelerator.backward(loss / 2)
    run.optimizer.step()
    state = run.accelerator.get_state_dict(run.model)
    run.close()
    return [matrix.weight_difference(state, weights)] if state else []


def test_tokens_of_a_window_have_the_same_weight() -> None:
    assert run_world(accumulate_unequal_calls, 2)[0][0] < 1e-5
