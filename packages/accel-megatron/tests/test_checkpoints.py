"""Checkpoints: saved at one parallel size, loaded at another, and by plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matrix
import pytest
import torch
from safetensors.torch import load_file

from accel_state.testing import run_world

STEPS, SAVED = 6, 3


def save_and_load(directory: str, name: str, saved: dict[str, Any], others: list[tuple[str, dict[str, Any]]]) -> Any:
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    data = matrix.batches(name, STEPS, matrix.create(name).config.vocab_size)
    expected, _ = matrix.reference(name, STEPS)
    run = matrix.Run(name, **saved)
    for batch in data[:SAVED]:
        run.step(batch)
    run.accelerator.save_state(directory)
    continued = [run.step(batch) for batch in data[SAVED:]]
    run.close()
    differences = [matrix.worst(continued, expected[SAVED:])]
    for precision, plugin in others:
        run = matrix.Run(name, precision, **plugin)
        run.step(data[0])  # so that everything differs from what was saved
        run.accelerator.load_state(directory)
        rate = run.optimizer.param_groups[0]["lr"]
        losses = [run.step(batch) for batch in data[SAVED:]]
        differences.append(matrix.worst(losses, expected[SAVED:]) + abs(rate - 1e-3 / 1.3))
        run.close()
    return differences


def continue_with_torch(directory: Path, name: str) -> float:
    """Load the checkpoint into a Transformers model and torch's optimizer."""
    expected, _ = matrix.reference(name, STEPS)
    model = matrix.create(name)
    model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    optimizer = matrix.optimizer_of(model)
    scheduler = matrix.schedule_of(optimizer)
    optimizer.load_state_dict(torch.load(directory / "optimizer.bin", weights_only=True))
    scheduler.load_state_dict(torch.load(directory / "scheduler.bin", weights_only=True))
    losses = []
    for batch in matrix.batches(name, STEPS, model.config.vocab_size)[SAVED:]:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return matrix.worst(losses, expected[SAVED:])


@pytest.mark.parametrize(
    ("name", "saved", "others"),
    [
        (
            "gpt2",
            {"tp_degree": 2},
            [
                ("no", {"pp_degree": 2}),
                ("no", {"use_distributed_optimizer": True}),
                ("no", {"context_parallel_size": 2}),
            ],
        ),
        (
            "mixtral",
            {"expert_model_parallel_size": 2, "use_distributed_optimizer": True},
            [("no", {"tp_degree": 2, "sequence_parallelism": True}), ("no", {"pp_degree": 2})],
        ),
    ],
)
def test_states_load_at_other_sizes(tmp_path: Path, name: str, saved: Any, others: Any) -> None:
    directory = tmp_path / "state"
    for differences in run_world(save_and_load, 2, str(directory), name, saved, others):
        assert max(differences) < 1e-5, differences
    assert continue_with_torch(directory, name) < 1e-5


# Four ranks, three models: tens of seconds on two cores.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["llama", "megatron-bert", "t5"])
def test_four_ranks_load_at_other_sizes(tmp_path: Path, name: str) -> None:
    saved = {"tp_degree": 2, "pp_degree": 2, "sequence_parallelism": True}
    others: list[Any] = [("no", {"use_distributed_optimizer": True}), ("no", {"pp_degree": 4, "num_micro_batches": 2})]
    others.append(("no", {"tp_degree": 2, "use_distributed_optimizer": True}))
    for differences in run_world(save_and_load, 4, str(tmp_path / "state"), name, saved, others, timeout=500):
        assert max(differences) < 1e-5, differences
    assert continue_with_torch(tmp_path / "state", name) < 1e-5


def resume_exactly(directory: str) -> list[Any]:
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    data = matrix.batches("llama", STEPS, 128)
    exact = []
    for precision, plugin in [("bf16", {"tp_degree": 2}), ("fp16", {"use_distributed_optimizer": True})]:
        run = matrix.Run("llama", precision, attention_dropout=0.1, hidden_dropout=0.1, **plugin)
        for batch in data[:SAVED]:
            run.step(batch)
        path = f"{directory}/{precision}"
        run.accelerator.save_state(path)
        continued = [run.step(batch) for batch in data[SAVED:]]
        run.accelerator.load_state(path)
        exact.append(continued == [run.step(batch) for batch in data[SAVED:]])
        run.close()
    return exact


def test_resuming_at_the_same_size_is_exact(tmp_path: Path) -> None:
    """The float32 weights, the loss scale and the generators of dropout are saved too."""
    assert run_world(resume_exactly, 2, str(tmp_path)) == [[True, True], [True, True]]
