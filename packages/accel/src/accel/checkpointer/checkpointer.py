"""Saving and loading the full state of a training run."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_checkpoint import save_process
from accel_checkpoint.atomic_dir import recover, recover_all
from accel_checkpoint.catalog import list_checkpoints, newest_complete, newest_saved
from accel_checkpoint.checkpoint_reader import identity_of, share_of
from accel_checkpoint.consensus import BackgroundCollectives, on_all_ranks
from accel_checkpoint.names import NUMBERED, gradients_file, numbered
from accel_checkpoint.parts import Part, TextPart, copied_parts
from accel_checkpoint.remote.catalog import read_manifest
from accel_checkpoint.remote.reading import RemoteCheckpoint, copied
from accel_checkpoint.shared_memory import SharedMemory
from accel_checkpoint.uploading import Uploader, newest
from accel_checkpoint.validation import apply_changes
from accel_checkpoint.writer import BackgroundSave, StateWriter
from accel_state import get_logger
from accel_state.errors import ConfigurationError
from accel_state.paths import as_location
from accel_state.storage.transfer import written_directory
from accel_state.storage.url import Location, RemotePath
from accel_track.tracking import TrackerRun

from ..core import weights_io
from ..core.project import ProjectConfiguration
from ..setup.prepare import Preparation
from ..training.gradient_accumulation import Accumulation
from . import accumulation_state
from .contents import TrainingObjects, collect, refuse_each_node, refuse_unsavable
from .loader import StateReader

logger: Final = get_logger(__name__)

LATEST = "latest"
"""The argument of ``load_state`` for the newest complete checkpoint."""

SaveHook = Callable[[list[Any], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[Any], str], None]


@dataclass(eq=False)
class Checkpointer:
    """Saves and loads everything that a training run needs to continue; see the methods of the Accelerator."""

    prepared: Preparation
    accumulation: Accumulation
    tracking: TrackerRun
    project: ProjectConfiguration
    loaders_from_start: bool = False
    """Whether a loaded state leaves it to the script to move the loaders, as Accelerate does."""
    custom_objects: list[Any] = field(default_factory=list)
    save_hooks: OrderedDict[int, SaveHook] = field(default_factory=OrderedDict)
    load_hooks: OrderedDict[int, LoadHook] = field(default_factory=OrderedDict)
    _continues_runs: bool = False  # whether runs of a loaded state are continued, although no tracker was asked for
    _background: BackgroundSave | None = None
    _memory: SharedMemory | None = None  # of saves in the background; made by the first, as are
    _background_collectives: BackgroundCollectives | None = None
    _uploader: Uploader | None = None
    _newest_found: Location | None = None  # what `resume` and "latest" have found, on the process that looks
    _replaces: bool = False  # whether checkpoints of the directory may be replaced, as the run went on elsewhere

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no save and no upload in progress, and no buffers.
        own = ("_memory", "_background_collectives", "_background", "_uploader")
        return {**self.__dict__, **dict.fromkeys(own)}

    # -- saving ------------------------------------------------------------------------------------------------------

    def save_state(
        self, output_dir: str | os.PathLike[str] | None, safe_serialization: bool, blocking: bool
    ) -> Location:
        process, project = self.prepared.strategy.state, self.project
        target = self._target(output_dir)
        if self._background is not None:
            self.wait_for_save()
        existing = ""
        if project.automatic_checkpoint_naming and not self._replaces:
            existing = (
                f"the checkpoint {target} exists already. Load it, or set project_configuration.iteration "
                f"(now {project.iteration}) to the number to continue with."
            )
        writer = StateWriter(
            target,
            rank=process.process_index,
            world_size=process.num_processes,
            is_writer=self._is_writer,
            each_node=project.save_on_each_node,
            total_limit=project.total_limit if project.automatic_checkpoint_naming else None,
            on_device=process.device.type != "cpu",
            packs=project.pack_rank_files,
            existing=existing,
        )
        if project.upload_to is not None:
            writer.copy = self._copy_of(writer.target)
            writer.uploader = None if writer.copy is None else self._upload()
        if blocking:
            with writer.saving(process.collectives):
                self._collect(writer, safe_serialization)
        else:
            if self._memory is None or self._background_collectives is None:
                self._memory, self._background_collectives = SharedMemory(), BackgroundCollectives(process)
            collectives = self._background_collectives()
            with writer.collecting(process.collectives):
                self._collect(writer, safe_serialization)
                writer.parts, writer.on_device = copied_parts(writer.parts, self._memory), False
            self._background = BackgroundSave(writer, collectives, project.iteration, self._memory)
        project.iteration += 1
        return writer.target

    def count_save(self, output_dir: str | os.PathLike[str] | None) -> Location:
        """Return the path of a state that another process saves."""
        target = self._target(output_dir)
        self.project.iteration += 1
        return target

    def _target(self, output_dir: str | os.PathLike[str] | None) -> Location:
        """Return the path of the next state; raises ConfigurationError for settings that no state can be saved with."""
        project = self.project
        if self.prepared.strategy.shards_parameters or self.prepared.strategy.uses_engine:
            refuse_each_node(self.prepared.strategy.state, project.save_on_each_node)
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ConfigurationError(
                    "save_state needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)."
                )
            target = as_location("output_dir", output_dir)
        else:
            target = self._checkpoints() / f"checkpoint_{project.iteration}"
        if isinstance(target, RemotePath) and project.save_on_each_node:
            raise ConfigurationError(
                f"save_on_each_node=True saves on each node, but {target} is one place for all. Leave it out."
            )
        if output_dir is not None and project.automatic_checkpoint_naming:
            logger.warning_once(
                f"save_state got output_dir, which has no effect with automatic_checkpoint_naming: states are saved in "
                f"{self._checkpoints()}."
            )
        return target

    def _checkpoints(self) -> Location:
        if self.project.project_dir is None:
            raise ConfigurationError(
                "automatic_checkpoint_naming needs a directory. Give the Accelerator project_dir=..."
            )
        return as_location("project_dir", self.project.project_dir) / "checkpoints"

    @property
    def _is_writer(self) -> bool:
        """True if this process writes what is common to all ranks (of its node, with ``save_on_each_node``)."""
        process = self.prepared.strategy.state
        rank = process.local_process_index if self.project.save_on_each_node else process.process_index
        return rank == 0 and not process.stands_by

    def _collect(self, writer: StateWriter, safe_serialization: bool) -> None:
        """Give the writer the files of this rank. Every rank must call it."""
        prepared, strategy = self.prepared, self.prepared.strategy
        process = strategy.state
        collectives = process.collectives
        communicates = strategy.shards_parameters or strategy.uses_engine
        weights = list(map(strategy.weights_to_save, prepared.models))
        for model, state in zip(prepared.models, weights, strict=True):
            refuse_unsavable(model, state)
        hooks, hooked = list(self.save_hooks.values()), [False]
        if communicates or hooks:
            hooked = writer.begin_together(collectives, bool(hooks))
        else:
            writer.begin(collectives)
        if any(hooked):
            # A rank whose hook fails must not leave others waiting for it.
            agreed = on_all_ranks(collectives, f"saving {writer.target}") if communicates else nullcontext()
            with agreed, writer.directory.explaining_write_errors():
                for hook in hooks:
                    hook(list(prepared.models), weights, str(writer.directory.partial))
        objects = self._objects()
        gathered = strategy.gather_state(objects.models, weights, objects.optimizers)
        averages = list(map(strategy.average_state, objects.averages))
        if gathered is not None:
            strategy.gather_averages(averages, gathered)
            writer.finalizers = gathered.finalizers
        accumulation = self.accumulation
        step, windows = 0 if accumulation.current is None else accumulation.current.position, None
        if accumulation.has_accumulated:
            windows = accumulation_state.capture(accumulation, prepared.dataloaders, prepared.models)
        parts = collect(
            objects,
            weights if gathered is None else [],
            objects.optimizers if gathered is None else [],
            process.process_index,
            step,
            process.device_backend,
            safe_serialization,
            with_manifest=True,
            averages=averages if gathered is None else [],
        )
        if gathered is not None:
            parts += gathered.parts
        if windows is not None:
            parts.append(Part(gradients_file(process.process_index), windows, each_rank=True))
        if (self._continues_runs or self.tracking.log_with) and (runs := self.tracking.state_dict())["trackers"]:
            runs_file = numbered("trackers", process.process_index, "json")
            parts.append(TextPart(runs_file, json.dumps(runs, indent=2) + "\n", each_rank=True))
        writer.parts = parts if writer.is_writer else list(filter(attrgetter("each_rank"), parts))
        writer.counters = {
            "iteration": self.project.iteration + 1,
            "step": step,
            "optimizer_steps": prepared.optimizers[0].steps_taken if prepared.optimizers else 0,
        }

    def _upload(self) -> Uploader:
        """Return what copies checkpoints into a store, on the process that writes."""
        project = self.project
        if self._uploader is None:
            assert project.upload_to is not None
            limit = project.total_limit if project.automatic_checkpoint_naming else None
            self._uploader = Uploader(project.upload_to, None if limit is None else max(limit, 1))
        return self._uploader

    def _copy_of(self, target: Location) -> RemotePath | None:
        """Return the place of a checkpoint's copy: under the same name as in the project directory."""
        project = self.project
        if project.upload_to is None:
            return None
        if isinstance(target, RemotePath):
            logger.warning_once(f"upload_to has no effect on states that are saved in a store, such as {target}.")
            return None
        place = RemotePath(project.upload_to)
        if project.project_dir is not None:
            folder = Path(project.project_dir).resolve()
            if target.is_relative_to(folder) and target != folder:
                return place / target.relative_to(folder).as_posix()
        return place / target.name

    def _objects(self) -> TrainingObjects:
        prepared = self.prepared
        return TrainingObjects(
            models=prepared.models,
            optimizers=list(map(attrgetter("optimizer"), prepared.optimizers)),
            schedulers=list(map(attrgetter("scheduler"), prepared.schedulers)),
            dataloaders=prepared.dataloaders,
            seeded_samplers=prepared.seeded_samplers,
            scaler=prepared.precision.scaler,
            local_sgd=prepared.local_sgd,
            averages=prepared.averages,
            registered=self.custom_objects,
        )

    def wait_for_save(self) -> None:
        save, self._background = self._background, None
        if save is None:
            return
        try:
            save.wait()
        except BaseException:
            if not save.writer.committed:
                self.project.iteration = save.number  # the number was not used
            raise

    def release(self) -> None:
        """Wait for the save in the background, and give back what such saves use: a later one makes it again."""
        try:
            self.wait_for_save()
        finally:
            if self._background_collectives is not None:
                self._background_collectives.forget()
            self._memory = self._background_collectives = None

    def close(self) -> None:
        """Wait for uploads, and end the processes."""
        self.release()
        save_process.saves.stop()
        uploader, self._uploader = self._uploader, None
        if uploader is not None:
            uploader.close()

    def wait_for_uploads(self) -> None:
        with on_all_ranks(self.prepared.strategy.state.collectives, f"uploading to {self.project.upload_to}"):
            if self._uploader is not None:
                self._uploader.wait()

    @property
    def save_in_flight(self) -> bool:
        return self._background is not None and self._background.running

    def save_model(
        self,
        model: nn.Module,
        state_dict: dict[str, Any],
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str,
        safe_serialization: bool,
    ) -> None:
        refuse_unsavable(model, state_dict)
        if self._is_writer:
            place = as_location("save_directory", save_directory)
            with written_directory(place, weights_io.is_weights_file) as directory:
                weights_io.save_model_weights(state_dict, directory, max_shard_size, safe_serialization)

    def check_model_directory(self, save_directory: str | os.PathLike[str]) -> None:
        """Raise ConfigurationError if a model cannot be saved in a directory, before its weights are gathered."""
        place = as_location("save_directory", save_directory)
        if not isinstance(place, RemotePath) and place.is_file():
            raise ConfigurationError(
                f"save_directory={os.fspath(save_directory)!r} is a file. Give a directory to save the weights in."
            )
        if self.prepared.strategy.shards_parameters:
            refuse_each_node(self.prepared.strategy.state, self.project.save_on_each_node)

    def register(self, objects: tuple[Any, ...]) -> None:
        wrong = []
        for index, obj in enumerate(objects):
            if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
                wrong.append(f"item at index {index}: {obj!r}")
        if wrong:
            raise ConfigurationError(
                f"register_for_checkpointing cannot register {', '.join(wrong)}. Objects need the methods state_dict "
                "and load_state_dict. Register only such objects, or wrap these in one."
            )
        self.custom_objects.extend(objects)

    @staticmethod
    def add_hook(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
        """Add a hook to ``save_hooks`` or ``load_hooks``; the handle's ``remove()`` removes it."""
        if not callable(hook):
            raise ConfigurationError(f"a hook must be a function, not {hook!r}, a {type(hook).__name__}.")
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    # -- loading -----------------------------------------------------------------------------------------------------

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None,
        load_kwargs: dict[str, Any] | None,
        load_model_kwargs: dict[str, Any],
    ) -> None:
        prepared, strategy = self.prepared, self.prepared.strategy
        process = strategy.state
        if self._background is not None:
            self.wait_for_save()
        automatic, alone = self.project.automatic_checkpoint_naming, process.num_processes == 1
        with on_all_ranks(process.collectives, "looking for a state to load") as outcome:
            if input_dir is None and not automatic:
                raise ConfigurationError("load_state needs input_dir, because automatic_checkpoint_naming is off.")
            given = found = as_location("input_dir", LATEST if input_dir is None else input_dir)
            seen = None
            if not isinstance(given, RemotePath):
                if input_dir is None or (str(given) == LATEST and (automatic or not given.is_dir())):
                    # The newest one must be the same for all ranks, so one process looks for it.
                    seen = Path(self.project.project_dir or "")
                    found = self._newest() if process.process_index == 0 else given
                elif self._is_writer:
                    recover(given)
            outcome.value = found, None if alone else identity_of(given, seen)
        found, _ = outcome.reports[0].value
        share = (0, 1) if alone else share_of(process.process_index, outcome.reports)
        self._replaces = self.project.upload_to is not None and isinstance(found, RemotePath)
        source: AbstractContextManager[tuple[Path, RemoteCheckpoint | None]]
        if isinstance(found, RemotePath):
            source = copied(found, process, all_files=strategy.uses_engine)
        else:
            source = nullcontext((found, None))
        loading = partial(on_all_ranks, process.collectives, f"loading {found}")
        with source as (folder, remote):
            # Ranks may have to communicate to find out how models are sharded.
            layouts = None
            if strategy.shards_parameters and not strategy.uses_engine:
                layouts = {id(model): strategy.layout(model) for model in prepared.models}
            with loading():
                options = dict(load_model_kwargs)
                location = options.pop("map_location", None)
                reader = StateReader(folder, process, location, load_kwargs, remote=remote, share=share)
                reader.loaders_from_start = self.loaders_from_start
                objects, models = self._objects(), list(prepared.models)
                # Files are read while they are verified; nothing read is used before both are done.
                with reader.verifying():
                    if not self.load_hooks:
                        reader.read_state(objects, models, options, strategy, layouts)
                if self.load_hooks:
                    for hook in list(self.load_hooks.values()):
                        hook(models, str(folder))
                    reader.read_state(objects, models, options, strategy, layouts)
                runs_file = numbered("trackers", process.process_index, "json")
                runs = reader.read_trackers(runs_file) if runs_file in reader.names else None
            reader.changes.append(partial(self._conclude_load, reader, runs, found.name))
            apply_changes(reader.reversible, reader.collective, reader.changes, loading)
            if process.num_processes > 1:
                strategy.share_generators()
        if isinstance(found, Path) and self.project.upload_to is not None and found == self._newest_found:
            # The process that saved the newest checkpoint was killed before it had uploaded it.
            place = self._copy_of(found.resolve())
            if self._is_writer and place is not None:
                self._upload().upload(found, place)

    def _conclude_load(self, reader: StateReader, runs: dict[str, Any] | None, name: str) -> None:
        """Load what does not belong to an object."""
        prepared = self.prepared
        if runs is not None:
            self._continues_runs = True
            self.tracking.load_state_dict(runs)
        if reader.windows is not None or self.accumulation.has_accumulated:
            windows = reader.windows
            accumulation_state.restore(self.accumulation, windows, prepared.dataloaders, prepared.models)
        else:
            self.accumulation.current = None
            self.accumulation.gradient_state.sync_gradients = True
        if reader.manifest is not None:
            self.project.iteration = reader.manifest.counters["iteration"]
            for optimizer in prepared.optimizers[:1]:
                optimizer.steps_taken = reader.manifest.counters.get("optimizer_steps", 0)
            for scheduler in prepared.schedulers:
                scheduler.noted_steps = sum(map(attrgetter("steps_taken"), scheduler.optimizers))
        elif number := NUMBERED.fullmatch(name):
            self.project.iteration = int(number[1]) + 1
        local, active = reader.own.get("local_sgd") if reader.has_same_ranks else None, prepared.local_sgd
        if local is None or not hasattr(active, "local_sgd_steps"):
            prepared.local_sgd = active if local is None else local
        else:
            active.load_state_dict(local)
        for average in prepared.averages:
            average.count_from_here()
        # Last, because everything before may have drawn random numbers.
        reader.restore_rng()

    def _newest(self) -> Location:
        if self.project.upload_to is not None and self.project.project_dir is not None:
            found = self._newest_of_both()
            if found is None:
                raise ConfigurationError(
                    f"there is no state to load in {self.project.project_dir}, and none in {self.project.upload_to}. "
                    "Save one first, or give load_state its path."
                )
            return found
        if self.project.automatic_checkpoint_naming:
            return newest_complete(self._checkpoints())
        if self.project.project_dir is None:
            raise ConfigurationError(
                f"load_state({LATEST!r}) needs a directory to look in. Give the Accelerator project_dir=..., or a path."
            )
        return newest_saved(as_location("project_dir", self.project.project_dir))

    def _newest_of_both(self) -> Location | None:
        """Return the newest complete checkpoint of the project directory and of its copies in a store."""
        assert self.project.project_dir is not None and self.project.upload_to is not None
        folder, place = Path(self.project.project_dir), RemotePath(self.project.upload_to)
        if self.project.automatic_checkpoint_naming:
            folder, place = folder / "checkpoints", place / "checkpoints"
        if folder.is_dir():
            recover_all(folder)
        self._newest_found = newest(folder, place)
        return self._newest_found

    def newest(self, output_dir: str | os.PathLike[str] | None) -> Location | None:
        """Return the newest complete checkpoint, the same on all ranks; None if there is none.

        See ``Accelerator.resume``.
        """
        collectives = self.prepared.strategy.state.collectives
        with on_all_ranks(collectives, "looking for a state to resume from") as outcome:
            if self.project.automatic_checkpoint_naming:
                self._target(None)  # raises at once what save_state would raise after the first epoch
            if self.prepared.strategy.state.process_index == 0:
                outcome.value = self._newest_or_none(output_dir)
        newest: Location | None = outcome.reports[0].value
        return newest

    def _newest_or_none(self, output_dir: str | os.PathLike[str] | None) -> Location | None:
        if output_dir is not None:
            place = as_location("output_dir", output_dir)
            if isinstance(place, RemotePath):
                return None if read_manifest(place) is None else place
            recover(place)
            copy = None if place.is_dir() else self._copy_of(place.resolve())
            return copy if copy is not None and read_manifest(copy) else place if place.is_dir() else None
        if self.project.project_dir is None:
            raise ConfigurationError(
                "resume needs a directory to look in. Give the Accelerator project_dir=..., or "
                "SaveOnSignal(output_dir=...)."
            )
        if self.project.upload_to is not None:
            return self._newest_of_both()
        automatic = self.project.automatic_checkpoint_naming
        directory = self._checkpoints() if automatic else as_location("project_dir", self.project.project_dir)
        if not isinstance(directory, RemotePath):
            existing = next(path for path in (directory, *directory.parents) if path.exists())
            if not existing.is_dir() or not os.access(existing, os.W_OK):
                raise ConfigurationError(
                    f"states cannot be saved in {directory}: {existing} is not a directory that this user can write "
                    "to. Give the Accelerator another project_dir."
                )
            if not directory.is_dir():
                return None
            recover_all(directory)
        # What a killed process has left was never a checkpoint; a damaged checkpoint is an error.
        if all(info.unfinished for info in list_checkpoints(directory)):
            return None
        return (newest_complete if automatic else newest_saved)(directory)
