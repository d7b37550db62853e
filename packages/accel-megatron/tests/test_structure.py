"""States whose manifest is consistent and whose contents do not fit: nothing of them is loaded, on any rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matrix
import pytest
import torch
from checkpoint_changes import damaged_copies, plain

from accel_state import AccelError
from accel_state.testing import run_world


def picture(run: Any) -> str:
    """Everything that a load changes, as this rank holds it. Every rank must call it."""
    from accel_megatron.checkpoint import gather

    strategy = run.accelerator.strategy
    weights = [strategy.state_dict(engine) for engine in strategy._engines]
    parts = gather(strategy._engines, weights).parts
    saved = [plain(getattr(part, "value", None)) for part in parts]
    counters = [run.accelerator.save_iteration, run.optimizer.steps_taken, run.scheduler.state_dict()]
    return repr([saved, plain(weights), plain(counters), torch.get_rng_state().tolist()])


def try_damage(folder: str, precision: str, plugin: dict[str, Any], begin: int, count: int) -> list[str]:
    """On every rank: the damaged states that were loaded with another result, or changed something."""
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    pattern = "megatron_rank?.bin" if begin % 2 else "[mo][op]*[lr].*[bs]*"
    data, good = matrix.batches("gpt2", 3, 125), Path(folder) / "good"
    run = matrix.Run("gpt2", precision, **plugin)
    accelerator, collectives = run.accelerator, run.accelerator.process_state.collectives
    run.step(data[0])
    accelerator.save_state(good)
    expected = picture(run)
    run.step(data[1])
    before = picture(run)
    assert before != expected
    copies = None
    if accelerator.process_index == 0:
        copies = damaged_copies(good, range(begin, begin + count), pattern)
    wrong, refused = [], 0
    for path, what in collectives.broadcast_object(copies).items():
        outcome, fits = "was loaded", expected
        try:
            accelerator.load_state(path)
        except AccelError as error:
            outcome, fits = f"changed something: {error}", before
        found = picture(run)
        if found != fits:
            wrong.append(f"rank {accelerator.process_index}: {what} {outcome}")
        refused += fits is before
        if any(collectives.all_gather_object(found != before)):
            run.step(data[1])
            before = picture(run)
    if refused < 4:
        wrong.append(f"only {refused} of {count} were refused")
    accelerator.load_state(good)
    if picture(run) != expected:
        wrong.append("the undamaged state was loaded with another result")
    run.close()
    return wrong


@pytest.mark.parametrize(
    ("precision", "plugin", "begin"),
    [("no", {"tp_degree": 2}, 0), ("fp16", {"pp_degree": 2}, 101), ("no", {"use_distributed_optimizer": True}, 200)],
)
def test_a_state_that_does_not_fit_changes_nothing(
    tmp_path: Path, precision: str, plugin: dict[str, Any], begin: int
) -> None:
    assert run_world(try_damage, 2, str(tmp_path), precision, plugin, begin, 20, timeout=400) == [[], []]
