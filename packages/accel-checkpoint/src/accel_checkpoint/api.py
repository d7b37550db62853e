"""Saving and loading the state of any training loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_state import PartialState
from accel_state.arguments import check_flag, check_number
from accel_state.errors import ConfigurationError
from accel_state.paths import as_location
from accel_state.safetensors_writer import safetensors_content
from accel_state.storage.url import Location, RemotePath

from . import rng_state
from .atomic_dir import recover
from .catalog import check_keep, why_no_checkpoint
from .checkpoint_reader import CheckpointReader, identity_of, share_of
from .consensus import BackgroundCollectives, on_all_ranks
from .manifest import Manifest
from .names import NUMBERED, SHARD_TABLE_NAME, CheckpointError, rng_file
from .parts import Part, WeightsPart, copied_parts
from .remote.reading import copied
from .safe_load import read, read_safetensors
from .shared_memory import SharedMemory
from .validation import Change, apply_changes, check_optimizer, loading, loading_weights
from .writer import BackgroundSave, StateWriter


def save(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    step: int = 0,
    per_rank: Collection[str] = (),
    rng: bool = True,
    keep: int | None = None,
) -> Location:
    """Save the state of a training loop, and return when it is complete and on the disk.

    The directory gets its name only when every file in it is written and flushed; until then, and if saving fails on
    any rank, an older checkpoint of that name is unchanged. Every rank must call it, with the same keys.

    Args:
        state: by name, objects with ``state_dict`` and ``load_state_dict`` (models, optimizers, schedulers, loaders),
            tensors, or plain values: numbers, texts, and lists, tuples and dictionaries of all these. Every rank
            writes its own parts of sharded tensors (DTensors).
        path: the directory of this checkpoint, which replaces an older one, or the URL of a place in object storage.
        step: the number of optimizer steps taken, which ``accel checkpoint list`` shows.
        per_rank: the names whose values differ between ranks, such as loaders: every rank saves its own. Of the others
            rank 0 saves what it has.
        rng: also save the states of the random number generators of python, numpy, torch and the device, of each rank.
        keep: delete all but this many of the checkpoints next to it that are named ``checkpoint_<number>``, as this
            one must be, those with the lowest numbers first; None deletes none.

    Returns:
        The path.

    Raises:
        CheckpointError: saving failed on some rank, or the state of an object could not be loaded again.
        ConfigurationError: an argument that cannot be used; ranks whose sharded tensors (DTensors) have other names.
    """
    process = PartialState()
    saving = _Saving(process, state, as_location("path", path), step, per_rank, rng, keep)
    with saving.writer.saving(process.collectives):
        saving.collect(None)
    return saving.writer.target


class AsyncSaver:
    """Saves in the background: a save blocks for the copy of the state to host memory, and another process writes it.

    One save runs at a time: the next one waits for it. The host memory of the copies is kept for the next save, and so
    is the process, which ends with this one. A thread writes states below 8 MiB, and those that the process cannot read
    or share (classes of the script itself, systems other than Linux). As a context manager it waits at the end of the
    block, and gives back its memory and its process group.
    """

    def __init__(self) -> None:
        self._process = PartialState()
        self._memory = SharedMemory()
        self._collectives = BackgroundCollectives(self._process)
        self._running: BackgroundSave | None = None
        self._count = 0

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        finally:
            self._collectives.forget()
            self._memory = SharedMemory()

    @property
    def in_flight(self) -> bool:
        """True if a save is still being written on this rank."""
        return self._running is not None and self._running.running

    def save(
        self,
        state: Mapping[str, Any],
        path: str | os.PathLike[str],
        *,
        step: int = 0,
        per_rank: Collection[str] = (),
        rng: bool = True,
        keep: int | None = None,
    ) -> Location:
        """Copy the state, and write it in the background; arguments and errors are those of :func:`save`.

        Raises:
            CheckpointError: the previous save failed, or copying did.
        """
        self.wait()
        saving = _Saving(self._process, state, as_location("path", path), step, per_rank, rng, keep)
        collectives = self._collectives()
        with saving.writer.collecting(self._process.collectives):
            saving.collect(self._memory)
        self._count += 1
        self._running = BackgroundSave(saving.writer, collectives, self._count, self._memory)
        return saving.writer.target

    def wait(self) -> None:
        """Return when the last save has ended. Every rank must call it.

        Raises:
            CheckpointError: it failed on some rank.
        """
        running, self._running = self._running, None
        if running is not None:
            running.wait()


def load(
    path: str | os.PathLike[str],
    state: Mapping[str, Any] | None = None,
    *,
    rng: bool = True,
    map_location: Any = "cpu",
    strict: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint of :func:`save`: everything, or nothing if any part of it cannot be loaded on any rank.

    Files are compared with their digests, and reading them runs no code. Every rank must call it.

    Args:
        path: the checkpoint, also as a URL.
        state: objects to load in place, by the names they were saved under.
        rng: also restore the random number generators of this rank, if they were saved. A rank that did not exist
            then gets a seed of its own, which is the same whenever this checkpoint is loaded.
        map_location: where tensors are read to.
        strict: models must have exactly the weights that were saved.

    Returns:
        What was saved under the other names: values, and the state dicts of objects. Sharded tensors are whole in it;
        objects get theirs as they are sharded now, on any number of ranks.

    Raises:
        CheckpointError: files are missing or damaged, or do not fit the objects.
        ConfigurationError: there is no checkpoint there.
    """
    process = PartialState()
    place = as_location("path", path)
    agreed = partial(on_all_ranks, process.collectives, f"loading {place}")
    with agreed() as opened:
        if not isinstance(place, RemotePath):
            recover(place)
        opened.value = place, identity_of(place)
    place, _ = opened.reports[0].value
    share = share_of(process.process_index, opened.reports)
    source = copied(place, process, all_files=True) if isinstance(place, RemotePath) else nullcontext((place, None))
    with source as (folder, _):
        with agreed():
            loading_state = _Loading(folder, process, dict(state or {}), rng, map_location, strict, share)
            loading_state.read_state()
        apply_changes(loading_state.changes, [], loading_state.calls, agreed)
    return loading_state.values


@dataclass
class _Saving:
    """One save on one rank."""

    process: PartialState
    state: Mapping[str, Any]
    target: Location
    step: int
    per_rank: Collection[str]
    rng: bool
    keep: int | None

    def __post_init__(self) -> None:
        for name in self.state:
            if not isinstance(name, str) or not name.isidentifier():
                raise ConfigurationError(f"the name {name!r} of a part of the state must be an identifier.")
        self.step = int(check_number("step", self.step, at_least=0, whole=True))
        check_flag("rng", self.rng)
        listed = isinstance(self.per_rank, (list, tuple, set, frozenset))
        if not listed or set(self.per_rank) - set(self.state):
            raise ConfigurationError(
                f"per_rank={self.per_rank!r} must be a list of names of the state: {', '.join(self.state)}."
            )
        check_keep(self.keep)
        if self.keep is not None and not NUMBERED.fullmatch(self.target.name):
            raise ConfigurationError(
                f"keep={self.keep} counts checkpoints named checkpoint_<number>, and this one is {self.target.name!r}. "
                f"Save to {self.target.parent / f'checkpoint_{self.step}'}, for example."
            )
        self.writer = StateWriter(
            self.target,
            rank=self.process.process_index,
            world_size=self.process.num_processes,
            is_writer=self.process.is_main_process,
            total_limit=self.keep,
            counters={"iteration": self.step + 1, "step": 0, "optimizer_steps": self.step},
        )

    def collect(self, memory: SharedMemory | None) -> None:
        """Give the writer the state as it is now; with ``memory``, a copy of it there. Every rank must call it."""
        writer, collectives = self.writer, self.process.collectives
        contents = {}
        for name, value in self.state.items():
            contents[name] = value.state_dict() if hasattr(value, "state_dict") else value
        sharded = {name: content for name, content in contents.items() if _holds_sharded(content)}
        parts = []
        for name, content in contents.items():
            if name not in sharded:
                parts.append(self._part(name, content))
        if sharded:
            parts += self._sharded(sharded)
        else:
            writer.begin(collectives)
        if self.rng:
            state = rng_state.capture_rng(self.process.device_backend)
            parts.append(Part(rng_file(writer.rank), state, each_rank=True, is_small=True))
        parts = [part for part in parts if writer.is_writer or part.each_rank]
        writer.parts = parts if memory is None else copied_parts(parts, memory)
        writer.on_device = memory is None and self.process.device.type != "cpu"

    def _part(self, name: str, content: Any) -> Part:
        each = name in self.per_rank
        stem = f"{name}.rank{self.writer.rank}" if each else name
        plain = isinstance(content, Mapping) and all(type(item) is torch.Tensor for item in content.values())
        if isinstance(self.state[name], nn.Module) and plain and content:
            return WeightsPart(f"{stem}.safetensors", safetensors_content(content), each_rank=each)
        return Part(f"{stem}.bin", content, name, each)

    def _sharded(self, contents: Mapping[str, Any]) -> list[Part]:
        """Return the files of states with sharded tensors, for which ranks communicate."""
        from .sharded.nested import SplitState

        split = {name: SplitState(content) for name, content in contents.items()}
        writer, collectives = self.writer, self.process.collectives
        for name in split:
            if name in self.per_rank:
                raise ConfigurationError(
                    f"per_rank has {name!r}, whose sharded tensors (DTensors) all ranks write together. Leave it out "
                    "of per_rank."
                )
        digests = writer.begin_together(collectives, [(name, state.digest()) for name, state in split.items()])
        if len(digests) < writer.world_size or any(digest != digests[0] for digest in digests):
            raise ConfigurationError(
                f"{', '.join(split)}: ranks hold sharded tensors (DTensors) of different names. Give every rank the "
                "same state, or save what differs with Accelerator.save_state."
            )
        parts: list[Part] = []
        finalizers = []
        for name, state in split.items():
            files, finalize = state.parts(name, collectives)
            parts += files
            finalizers.append(finalize)
        writer.finalizers = finalizers
        return parts


class _Loading(CheckpointReader):
    """One load on one rank."""

    def __init__(
        self,
        folder: Path,
        process: PartialState,
        objects: dict[str, Any],
        rng: bool,
        map_location: Any,
        strict: bool,
        share: tuple[int, int],
    ) -> None:
        reason = why_no_checkpoint(folder)
        if reason is not None:
            raise ConfigurationError(reason)
        super().__init__(folder, process, share=share)
        self.objects, self.rng, self.map_location, self.strict = objects, rng, map_location, strict
        self.changes: list[Change] = []
        self.calls: list[Callable[[], Any]] = []
        self.values: dict[str, Any] = {}

    def read_state(self) -> None:
        """Read and check everything, and note what loads it."""
        if self.manifest is None:
            raise CheckpointError(f"{self.folder} has no manifest: it is incomplete, or was not saved by this library.")
        files = self._files_by_name(self.manifest)
        missing = sorted(set(self.objects) - set(files))
        if missing:
            raise CheckpointError(
                f"{self.folder} has no state of {', '.join(missing)}. It holds {', '.join(sorted(files))}: load these "
                "names, or choose another checkpoint."
            )
        with self.verifying():
            for name, file in files.items():
                self._read(name, self.folder / file)
            if self.rng and self.own_file in self.rank_names:
                own, path = self.read(self.own_file), self.folder / self.own_file
                self.calls.append(rng_state.restoring_rng(own, self.process.device_backend, path, self.new_rank))

    def _files_by_name(self, manifest: Manifest) -> dict[str, str]:
        files = {}
        for file in manifest.files:
            stem, _, suffix = file.rpartition(".")
            name, separator, number = stem.partition(".rank")
            if suffix not in ("bin", "safetensors"):
                continue
            if not separator or not number.isdigit():
                files[stem] = file
            elif int(number) == self.rank:
                files[name] = file
            elif self.new_rank is not None and name in self.objects:
                raise CheckpointError(
                    f"{self.folder} holds {name} of {manifest.world_size} ranks, and this is rank {self.rank}. Load it "
                    f"on {manifest.world_size} ranks, or leave {name} out."
                )
        return files

    def _read(self, name: str, path: Path) -> None:
        if path.suffix == ".safetensors":
            content: Any = read_safetensors(path, self.map_location)
        else:
            content = read(path, self.map_location, mapped=True)
        target = self.objects.get(name)
        is_sharded = f"{name}/{SHARD_TABLE_NAME}" in self.names
        if is_sharded or _is_sharded(target):
            from .sharded.nested import joined

            location = self.map_location if isinstance(self.map_location, (str, torch.device)) else "cpu"
            content = joined(content, self.folder / name if is_sharded else None, target, torch.device(location))
        if name not in self.objects:
            self.values[name] = content
            return
        if isinstance(target, nn.Module):
            self.calls.append(loading_weights(target, content, path, self.strict))
        elif hasattr(target, "load_state_dict"):
            if isinstance(target, Optimizer):
                check_optimizer(target, content, path)
            self.changes.append(loading(target, content, path))
        else:
            raise ConfigurationError(
                f"{name} is a {type(target).__name__}, which has no load_state_dict. Leave it out of state: load() "
                "returns the value."
            )


def _is_sharded(target: Any) -> bool:
    """Return True if a model or an optimizer has sharded parameters."""
    if isinstance(target, Optimizer):
        return _holds_sharded(target.param_groups)
    return isinstance(target, nn.Module) and _holds_sharded([*target.parameters(), *target.buffers()])


def _holds_sharded(value: Any) -> bool:
    """Return True if a nested state has tensors of which each rank holds a part."""
    module = sys.modules.get("torch.distributed.tensor")  # which defines them
    pending = [value]
    while module is not None and pending:
        item = pending.pop()
        if isinstance(item, module.DTensor):
            return True
        if isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, (list, tuple)):
            pending += item
    return False
