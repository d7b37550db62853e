"""Five hundred corruptions of a checkpoint: each raises an error that names a file, and nothing is loaded, run or
changed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_runs import Run, as_of_another_library, same

from accel import DataLoaderConfiguration
from accel_checkpoint.manifest import MANIFEST_NAME, Manifest
from accel_checkpoint.names import CheckpointError

CORRUPTIONS = 500
OF_ANOTHER_LIBRARY = 200

Corruption = Callable[[random.Random, Path, Path, str], None]


def flip_a_bit(dice: random.Random, state: Path, other: Path, name: str) -> None:
    content = bytearray((state / name).read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    (state / name).write_bytes(content)


def flip_bits(dice: random.Random, state: Path, other: Path, name: str) -> None:
    for _ in range(dice.randint(2, 50)):
        flip_a_bit(dice, state, other, name)


def truncate(dice: random.Random, state: Path, other: Path, name: str) -> None:
    os.truncate(state / name, dice.randrange((state / name).stat().st_size))


def append(dice: random.Random, state: Path, other: Path, name: str) -> None:
    with open(state / name, "ab") as file:
        file.write(dice.randbytes(dice.randint(1, 100)))


def clear_a_range(dice: random.Random, state: Path, other: Path, name: str) -> None:
    content = bytearray((state / name).read_bytes())
    begin = dice.randrange(len(content))
    content[begin : begin + dice.randint(1, 600)] = bytes(len(content[begin : begin + dice.randint(1, 600)]))
    (state / name).write_bytes(content)


def swap_ranges(dice: random.Random, state: Path, other: Path, name: str) -> None:
    content = (state / name).read_bytes()
    first, second = sorted(dice.randrange(len(content)) for _ in range(2))
    (state / name).write_bytes(content[:first] + content[second:] + content[first:second])


def replace_by_garbage(dice: random.Random, state: Path, other: Path, name: str) -> None:
    (state / name).write_bytes(dice.randbytes((state / name).stat().st_size))


def swap_files(dice: random.Random, state: Path, other: Path, name: str) -> None:
    with_whom = dice.choice(sorted(set(os.listdir(state)) - {name}))
    os.rename(state / name, state / "aside")
    os.rename(state / with_whom, state / name)
    os.rename(state / "aside", state / with_whom)


def take_from_another_checkpoint(dice: random.Random, state: Path, other: Path, name: str) -> None:
    shutil.copy(other / name, state / name)


def delete(dice: random.Random, state: Path, other: Path, name: str) -> None:
    (state / name).unlink()


def lead_outside(dice: random.Random, state: Path, other: Path, name: str) -> None:
    """The right contents, at the other end of a link."""
    kept = state.parent / "kept"
    kept.unlink(missing_ok=True)
    os.rename(state / name, kept)
    (state / name).symlink_to(dice.choice([kept, Path("..") / "kept"]))


def edit_the_manifest(dice: random.Random, state: Path, other: Path, name: str) -> None:
    path = state / MANIFEST_NAME
    content = json.loads(path.read_text())
    listed = dice.choice(sorted(content["files"]))
    record = content["files"].pop(listed)
    edits = {
        "world_size": lambda: content.update(world_size=content["world_size"] + 1),
        "iteration": lambda: content["counters"].update(iteration=dice.randrange(100) + 50),
        "format": lambda: content.update(format=2),
        "renamed": lambda: content["files"].update(
            {dice.choice(["../", "/", "a/../../", "..\\", "C:\\", ""]) + "secret": record}
        ),
        "left out": lambda: None,
        "type": lambda: content.update({dice.choice(sorted(content)): dice.choice([None, [], 3, "text", {"a": {}}])}),
        "without": lambda: content.pop(dice.choice(sorted(content))),
    }
    edit = dice.choice(sorted(edits))
    if edit not in ("renamed", "left out"):
        content["files"][listed] = record
    edits[edit]()
    path.write_text(json.dumps(content, indent=1) + "\n")


KINDS: list[Corruption] = [
    *(flip_a_bit, flip_bits, truncate, append, clear_a_range, swap_ranges, replace_by_garbage, swap_files),
    *(take_from_another_checkpoint, delete, lead_outside, edit_the_manifest),
]


def bytes_of(folder: Path) -> dict[str, bytes | None]:
    return {path.name: None if path.is_symlink() else path.read_bytes() for path in folder.iterdir()}


class Checkpoints:
    """Two checkpoints of one run, and the run."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(mixed_precision="fp16", dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
        self.run.train(1)
        self.whole, self.other, self.state = folder / "whole", folder / "other", folder / "state"
        self.run.accelerator.save_state(self.whole)
        self.run.train(2, done=1)
        self.run.accelerator.save_state(self.other)

    def restore(self) -> dict[str, bytes | None]:
        shutil.rmtree(self.state, ignore_errors=True)
        shutil.copytree(self.whole, self.state)
        return bytes_of(self.state)


def error_of_loading(run: Run, state: Path) -> str:
    try:
        run.accelerator.load_state(state)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path)


@pytest.mark.slow  # loads seven hundred damaged checkpoints; damage of each file format has fast tests
@pytest.mark.timeout(600)  # seven hundred loads
def test_no_corruption_is_loaded(checkpoints: Checkpoints) -> None:
    run, state, dice, seen = checkpoints.run, checkpoints.state, random.Random(4), 0
    weights, optimizer = run.weights(), repr(run.optimizer.state_dict())
    whole = checkpoints.restore()
    while seen < CORRUPTIONS:
        kind, name = KINDS[seen % len(KINDS)], dice.choice(sorted(whole))
        kind(dice, state, checkpoints.other, name)
        changed = [name for name in whole if bytes_of(state).get(name) != whole[name]]
        if not changed:  # swapped with its like, or cleared where it was clear
            continue
        with pytest.raises(CheckpointError) as caught:
            run.accelerator.load_state(state)
            pytest.fail(f"{kind.__name__} of {changed} was loaded silently")
        # By the manifest of another checkpoint, every file is a wrong one.
        named = [*changed, MANIFEST_NAME] if MANIFEST_NAME not in changed else whole
        assert any(name in str(caught.value) for name in named), (kind.__name__, changed, caught.value)
        whole = checkpoints.restore()
        seen += 1
    assert same(run.weights(), weights) and repr(run.optimizer.state_dict()) == optimizer
    run.accelerator.load_state(state)
    assert not same(run.weights(), weights), (
        "the whole checkpoint was not loaded: the errors may have had another reason"
    )


@pytest.mark.slow  # loads hundreds of damaged files; damage of each file format has fast tests
@pytest.mark.timeout(600)
def test_a_damaged_state_of_another_library_never_crashes(checkpoints: Checkpoints) -> None:
    """It has no digests: what torch's own checksums do not cover can be found only where the format is hurt."""
    run, state, dice = checkpoints.run, checkpoints.state, random.Random(5)
    as_of_another_library(checkpoints.whole)
    whole = checkpoints.restore()
    run.accelerator.load_state(state)
    weights, found = run.weights(), 0
    # In weights of safetensors every bit is a number, and there is no checksum.
    names = sorted(name for name in whole if not name.endswith(".safetensors"))
    for turn in range(OF_ANOTHER_LIBRARY):
        kind, name = KINDS[turn % 7], dice.choice(names)
        kind(dice, state, checkpoints.other, name)
        message = error_of_loading(run, state)
        found += bool(message)
        assert not message or name in message, message
        assert same(run.weights(), weights)
        checkpoints.restore()
    assert found > 0.7 * OF_ANOTHER_LIBRARY


def test_cut_and_garbled_weights_of_another_library(checkpoints: Checkpoints) -> None:
    run, state, dice = checkpoints.run, checkpoints.state, random.Random(6)
    as_of_another_library(checkpoints.whole)
    weights = run.weights()
    for kind in (truncate, append, replace_by_garbage):
        for _ in range(10):
            checkpoints.restore()
            kind(dice, state, checkpoints.other, "model.safetensors")
            with pytest.raises(CheckpointError, match=r"model\.safetensors"):
                run.accelerator.load_state(state)
    assert same(run.weights(), weights)


def test_files_that_the_manifest_does_not_know_are_not_read(checkpoints: Checkpoints) -> None:
    checkpoints.restore()
    torch.save({"weight": torch.zeros(1)}, checkpoints.state / "optimizer_1.bin")
    (checkpoints.state / "model_1.safetensors").write_bytes(b"garbage")
    checkpoints.run.accelerator.load_state(checkpoints.state)


def test_a_checkpoint_that_has_lost_its_manifest(checkpoints: Checkpoints) -> None:
    checkpoints.restore()
    (checkpoints.state / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match=f"lost its {MANIFEST_NAME}"):
        checkpoints.run.accelerator.load_state(checkpoints.state)
    assert Manifest.read(checkpoints.state) is None
