"""Reading a checkpoint: everything is read and checked first, then loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Final

from accel_checkpoint.checkpoint_reader import CheckpointReader, number_of
from accel_checkpoint.names import (
    AVERAGE_NAME,
    CUSTOM_FILE,
    FSDP_MODEL_NAME,
    GRADIENTS_FILE,
    LOADER_NAME,
    MANIFEST_NAME,
    OPTIMIZER_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    SHARD_FILE,
    SHARD_SUFFIX,
    SHARD_TABLE_NAME,
    CheckpointError,
    custom_file,
    engine_folders,
    gradients_file,
    is_checkpoint_file,
    numbered,
    numbered_files,
    require_files,
    require_number,
)
from accel_checkpoint.remote.reading import RemoteCheckpoint
from accel_checkpoint.rng_state import restoring_rng
from accel_checkpoint.safe_load import MANIFEST_MARK, read, read_safetensors
from accel_checkpoint.validation import (
    Change,
    check_optimizer,
    check_sampler,
    check_scaler,
    check_scheduler,
    loading,
    loading_attributes,
    loading_weights,
)
from accel_data import PreparedLoader, SeedableRandomSampler
from accel_state import PartialState, get_logger
from accel_state.humanize import counted

from ..contract.strategy import Strategy
from ..core.types import Layout
from ..core.unwrap import clean_name, extract_model_from_parallel
from ..core.weights_io import MODEL_NAME, SAFE_MODEL_NAME
from . import accumulation_state
from .contents import TrainingObjects

logger: Final = get_logger(__name__)

# A file of an optimizer, complete, sharded or of one rank; group 1 is the optimizer's index.
_OPTIMIZER_FILE = re.compile(rf"{re.escape(OPTIMIZER_NAME)}(?:_(\d+))?(?:_rank\d+)?(?:\.bin|/.*)")


class StateReader(CheckpointReader):
    """Reads the state of an Accelerator from one checkpoint on one rank.

    Attributes:
        reversible: what is loaded first, on all ranks or on none.
        collective: what is loaded next: sharded optimizers.
        changes: the calls that load what was checked before: weights, and the state of engines.
        windows: the open accumulation windows; None if there were none.
        own: the contents of this rank's file.
        restore_rng: restores the random number generators.
        strict: whether a checkpoint with more objects than there are to load is refused.
    """

    def __init__(
        self,
        folder: Path,
        process: PartialState,
        map_location: Any = None,
        load_kwargs: dict[str, Any] | None = None,
        rank: int | None = None,
        remote: RemoteCheckpoint | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__(folder, process, rank, remote, share)
        if self.manifest is not None and self.own_file not in self.rank_names:
            raise CheckpointError(
                f"{self.folder} has no {self.own_file}: it was saved on {self.manifest.world_size} processes with "
                f"save_on_each_node, and rank {self.rank} was on another node. Start the same ranks "
                "on each node, or copy the directories of all nodes into one."
            )
        self.load_kwargs = load_kwargs
        self.reversible: list[Change] = []
        self.collective: list[Change] = []
        self.changes: list[Callable[[], Any]] = []
        self.windows: dict[str, Any] | None = None
        self.own: dict[str, Any] = {}
        self.restore_rng: Callable[[], None]
        self.strict: bool = False
        self.loaders_from_start = False
        """Whether the epochs of loaders begin with their first batch, for scripts that leave out batches themselves."""
        self._left: dict[str, str] = {}  # what the checkpoint holds and nothing is prepared for, by kind of object
        where = "cpu" if map_location is None else map_location
        self.map_location = process.device if where == "on_device" else where

    def read_state(
        self,
        objects: TrainingObjects,
        models: list[Any],
        options: dict[str, Any],
        strategy: Strategy | None = None,
        layouts: Mapping[int, Layout] | None = None,
    ) -> None:
        """Read everything, and note in :attr:`changes` what loads it."""
        self.strict = options.get("strict") is True
        saved_optimizers = set()
        for match in filter(None, map(_OPTIMIZER_FILE.fullmatch, self.names)):
            saved_optimizers.add(match[1] or "0")
        trains_less = not self.strict and len(objects.optimizers) < len(saved_optimizers)
        own = self.read(self.own_file)
        self.own = own if isinstance(own, dict) else {}
        if self.manifest is None and self.own.get(MANIFEST_MARK):
            raise CheckpointError(
                f"{self.folder} has lost its {MANIFEST_NAME}: it is incomplete. Copy it again, or choose another one."
            )
        engine_changes = None if strategy is None else strategy.plan_state(self, models, options)
        if engine_changes is not None:
            self.changes += engine_changes
        elif strategy is not None and (layouts is not None or any(map(SHARD_FILE.search, self.names))):
            self._read_sharded(models, objects.optimizers, options, strategy, layouts)
        else:
            self._read_models(models, options)
            for optimizer, state, path in self._read_objects(OPTIMIZER_NAME, objects.optimizers):
                check_optimizer(optimizer, state, path)
                self.reversible.append(loading(optimizer, state, path))
        if strategy is not None and (objects.averages or self.own.get("averages")):
            self._read_averages(objects.averages, strategy, layouts)
        for scheduler, state, path in self._read_objects(SCHEDULER_NAME, objects.schedulers):
            check_scheduler(scheduler, state, path)
            self.reversible.append(loading(scheduler, state, path))
        if trains_less and objects.dataloaders:
            # Without its optimizers this is no continued training, so its loaders begin at their start.
            self._left["dataloader"] = "the optimizers, so that dataloaders begin at their start"
        else:
            self._read_loaders(objects.dataloaders, objects.seeded_samplers)
        if objects.scaler is not None and (objects.optimizers or SCALER_NAME in self.names):
            state = self.read(SCALER_NAME)
            check_scaler(objects.scaler, state, self.folder / SCALER_NAME)
            self.reversible.append(loading(objects.scaler, state, self.folder / SCALER_NAME))
        if strategy is not None:  # otherwise registered objects and windows are loaded on their own
            saved = list(filter(CUSTOM_FILE.fullmatch, self.names))
            self.check_count("registered object", len(saved), len(objects.registered))
            for index, obj in enumerate(objects.registered):
                name = custom_file(index)
                self.reversible.append(loading(obj, self.read(name), self.folder / name))
            windows = sorted(filter(GRADIENTS_FILE.fullmatch, self.names), key=number_of)
            if windows and self._left.keys() & {"model", "optimizer", "dataloader"}:
                self._left["windows"] = "open accumulation windows"
                self.read_names.update(windows)
            elif windows and self.manifest is not None:
                self._read_windows(windows, objects.dataloaders, objects.models, strategy)
        path = self.folder / self.own_file
        self.restore_rng = restoring_rng(self.own, self.process.device_backend, path, self.new_rank)
        require_number(self.own.get("step", 0), f"{path}: step")
        hooks = self.own.get("comm_hooks", {}) if self.has_same_ranks else {}
        for index, model in enumerate(models):
            if hasattr(model, "load_comm_hook"):
                self.changes.insert(0, partial(model.load_comm_hook, hooks.get(index)))
        if self._left:
            logger.warning(
                "%s was loaded in part: nothing is prepared or registered for %s. load_state(strict=True) refuses such "
                "a checkpoint.",
                self.folder,
                ", ".join(self._left.values()),
            )
        if (self.load_kwargs or {}).get("weights_only", True):
            # A file that could run code is refused even if nothing needs it. Each rank looks at its share: an error of
            # one is an error of all.
            unneeded = (".safetensors", ".json", SHARD_TABLE_NAME, SHARD_SUFFIX)
            first, ranks = self._share
            for name in sorted(self.names)[first::ranks]:
                if name not in self.read_names and not name.endswith(unneeded) and is_checkpoint_file(name):
                    read(self.folder / name, mapped=True)

    def check_count(self, kind: str, saved: int, present: int) -> None:
        """Note how many objects of a kind are left; raise CheckpointError if there are too few of them to load."""
        if present > saved or (self.strict and present < saved):
            raise CheckpointError(
                f"{self.folder} has {counted(saved, kind)} and there {'is' if present == 1 else 'are'} {present} to "
                "load. Prepare and register the same objects as when it was saved."
            )
        if present < saved:
            self._left[kind] = f"{saved - present} of {counted(saved, kind)}"

    def read_trackers(self, name: str) -> dict[str, Any]:
        """Return the runs of trackers, from a file of the checkpoint."""
        try:
            runs = json.loads((self.folder / name).read_text(encoding="utf-8"))
            for run in runs["trackers"].values():
                if not isinstance(run["run_id"], str) or not isinstance(run.get("step"), (int, NoneType)):
                    raise ValueError(f"{run!r} is not a run_id and a step")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{self.folder / name} does not hold the runs of trackers ({type(error).__name__}: {error}). Choose "
                "another checkpoint."
            ) from error
        return dict(runs)

    def _read_models(self, models: list[Any], options: dict[str, Any]) -> None:
        stem, suffix = SAFE_MODEL_NAME, "safetensors"
        saved = numbered_files(self.names, stem, suffix)
        if not saved:
            stem, suffix = MODEL_NAME, "bin"
            saved = numbered_files(self.names, stem, suffix)
        if not saved:
            self._refuse_engines()
        self.check_count("model", len(saved), len(models))
        for index, model in enumerate(models):
            name = numbered(stem, index, suffix)
            require_files(self.folder, [name], self.names)
            self.read_names.add(name)
            path = self.folder / name
            if suffix == "safetensors":
                weights = read_safetensors(path, self.map_location)
            else:
                weights = read(path, self.map_location, mapped=True)
            inner = extract_model_from_parallel(model, keep_torch_compile=False)
            self.changes.append(loading_weights(inner, weights, path, clean=clean_name, **options))

    def _refuse_engines(self) -> None:
        if engine_folders(self.names):
            raise CheckpointError(
                f"{self.folder} was saved by DeepSpeed. Load it with DeepSpeed, or consolidate its weights with the "
                "zero_to_fp32.py in it, and load these into the model before prepare()."
            )

    def _read_sharded(
        self,
        models: list[Any],
        optimizers: list[Any],
        options: dict[str, Any],
        strategy: Strategy,
        layouts: Mapping[int, Layout] | None,
    ) -> None:
        from ..fsdp.checkpoint.files import plan
        from ..fsdp.checkpoint.state_dicts import owner_of

        others = [name for name in options if name != "strict"]
        if others:
            logger.warning_once(f"load_state got {', '.join(others)}, which has no effect on sharded models.")
        if layouts is None:
            layouts = {id(model): strategy.layout(model) for model in models}
        reader = self._sharded_reader()
        owned = []
        for index, optimizer in enumerate(optimizers):
            model = owner_of(optimizer, models, f"optimizer {index}")
            owned.append((layouts[id(model)], optimizer, strategy.parameter_names(model, optimizer)))
        strict = bool(options.get("strict", True))
        saved = reader.count(FSDP_MODEL_NAME, SAFE_MODEL_NAME, MODEL_NAME)
        if not saved:
            self._refuse_engines()
        self.check_count("model", saved, len(models))
        self.check_count("optimizer", reader.count(OPTIMIZER_NAME), len(owned))
        changes, self.collective = plan(reader, [layouts[id(model)] for model in models], owned, strict)
        self.changes += changes
        self.read_names |= reader.used

    def _sharded_reader(self) -> Any:
        from ..fsdp.checkpoint.files import ShardedReader

        return ShardedReader(
            directory=self.folder,
            names=set(self.names),
            rank=self.rank,
            world_size=self.process.num_processes,
            read=self.read,
            read_safetensors=lambda name: read_safetensors(self.folder / name, "cpu"),
            source=lambda directory: None if self.remote is None else self.remote.source(directory.name),
        )

    def _read_averages(self, averages: Sequence[Any], strategy: Strategy, layouts: Mapping[int, Layout] | None) -> None:
        """Read the moving averages, which are loaded after the weights that they are averages of."""
        from ..fsdp.checkpoint.files import OF_AVERAGES

        reader = self._sharded_reader()
        self.check_count("moving average", reader.count(AVERAGE_NAME), len(averages))
        updates = self.own.get("averages", [])
        for index, average in enumerate(averages):
            layout = strategy.layout(average.model) if layouts is None else layouts[id(average.model)]
            state = reader.model(index, layout, OF_AVERAGES)
            number = updates[index] if isinstance(updates, list) and index < len(updates) else None
            number = require_number(number, f"{self.folder / self.own_file}: averages")
            self.changes.append(average.plan_load(state, layout, number, self.folder))
        self.read_names |= reader.used

    def _read_objects(self, stem: str, objects: list[Any]) -> list[tuple[Any, Any, Path]]:
        """Return the objects of a kind, what was saved of them, and where."""
        self.check_count(stem, len(numbered_files(self.names, stem, "bin")), len(objects))
        read = []
        for index, obj in enumerate(objects):
            name = numbered(stem, index, "bin")
            read.append((obj, self.read(name), self.folder / name))
        return read

    def _read_loaders(self, dataloaders: list[Any], samplers: Mapping[int, SeedableRandomSampler]) -> None:
        for index, sampler in samplers.items():
            name = numbered(SAMPLER_NAME, index, "bin")
            if name not in self.names and not (self.strict and self.manifest is not None):
                continue
            seed = self.read(name)
            if not isinstance(seed, dict) or not {"initial_seed", "epoch"} <= set(seed):
                raise CheckpointError(f"{self.folder / name} does not hold a sampler's initial_seed and epoch.")
            values = {key: seed[key] for key in ("initial_seed", "epoch")}
            check_sampler(values, self.folder / name)
            self.reversible.append(loading_attributes(sampler, values, self.folder / name))
        # The rank's own state of a loader has its generators; on another number of ranks the common part is read.
        positions = {}
        if self.manifest is not None and self.manifest.world_size == self.process.num_processes:
            positions = self.own.get("dataloaders", {})
        resumable = []
        for index, loader in enumerate(dataloaders):
            if hasattr(loader, "load_state_dict"):
                resumable.append(index)
        saved = len(numbered_files(self.names, LOADER_NAME, "bin"))
        if self.manifest is not None and (self.strict or saved >= len(resumable)):
            self.check_count("dataloader", saved, len(resumable))
        elif self.manifest is not None:
            logger.warning(
                "%s has %d dataloaders and there are %d to load: the last ones begin at their start.",
                self.folder,
                saved,
                len(resumable),
            )
        for index in resumable:
            loader, name = dataloaders[index], numbered(LOADER_NAME, index, "bin")
            # Other libraries save positions only for some kinds of loader.
            if index not in positions and name not in self.names:
                continue
            # The file that all ranks share is checked even if this rank has a position of its own.
            found = [self.read(name)] if name in self.names else []
            if index in positions:
                found.append(positions[index])
            for state in found:
                if not isinstance(state, dict) or not state:
                    raise CheckpointError(
                        f"{self.folder / name} holds {state!r}, not the position of a loader. Choose another one."
                    )
            if isinstance(loader, PreparedLoader):
                point = list(map(loader.resume_point, found))[-1]
                # Accelerator.resume, which completes a finished epoch, takes these back.
                self.changes.append(partial(loader.resume_at, point, pass_over_finished=True))
                if self.loaders_from_start:
                    self.changes.append(loader.rewind)
            else:
                self.changes.insert(0, partial(loader.load_state_dict, found[-1]))  # torchdata's, which may refuse it

    def _read_windows(self, names: list[str], loaders: list[Any], models: list[Any], strategy: Strategy) -> None:
        """Read the open accumulation windows of this rank, or a share of all on another number of ranks."""
        assert self.manifest is not None
        if not strategy.gradients.can_be_saved:
            self.read_names.update(names)
            logger.warning(
                "%s holds the gradients of an open accumulation window, which %s cannot restore: a new window starts.",
                self.folder,
                type(strategy).__name__,
            )
            return
        own_name = gradients_file(self.rank)
        ranks, world = strategy.averaging_collectives.world_size, self.process.num_processes
        first = self._read_window(names[0])
        same_ranks = self.manifest.world_size == world and first.get("averaging_ranks", world) == ranks
        # Where ranks hold shards of a model, they take them from the average of what all ranks have saved.
        own_only = same_ranks and not (strategy.shards_parameters and first["gradients"])
        used = [own_name] if own_only else names
        saved = [self._read_window(name) for name in used]
        for name, window in [*zip(used, saved, strict=True), (names[0], first)]:
            accumulation_state.check(window, str(self.folder / name), loaders, models, strategy.gradients)
        if own_only:
            self.windows = {**saved[0], "averaged": first.get("averaged", {})}
        else:
            self.windows = accumulation_state.combine(saved, ranks)

    def _read_window(self, name: str) -> dict[str, Any]:
        content = self.read(name, mapped=True)
        if not isinstance(content, dict):
            raise CheckpointError(f"{self.folder / name} does not hold the gradients of accumulation windows.")
        return content
