"""Reading a checkpoint: everything is read and looked at first, then put in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_data import SeedableRandomSampler, get_sampler
from accel_state import PartialState, get_logger
from accel_state.errors import ConfigurationError

from ..core.unwrap import clean_name, extract_model_from_parallel, id_tensor_storage
from ..strategies.base import Strategy
from . import contents
from .accumulation_state import check, combine, gradients_file, gradients_files
from .digests import Workers
from .manifest import MANIFEST_NAME, Manifest, Verification
from .names import SHARD_SUFFIX, SHARD_TABLE_NAME, holds_engines, holds_shards
from .safe_load import (
    LOADER_NAME,
    MANIFEST_MARK,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    CheckpointError,
    custom_file,
    custom_files,
    is_file_of_a_state,
    numbered,
    numbered_files,
    read,
    require_count,
    require_files,
    rng_file,
    start_checking_sums,
)
from .weights_io import MODEL_NAME, SAFE_MODEL_NAME

if TYPE_CHECKING:
    from ..core.types import Layout


logger = get_logger(__name__)


class StateReader:
    """Reads one checkpoint for one rank.

    Args:
        folder: the checkpoint.
        rank: this process.
        map_location: where tensors are read to: None or "cpu", "on_device", or as in ``torch.load``.
        load_kwargs: further arguments of ``torch.load``.

    Raises:
        ConfigurationError: there is no such folder.
    """

    def __init__(
        self, folder: Path, rank: int, map_location: Any = None, load_kwargs: dict[str, Any] | None = None
    ) -> None:
        if not folder.is_dir():
            raise ConfigurationError(
                f"{folder} is no folder, so there is no state to load from it. Give the path that save_state returned."
            )
        self.folder = folder
        self.rank = rank
        self.manifest = Manifest.read(folder)
        self._process = PartialState()
        self._map_location = self._process.device if map_location == "on_device" else map_location or "cpu"
        self._load_kwargs = load_kwargs
        self._own: dict[str, Any] = {}
        self._changes: list[Callable[[], Any]] = []
        self._read_names: set[str] = set()
        self.windows: dict[str, Any] | None = None
        """Accumulation windows to be put back; None if none were open."""

    @property
    def step(self) -> int:
        """Micro batches in the accumulation window that was open."""
        return int(self._own.get("step", 0))

    def verify(self) -> None:
        """Compare the files with the manifest, alone; see :meth:`start_verification`."""
        with Workers() as workers:
            check = self.start_verification(workers)
        check()

    def start_verification(self, workers: Workers, share: tuple[int, int] = (0, 1)) -> Callable[[], None]:
        """Begin to compare all files with the manifest.

        Files of other libraries, which come without a manifest, are compared with the checksums that torch's format
        has.

        Args:
            workers: who does it.
            share: (i, n) for the i-th of n processes that see the same files and divide the work.

        Returns:
            What gives the verdict when the workers' block has been left: it raises CheckpointError, which names the
            damaged file.

        Raises:
            CheckpointError: files are missing or of another size.
        """
        if self.manifest is None:
            return start_checking_sums(self.folder, workers)
        if self._own_file() not in self.manifest.files:
            raise CheckpointError(
                f"{self.folder} has no {self._own_file()}: it was saved on {self.manifest.world_size} processes with "
                "save_on_each_node, "
                f"and rank {self.rank} was on another node. Start the same ranks on each node, or put the folders of "
                "all nodes together."
            )
        return Verification(self.manifest, self.folder, workers, share).conclude

    @cached_property
    def _names(self) -> list[str]:
        """The files of this checkpoint. With a manifest they are its own; what else lies in the folder has not been
        verified.
        """
        if self.manifest is not None:
            return list(self.manifest.files)
        return [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()]

    @property
    def names(self) -> list[str]:
        """The files of this checkpoint."""
        return self._names

    @property
    def load_kwargs(self) -> dict[str, Any] | None:
        """Further arguments of ``torch.load``."""
        return self._load_kwargs

    @property
    def is_new_rank(self) -> bool:
        """Whether this rank did not exist when the state was saved, on fewer processes than there are now."""
        return self.manifest is not None and self.rank >= self.manifest.world_size

    def _own_file(self) -> str:
        """The generators of this rank; those of the lowest one that was saved, if this rank did not exist."""
        if not self.is_new_rank:
            return rng_file(self.rank)
        ranks = [
            rank for rank in range(self.manifest.world_size if self.manifest else 0) if rng_file(rank) in self._names
        ]
        return rng_file(ranks[0] if ranks else 0)

    def read_all(
        self,
        models: list[Any],
        optimizers: list[Any],
        schedulers: list[Any],
        dataloaders: list[Any],
        scaler: torch.amp.GradScaler | None,
        load_model_kwargs: dict[str, Any],
        strategy: Strategy | None = None,
        layouts: list[Layout] | None = None,
    ) -> None:
        """Read everything but registered objects; see :func:`accel.checkpointing.load_accelerator_state`.

        Args:
            models: the models.
            optimizers: the optimizers.
            schedulers: the schedulers.
            dataloaders: the loaders.
            scaler: the loss scaler.
            load_model_kwargs: for ``load_state_dict`` of the models.
            strategy: what has prepared the models; with it, states are read that any strategy has saved.
            layouts: of the models, where the strategy divides them among ranks.
        """
        self._require([self._own_file()])
        own = self._read(self._own_file())
        self._own = own if isinstance(own, dict) else {}
        if self.manifest is None and self._own.get(MANIFEST_MARK):
            raise CheckpointError(
                f"{self.folder} has lost its {MANIFEST_NAME}: it is not whole. Copy it again, or choose another one."
            )
        engine_changes = None if strategy is None else strategy.plan_state(self, models, load_model_kwargs)
        if engine_changes is not None:
            self._changes += engine_changes
        elif strategy is not None and (layouts is not None or holds_shards(self._names)):
            self._read_divided(models, optimizers, load_model_kwargs, strategy, layouts)
        else:
            self._read_models(models, load_model_kwargs)
            self._read_objects(OPTIMIZER_NAME, optimizers)
        self._read_objects(SCHEDULER_NAME, schedulers)
        self._read_loaders(dataloaders)
        if scaler is not None:
            self._require([SCALER_NAME])
            self._changes.append(partial(scaler.load_state_dict, self._read(SCALER_NAME)))

    def read_custom(self, objects: list[Any]) -> None:
        """Read the states of registered objects.

        Raises:
            CheckpointError: there is another number of them, or one cannot be read.
        """
        require_count("registered objects", len(custom_files(self._names)), len(objects), self.folder)
        self._require([custom_file(index) for index in range(len(objects))])
        for index, obj in enumerate(objects):
            self._changes.append(partial(obj.load_state_dict, self._read(custom_file(index))))

    def check_unread(self) -> None:
        """Read what nobody has asked for, as harmless values only: a file that could run code is refused wherever it
        lies.

        Raises:
            CheckpointError: a file is damaged, or reading it could run code.
        """
        if (self._load_kwargs or {}).get("weights_only", True):
            for name in self._names:
                if (
                    name not in self._read_names
                    and is_file_of_a_state(name)
                    and not name.endswith((".safetensors", ".json", SHARD_TABLE_NAME, SHARD_SUFFIX))
                ):
                    read(self.folder / name, mapped=True)

    def apply(self) -> None:
        """Put everything that was read in place."""
        for change in self._changes:
            change()
        self._changes.clear()

    def restore_rng(self) -> None:
        """Put the random number generators back; last, because what came before may have drawn from them."""
        path, device = self.folder / self._own_file(), self._process.device_backend
        if self.is_new_rank:
            contents.seed_new_rank(self._own, self.rank, device, path)
        else:
            contents.restore(self._own, device, path)

    def read_windows(self, loaders: list[Any], models: list[Any], strategy: Strategy) -> None:
        """Read the accumulation windows that were open, as far as they are this rank's.

        Raises:
            CheckpointError: a file is damaged, or does not fit what was prepared.
        """
        names = gradients_files(self._names) if self.manifest is not None else []
        if not names:
            return
        if not strategy.saves_gradients:
            self._read_names.update(names)
            logger.warning(
                "%s holds the gradients of an open accumulation window, which %s cannot restore: a new window starts.",
                self.folder,
                type(strategy).__name__,
            )
            return
        ranks, world = strategy.averaging_collectives.world_size, self._process.num_processes
        first = self._read_window(names[0])
        same_ranks = (
            self.manifest is not None
            and self.manifest.world_size == world
            and first.get("averaging_ranks", world) == ranks
        )
        # Where ranks have parts of a model, they take them of the average of what all have saved.
        own_only = same_ranks and not (strategy.shards_parameters and first["gradients"])
        saved = [self._read_window(name) for name in ([gradients_file(self.rank)] if own_only else names)]
        for name, one in zip([gradients_file(self.rank)] if own_only else names, saved, strict=True):
            check(one, str(self.folder / name), loaders, models, strategy)
        check(first, str(self.folder / names[0]), loaders, models, strategy)
        self.windows = {**saved[0], "averaged": first.get("averaged", {})} if own_only else combine(saved, ranks)

    def _read_window(self, name: str) -> dict[str, Any]:
        self._require([name])
        self._read_names.add(name)
        content = read(self.folder / name, self._map_location, self._load_kwargs, mapped=True)
        if not isinstance(content, dict):
            raise CheckpointError(f"{self.folder / name} does not hold the gradients of accumulation windows.")
        return content

    def _require(self, names: list[str]) -> None:
        require_files(self.folder, names, self._names)

    def _read(self, name: str) -> Any:
        self._require([name])
        self._read_names.add(name)
        # Generators take their states from host memory only.
        location = "cpu" if name.startswith((RNG_STATE_NAME, LOADER_NAME)) else self._map_location
        return read(self.folder / name, location, self._load_kwargs)

    def _read_models(self, models: list[Any], load_model_kwargs: dict[str, Any]) -> None:
        safe = numbered_files(self._names, SAFE_MODEL_NAME, "safetensors")
        stem, suffix = (SAFE_MODEL_NAME, "safetensors") if safe else (MODEL_NAME, "bin")
        if holds_engines(self._names):
            raise CheckpointError(
                f"{self.folder} was saved by DeepSpeed. Load it with DeepSpeed, or make whole weights of it with the "
                "zero_to_fp32.py that "
                "lies in it, and load these into the model before prepare()."
            )
        require_count("models", len(numbered_files(self._names, stem, suffix)), len(models), self.folder)
        names = [numbered(stem, index, suffix) for index in range(len(models))]
        self._require(names)
        for model, name in zip(models, names, strict=True):
            path = self.folder / name
            self._read_names.add(name)
            weights = (
                read_safetensors(path, self._map_location) if safe else read(path, self._map_location, mapped=True)
            )
            self._changes.append(plan_weights(model, weights, path, **load_model_kwargs))

    def _read_divided(
        self,
        models: list[Any],
        optimizers: list[Any],
        load_model_kwargs: dict[str, Any],
        strategy: Strategy,
        layouts: list[Layout] | None,
    ) -> None:
        """Read models and optimizers that are divided among ranks, or were when they were saved."""
        from ..fsdp.checkpoint.files import ShardedReader, plan
        from ..fsdp.checkpoint.state_dicts import owner_of

        options = dict(load_model_kwargs)
        strict = bool(options.pop("strict", True))
        if options:
            raise ConfigurationError(
                f"load_state got {', '.join(options)}, which a model that is divided among ranks has no use for."
            )
        layouts = [strategy.layout(model) for model in models] if layouts is None else layouts
        reader = ShardedReader(
            folder=self.folder,
            names=set(self._names),
            rank=self.rank,
            world_size=self._process.num_processes,
            read=self._read,
            read_safetensors=lambda name: read_safetensors(self.folder / name, "cpu"),
        )
        owned = []
        for index, optimizer in enumerate(optimizers):
            model = owner_of(optimizer, models, f"optimizer {index}")
            layout = layouts[next(place for place, other in enumerate(models) if other is model)]
            inner = getattr(optimizer, "optimizer", optimizer)
            owned.append((layout, inner, strategy.parameter_names(model, inner)))
        self._changes += plan(reader, layouts, owned, strict)
        self._read_names |= reader.used

    def _read_objects(self, stem: str, objects: list[Any]) -> None:
        require_count(f"{stem}s", len(numbered_files(self._names, stem, "bin")), len(objects), self.folder)
        names = [numbered(stem, index, "bin") for index in range(len(objects))]
        self._require(names)
        for obj, name in zip(objects, names, strict=True):
            self._changes.append(partial(obj.load_state_dict, self._read(name)))

    def _read_loaders(self, dataloaders: list[Any]) -> None:
        with_position = {
            index: loader for index, loader in enumerate(dataloaders) if hasattr(loader, "load_state_dict")
        }
        if self.manifest is not None:
            saved = len(numbered_files(self._names, LOADER_NAME, "bin"))
            require_count("dataloaders", saved, len(with_position), self.folder)
        for index, loader in enumerate(dataloaders):
            self._read_seed(index, get_sampler(loader))
        for index, loader in with_position.items():
            state = self._position(index)
            if state is not None:
                self._changes.append(partial(loader.load_state_dict, state))

    def _read_seed(self, index: int, sampler: Any) -> None:
        path = self.folder / numbered(SAMPLER_NAME, index, "bin")
        if isinstance(sampler, SeedableRandomSampler) and (self.manifest is not None or path.exists()):
            seed = self._read(path.name)
            if not isinstance(seed, dict) or not {"initial_seed", "epoch"} <= set(seed):
                raise CheckpointError(f"{path} does not hold a sampler's initial_seed and epoch.")
            self._changes.append(
                partial(_set_seed, sampler, **{name: seed[name] for name in ("initial_seed", "epoch")})
            )

    def _position(self, index: int) -> Any:
        """Where a loader stood: on this rank, if the world is of the same size; else what all ranks have in common."""
        own = self._own.get("dataloaders", {})
        same_world = self.manifest is not None and self.manifest.world_size == self._process.num_processes
        if same_world and index in own:
            return own[index]
        path = self.folder / numbered(LOADER_NAME, index, "bin")
        # Other libraries write positions only for some kinds of loader.
        return self._read(path.name) if self.manifest is not None or path.exists() else None


def _set_seed(sampler: SeedableRandomSampler, initial_seed: int, epoch: int) -> None:
    sampler.initial_seed = initial_seed
    sampler.set_epoch(epoch)


def read_safetensors(path: Path, device: Any) -> dict[str, torch.Tensor]:
    """The tensors of a file.

    Raises:
        CheckpointError: it is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights: dict[str, torch.Tensor] = load_file(path, device=str(device))
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from error
    return weights


def plan_weights(model: nn.Module, weights: Any, path: Path, strict: bool = True, **kwargs: Any) -> Callable[[], Any]:
    """What puts weights into a model.

    Args:
        model: the model, prepared or not.
        weights: names, those of the unwrapped and uncompiled model, to tensors. Of names that share memory one is
            enough.
        path: for messages.
        strict: refuse names that are missing or unknown.
        **kwargs: for ``load_state_dict``.

    Raises:
        CheckpointError: the names are not those of the model.
    """
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    expected = inner.state_dict()
    if not isinstance(weights, dict):
        raise CheckpointError(f"{path} holds a {type(weights).__name__} instead of the weights of a model.")
    if strict:
        cleaned = {clean_name(name) for name in expected}
        unknown = sorted(set(weights) - cleaned)
        missing = sorted(_missing(expected, weights))
        if unknown or missing:
            raise CheckpointError(
                f"{path} does not fit {type(inner).__name__}: it lacks {_some(missing)} and has {_some(unknown)} that "
                "the model lacks. "
                "Load it into the model that was saved, or pass strict=False to load what fits."
            )
    renamed = {name: weights[clean_name(name)] for name in expected if clean_name(name) in weights}
    return partial(inner.load_state_dict, renamed, strict=False, **kwargs)


def _missing(expected: dict[str, Any], weights: dict[str, Any]) -> list[str]:
    """Names without a value, unless they share memory with one that has it."""
    given = {
        _identity(value)
        for name, value in expected.items()
        if clean_name(name) in weights and isinstance(value, torch.Tensor)
    }
    absent = {name: value for name, value in expected.items() if clean_name(name) not in weights}
    return [
        name for name, value in absent.items() if not isinstance(value, torch.Tensor) or _identity(value) not in given
    ]


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        *id_tensor_storage(tensor),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.numel() or id(tensor),
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more names" if len(names) > 5 else shown or "no names"
