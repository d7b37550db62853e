"""Engines' states whose manifest is consistent and whose contents do not fit: nothing is loaded, on any rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_changes import damaged_copies, plain
from deepspeed_runs import MISSING, loop, prepared, release

from accel_checkpoint.manifest import MANIFEST_NAME
from accel_checkpoint.names import CheckpointError
from accel_checkpoint.writer import write_manifest
from accel_state.testing import run_world

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "deepspeed is installed"), pytest.mark.timeout(600)]


def picture(parts: tuple[Any, ...]) -> str:
    """Everything that a load changes, as this rank holds it. Every rank must call it."""
    from accel.deepspeed.checkpoint import _capture_parts

    accelerator, engine, optimizer, scheduler, loader = parts
    saved = {part.name: plain(part.value) for part in _capture_parts(engine, "engine")}
    counters = [accelerator.save_iteration, optimizer.steps_taken, scheduler.state_dict(), loader.state_dict()]
    return repr([saved, plain(counters), torch.get_rng_state().tolist()])


def save(folder: str, stage: int) -> None:
    parts = prepared(stage)
    loop(parts)
    parts[0].save_state(f"{folder}/good")


def try_damage(folder: str, stage: int, begin: int, count: int) -> list[str]:
    """On every rank: the damaged states that were loaded with another result, or changed something."""
    directory = Path(folder)
    good = directory / "good"
    parts = prepared(stage, seed=1)
    accelerator = parts[0]
    collectives = accelerator.process_state.collectives
    accelerator.load_state(good)
    expected = picture(parts)
    loop(parts)
    before = picture(parts)
    assert before != expected
    copies = (
        damaged_copies(good, range(begin, begin + count), "pytorch_model/*.pt")
        if accelerator.process_index == 0
        else None
    )
    copies = collectives.broadcast_object(copies)
    wrong, refused = [], 0
    for path, what in copies.items():
        outcome, fits = "was loaded", expected
        try:
            accelerator.load_state(path)
        except CheckpointError as error:
            outcome, fits = f"changed something: {error}", before
        found = picture(parts)
        if found != fits:
            wrong.append(f"rank {accelerator.process_index}: {what} {outcome}")
        refused += fits is before
        if any(collectives.all_gather_object(found != before)):
            loop(parts)
            before = picture(parts)
    if refused < count // 2:
        wrong.append(f"only {refused} of {count} were refused")
    accelerator.load_state(good)
    if picture(parts) != expected:
        wrong.append("the undamaged state was loaded with another result")
    release(accelerator)
    return wrong


@pytest.mark.slow  # starts DeepSpeed's engines in two ranks, and writes tens of states
@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 2), (2, 1), (3, 2), (3, 1), (0, 1)])
def test_an_engines_state_that_does_not_fit_changes_nothing(stage: int, ranks: int, tmp_path: Path) -> None:
    run_world(save, 2, str(tmp_path), stage, timeout=250)
    assert run_world(try_damage, ranks, str(tmp_path), stage, 100 * stage + ranks, 25, timeout=500) == [[]] * ranks


def load_names_that_lead_out(folder: str) -> list[str]:
    """On one rank, a state of two ranks in which a parameter is named by a path that leads out of the directory."""
    directory, parts = Path(folder), prepared(1)
    before, wrong = picture(parts), []
    for kind in ("mapping", "shapes"):
        state = directory / kind
        shutil.copytree(directory / "good", state)
        for path in (state / "pytorch_model").glob("*_optim_states.pt" if kind == "mapping" else "*_model_states.pt"):
            content = torch.load(path, weights_only=False)
            groups = content["optimizer_state_dict"]["param_slice_mappings"] if kind == "mapping" else None
            for group in groups or content["param_shapes"]:
                group[str(directory / "outside")] = group.pop(next(iter(group)))
            torch.save(content, path)
        (state / MANIFEST_NAME).unlink()
        write_manifest(state, 2, {"iteration": 0})
        with pytest.raises(CheckpointError, match="other parameters"):
            parts[0].load_state(state)
        if picture(parts) != before or sorted(path.name for path in directory.iterdir())[0] != "good":
            wrong.append(kind)
    release(parts[0])
    return wrong


@pytest.mark.slow  # starts DeepSpeed's engines in two ranks
def test_names_in_an_engines_state_do_not_become_paths(tmp_path: Path) -> None:
    run_world(save, 2, str(tmp_path), 1, timeout=250)
    assert run_world(load_names_that_lead_out, 1, str(tmp_path), timeout=250) == [[]]
    assert not (tmp_path / "outside").exists()
