"""One sharded model, or one optimizer, saved and loaded on its own, in the files that a checkpoint of ``save_state``
has for it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_state.errors import ConfigurationError, require

from ..checkpoint.atomic_dir import sync
from ..checkpoint.loader import read_safetensors
from ..checkpoint.names import FSDP_MODEL_NAME, OPTIMIZER_NAME, CheckpointError
from ..checkpoint.rank_consensus import on_all_ranks
from ..checkpoint.safe_load import read
from ..checkpoint.writer import sync_folders, write_parts
from ..core.types import Gathered, Layout
from ..core.unwrap import clean_name, extract_model_from_parallel, is_peft_model
from .checkpoint import state_dicts
from .checkpoint.files import ShardedReader, gather_one, plan_optimizer

if TYPE_CHECKING:
    from ..accelerator import Accelerator
    from .plugin import FullyShardedDataParallelPlugin


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save the weights of a prepared model as ``fsdp_plugin.state_dict_type`` says. Every rank must call it.

    What was there under these names before stays until the new files are whole. :meth:`Accelerator.save_state` saves
    everything that a run needs, with a manifest; this is for the weights alone.

    Args:
        fsdp_plugin: the settings; of these, ``state_dict_type``.
        accelerator: the one that has prepared the model.
        model: the prepared model.
        output_dir: the folder, which is made where it is missing.
        model_index: the number in the name: ``pytorch_model_fsdp_0/``, or ``pytorch_model_fsdp.bin`` and
            ``pytorch_model_fsdp_1.bin``.
        adapter_only: of a model of peft, only the adapter's weights.
        use_dcp: write SHARDED_STATE_DICT in the format of torch.distributed.checkpoint. Without it each rank writes a
            file of its own (``pytorch_model_fsdp_0_rank0.bin``), which as many ranks can load.

    Raises:
        ConfigurationError: the model was not prepared by a strategy that shards; or adapter_only of a model that has
            none.
        CheckpointError: it could not be written.
    """
    _require_sharded(accelerator, model, "save_fsdp_model")
    whole = fsdp_plugin.state_dict_type.name == "FULL_STATE_DICT"
    weights = accelerator.strategy.state_dict(model) if whole else state_dicts.model_state(model)
    if adapter_only:
        names = _adapter_names(model)
        weights = {names[name]: value for name, value in weights.items() if name in names}
    gathered = gather_one(
        fsdp_plugin.state_dict_type,
        FSDP_MODEL_NAME,
        model_index,
        weights,
        accelerator.process_state.collectives,
        use_dcp,
    )
    _write(accelerator, Path(output_dir), gathered)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Put weights of :func:`save_fsdp_model`, or of a checkpoint of any strategy, into a prepared model. Every rank
    must call it.

    Nothing is changed before all of it has been read on every rank, and reading runs no code.

    Args:
        fsdp_plugin: the settings. The form of the files is found out, whatever ``state_dict_type`` says.
        accelerator: the one that has prepared the model.
        model: the prepared model.
        input_dir: the folder.
        model_index: the number in the name.
        adapter_only: the files hold an adapter of peft's only; the other weights stay.
        use_dcp: take the folder of torch.distributed.checkpoint, where there are files of single ranks beside it.

    Raises:
        ConfigurationError: the model was not prepared by a strategy that shards; or adapter_only of a model that has
            none.
        CheckpointError: files are missing or damaged, or do not fit the model; on every rank, if on one.
    """
    _require_sharded(accelerator, model, "load_fsdp_model")
    layout = accelerator.strategy.layout(model)
    reader = _reader(accelerator, Path(input_dir), use_dcp)
    names = {short: full for full, short in _adapter_names(model).items()} if adapter_only else None

    def plan() -> Callable[[], Any]:
        if names is None:
            return state_dicts.plan_model(layout, reader.model(model_index, layout), True, reader.folder)
        short = Layout(layout.model, {name: layout.tensors[full] for name, full in names.items()})
        found = reader.model(model_index, short)
        missing = sorted(set(names) - set(found))
        if missing:
            raise CheckpointError(
                f"{reader.folder} lacks {missing[0]} of the adapter. Load it into the model that was saved."
            )
        return state_dicts.plan_model(layout, {full: found[name] for name, full in names.items()}, False, reader.folder)

    _plan_and_apply(accelerator, f"loading model {model_index} from {input_dir}", plan)


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save the state of a prepared optimizer as ``fsdp_plugin.state_dict_type`` says. Every rank must call it.

    Args:
        fsdp_plugin: the settings; of these, ``state_dict_type``.
        accelerator: the one that has prepared the optimizer.
        optimizer: the optimizer, prepared.
        model: the prepared model that it updates.
        output_dir: the folder, which is made where it is missing.
        optimizer_index: the number in the name: ``optimizer_0/``, or ``optimizer.bin`` and ``optimizer_1.bin``.
        use_dcp: as of :func:`save_fsdp_model`.

    Raises:
        ConfigurationError: the model was not prepared by a strategy that shards, or is not the one that the optimizer
            updates.
        CheckpointError: it could not be written.
    """
    _require_sharded(accelerator, model, "save_fsdp_optimizer")
    inner = getattr(optimizer, "optimizer", optimizer)
    state_dicts.owner_of(inner, [model], f"optimizer {optimizer_index}")
    state = state_dicts.optimizer_state(model, inner)
    kind, collectives = fsdp_plugin.state_dict_type, accelerator.process_state.collectives
    _write(
        accelerator, Path(output_dir), gather_one(kind, OPTIMIZER_NAME, optimizer_index, state, collectives, use_dcp)
    )


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Put a state of :func:`save_fsdp_optimizer`, or of a checkpoint of any strategy, into a prepared optimizer. Every
    rank must call it.

    Args:
        fsdp_plugin: the settings. The form of the files is found out, whatever ``state_dict_type`` says.
        accelerator: the one that has prepared the optimizer.
        optimizer: the optimizer, prepared.
        model: the prepared model that it updates.
        input_dir: the folder.
        optimizer_index: the number in the name.
        adapter_only: the model was saved with ``adapter_only``. The state of an optimizer of the adapter's weights is
            the same either way.
        use_dcp: as of :func:`load_fsdp_model`.

    Raises:
        ConfigurationError: the model was not prepared by a strategy that shards, is not the one that the optimizer
            updates, or has no adapter although adapter_only was asked for.
        CheckpointError: files are missing or damaged, or do not fit; on every rank, if on one.
    """
    _require_sharded(accelerator, model, "load_fsdp_optimizer")
    if adapter_only:
        _adapter_names(model)
    inner = getattr(optimizer, "optimizer", optimizer)
    state_dicts.owner_of(inner, [model], f"optimizer {optimizer_index}")
    layout, names = accelerator.strategy.layout(model), accelerator.strategy.parameter_names(model, inner)
    reader = _reader(accelerator, Path(input_dir), use_dcp)
    what = f"loading optimizer {optimizer_index} from {input_dir}"
    _plan_and_apply(accelerator, what, lambda: plan_optimizer(reader, optimizer_index, layout, inner, names))


def _require_sharded(accelerator: Accelerator, model: nn.Module, what: str) -> None:
    if not (accelerator.strategy.shards_parameters and accelerator.strategy.is_wrapped(model)):
        raise ConfigurationError(
            f"{what} got a {type(model).__name__} that is not sharded (the strategy is "
            f"{type(accelerator.strategy).__name__}). Pass what "
            "prepare() has returned under FSDP, or use accelerator.save_model(model, folder)."
        )


def _adapter_names(model: nn.Module) -> dict[str, str]:
    """The names of an adapter's weights in the model -> those in peft's files.

    Raises:
        ConfigurationError: the model has no adapter.
    """
    if not is_peft_model(model):
        raise ConfigurationError(
            f"adapter_only=True saves and loads the adapter of a model of peft, and {type(model).__name__} is none."
        )
    peft = require("peft", purpose="saving an adapter on its own", install="peft")
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    # Only names matter here, and the model's own state_dict() would gather the values. peft looks its modules up under
    # their wrapped names.
    marks = {name: torch.empty(0) for name, _ in [*inner.named_parameters(), *inner.named_buffers()]}
    found = peft.get_peft_model_state_dict(inner, state_dict=dict(marks), save_embedding_layers=False)
    by_mark = {id(mark): clean_name(name) for name, mark in marks.items()}
    return {by_mark[id(mark)]: clean_name(name) for name, mark in found.items()}


def _reader(accelerator: Accelerator, folder: Path, use_dcp: bool) -> ShardedReader:
    process = accelerator.process_state
    return ShardedReader(
        folder=folder,
        names={path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()},
        rank=process.process_index,
        world_size=process.num_processes,
        read=lambda name: read(folder / name, "cpu"),
        read_safetensors=lambda name: read_safetensors(folder / name, "cpu"),
        prefers_ranks=not use_dcp,
    )


def _plan_and_apply(accelerator: Accelerator, what: str, plan: Callable[[], Callable[[], Any]]) -> None:
    """Read on every rank, and change something only where all could read."""
    planned: list[Callable[[], Any]] = []
    collectives = accelerator.process_state.collectives
    on_all_ranks(collectives, what, lambda: planned.append(plan()))
    on_all_ranks(collectives, what, planned[0])


def _write(accelerator: Accelerator, folder: Path, gathered: Gathered) -> None:
    """Write parts beside their place, and move them there when all ranks have written."""
    process = accelerator.process_state
    parts = [part for part in gathered.parts if part.each_rank or process.is_main_process]
    partial = folder / ".partial"

    def move() -> None:
        for name in sorted({part.name.split("/")[0] for part in parts}):
            if (partial / name).is_file():
                os.replace(partial / name, folder / name)

    def close() -> None:
        if process.is_main_process:
            for closing in gathered.finalizers:
                closing(partial)
            for found in [path for path in partial.iterdir() if path.is_dir()]:
                sync_folders(found)
                shutil.rmtree(folder / found.name, ignore_errors=True)
                os.replace(found, folder / found.name)
            partial.rmdir()
            sync(folder)

    what = f"saving into {folder}"
    on_all_ranks(process.collectives, what, lambda: partial.mkdir(parents=True, exist_ok=True))
    on_all_ranks(process.collectives, what, lambda: write_parts(partial, parts))
    on_all_ranks(process.collectives, what, move)
    on_all_ranks(process.collectives, what, close)
