"""Saves and loads a single sharded model or optimizer, in the files that ``save_state`` writes for it."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from accel_checkpoint.atomic_dir import sync
from accel_checkpoint.consensus import on_all_ranks
from accel_checkpoint.names import FSDP_MODEL_NAME, OPTIMIZER_NAME, CheckpointError, files_without_manifest
from accel_checkpoint.safe_load import read, read_safetensors
from accel_checkpoint.validation import apply_changes
from accel_checkpoint.writer import sync_directories, write_parts
from accel_state.errors import ConfigurationError, require
from accel_state.paths import as_path, make_directory, refuse_link

from ..core.types import Gathered, Layout
from ..core.unwrap import clean_name, extract_model_from_parallel, is_peft_model
from ..fsdp.checkpoint import state_dicts
from ..fsdp.checkpoint.files import ShardedReader, gather_one, plan_optimizer

if TYPE_CHECKING:
    from ..accelerator import Accelerator
    from ..fsdp.plugin import FullyShardedDataParallelPlugin


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save the weights of a prepared model in the format of ``fsdp_plugin.state_dict_type``. Every rank must call it.

    Existing files of these names are replaced only when the new ones are complete. :meth:`Accelerator.save_state`
    saves everything that a run needs, with a manifest; this function saves the weights alone.

    Args:
        fsdp_plugin: the settings, of which ``state_dict_type`` is used.
        accelerator: the one that has prepared the model.
        model: the prepared model.
        output_dir: the directory; it is created if needed.
        model_index: the number in the name: ``pytorch_model_fsdp_0/``, or ``pytorch_model_fsdp.bin`` and
            ``pytorch_model_fsdp_1.bin``.
        adapter_only: save only the adapter's weights of a PEFT model; no effect on other models.
        use_dcp: write SHARDED_STATE_DICT in the format of torch.distributed.checkpoint. Without it each rank writes a
            file of its own (``pytorch_model_fsdp_0_rank0.bin``), which only the same number of ranks can load.

    Raises:
        ConfigurationError: the model is not sharded.
        CheckpointError: it could not be written.
    """
    _require_sharded(accelerator, model, "save_fsdp_model")
    kind = fsdp_plugin.state_dict_type
    full = kind.name == "FULL_STATE_DICT"
    weights = accelerator.strategy.state_dict(model) if full else state_dicts.model_state(model)
    if adapter_only and is_peft_model(model):
        names = _adapter_names(model)
        weights = {names[name]: value for name, value in weights.items() if name in names}
    collectives, shard_format = accelerator.process_state.collectives, fsdp_plugin.sharded_state_format
    gathered = gather_one(kind, FSDP_MODEL_NAME, model_index, weights, collectives, use_dcp, shard_format=shard_format)
    _write(accelerator, as_path("output_dir", output_dir), gathered)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load weights of :func:`save_fsdp_model`, or of a checkpoint of any strategy. Every rank must call it.

    Nothing is changed before every rank has read everything, and reading runs no code.

    Args:
        fsdp_plugin: not used: the format is detected from the files.
        accelerator: the one that has prepared the model.
        model: the prepared model.
        input_dir: the directory.
        model_index: the number in the name.
        adapter_only: of a PEFT model, load only the adapter; the other weights stay. No effect on other models.
        use_dcp: prefer the format of torch.distributed.checkpoint over files of single ranks.

    Raises:
        ConfigurationError: the model is not sharded.
        CheckpointError: files are missing or damaged, or do not fit the model; raised on every rank.
    """
    _require_sharded(accelerator, model, "load_fsdp_model")
    layout = accelerator.strategy.layout(model)
    reader = _reader(accelerator, as_path("input_dir", input_dir), use_dcp)
    names: dict[str, str] | None = None
    if adapter_only and is_peft_model(model):
        names = {short: full for full, short in _adapter_names(model).items()}

    collectives, action = accelerator.process_state.collectives, f"loading model {model_index} from {input_dir}"
    with on_all_ranks(collectives, action):
        if names is None:
            weights = reader.model(model_index, layout)
        else:
            adapter = Layout(layout.model, {name: layout.tensors[full] for name, full in names.items()})
            state = reader.model(model_index, adapter)
            missing = sorted(set(names) - set(state))
            if missing:
                raise CheckpointError(
                    f"{reader.directory} lacks {missing[0]} of the adapter. Load it into the model that was saved."
                )
            weights = {full: state[name] for name, full in names.items()}
        change = state_dicts.plan_model(layout, weights, names is None, reader.directory)
    with on_all_ranks(collectives, action):
        change()


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save the state of a prepared optimizer in the format of ``fsdp_plugin.state_dict_type``. Every rank must call it.

    Args:
        fsdp_plugin: the settings, of which ``state_dict_type`` is used.
        accelerator: the one that has prepared the optimizer.
        optimizer: the optimizer, prepared.
        model: the prepared model that it updates.
        output_dir: the directory; it is created if needed.
        optimizer_index: the number in the name: ``optimizer_0/``, or ``optimizer.bin`` and ``optimizer_1.bin``.
        use_dcp: see :func:`save_fsdp_model`.

    Raises:
        ConfigurationError: the model is not sharded, or is not the one that the optimizer updates.
        CheckpointError: it could not be written.
    """
    inner = _torch_optimizer(accelerator, optimizer, model, optimizer_index, "save_fsdp_optimizer")
    state = state_dicts.optimizer_state(model, inner)
    kind, collectives = fsdp_plugin.state_dict_type, accelerator.process_state.collectives
    gathered = gather_one(kind, OPTIMIZER_NAME, optimizer_index, state, collectives, use_dcp)
    _write(accelerator, as_path("output_dir", output_dir), gathered)


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
    """Load a state of :func:`save_fsdp_optimizer`, or of a checkpoint of any strategy. Every rank must call it.

    Args:
        fsdp_plugin: not used: the format is detected from the files.
        accelerator: the one that has prepared the optimizer.
        optimizer: the optimizer, prepared.
        model: the prepared model that it updates.
        input_dir: the directory.
        optimizer_index: the number in the name.
        adapter_only: the model was saved with ``adapter_only``; the state of an optimizer of the adapter's weights is
            the same either way.
        use_dcp: see :func:`load_fsdp_model`.

    Raises:
        ConfigurationError: the model is not sharded, or is not the one that the optimizer updates.
        CheckpointError: files are missing or damaged, or do not fit; raised on every rank.
    """
    inner = _torch_optimizer(accelerator, optimizer, model, optimizer_index, "load_fsdp_optimizer")
    layout, names = accelerator.strategy.layout(model), accelerator.strategy.parameter_names(model, inner)
    reader = _reader(accelerator, as_path("input_dir", input_dir), use_dcp)
    action = f"loading optimizer {optimizer_index} from {input_dir}"
    collectives = accelerator.process_state.collectives
    with on_all_ranks(collectives, action):
        change = plan_optimizer(reader, optimizer_index, layout, inner, names)
    apply_changes([], [change], [], partial(on_all_ranks, collectives, action))


def _require_sharded(accelerator: Accelerator, model: nn.Module, function: str) -> None:
    strategy = accelerator.strategy
    if not (strategy.shards_parameters and strategy.is_wrapped(model)):
        raise ConfigurationError(
            f"{function} got a {type(model).__name__} that is not sharded (the strategy is "
            f"{type(strategy).__name__}). Pass what prepare() has returned under FSDP, or use "
            "accelerator.save_model(model, directory)."
        )


def _torch_optimizer(
    accelerator: Accelerator, optimizer: Optimizer, model: nn.Module, index: int, function: str
) -> Optimizer:
    """Torch's optimizer inside a prepared one, which updates the sharded model."""
    _require_sharded(accelerator, model, function)
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    state_dicts.owner_of(inner, [model], f"optimizer {index}")
    return inner


def _adapter_names(model: nn.Module) -> dict[str, str]:
    peft = require("peft", purpose="saving an adapter on its own", install="peft")
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    # Only names are needed, and the model's own state_dict() would gather the values. PEFT looks its modules up under
    # their wrapped names.
    tokens = {name: torch.empty(0) for name, _ in [*inner.named_parameters(), *inner.named_buffers()]}
    adapter = peft.get_peft_model_state_dict(inner, state_dict=dict(tokens), save_embedding_layers=False)
    full_names = {id(token): clean_name(name) for name, token in tokens.items()}
    return {full_names[id(token)]: clean_name(name) for name, token in adapter.items()}


def _reader(accelerator: Accelerator, directory: Path, use_dcp: bool) -> ShardedReader:
    process = accelerator.process_state
    return ShardedReader(
        directory=directory,
        names=set(files_without_manifest(directory)),
        rank=process.process_index,
        world_size=process.num_processes,
        read=lambda name: read(directory / name, "cpu"),
        read_safetensors=lambda name: read_safetensors(directory / name, "cpu"),
        prefers_ranks=not use_dcp,
    )


def _write(accelerator: Accelerator, directory: Path, gathered: Gathered) -> None:
    """Write into a temporary subdirectory, and move the files into place when all ranks have written."""
    process = accelerator.process_state
    parts = [part for part in gathered.parts if part.each_rank or process.is_main_process]
    partial = directory / ".partial"
    folders = {part.name.split("/")[0] for part in parts if "/" in part.name}
    collectives, action = process.collectives, f"saving into {directory}"
    with on_all_ranks(collectives, action):
        for path in (partial, *(directory / name for name in folders)):
            refuse_link(path)
        if process.is_main_process and partial.exists():
            shutil.rmtree(partial)  # of a killed save: what it has not completed must not be moved into place
    with on_all_ranks(collectives, action):
        make_directory(partial)
        write_parts(partial, parts)
    with on_all_ranks(collectives, action):
        for name in sorted({part.name.split("/")[0] for part in parts}):
            if (partial / name).is_file():
                os.replace(partial / name, directory / name)
    with on_all_ranks(collectives, action):
        if process.is_main_process:
            for finalizer in gathered.finalizers:
                finalizer(partial)
            for subdirectory in [path for path in partial.iterdir() if path.is_dir()]:
                sync_directories(subdirectory)
                shutil.rmtree(directory / subdirectory.name, ignore_errors=True)
                os.replace(subdirectory, directory / subdirectory.name)
            partial.rmdir()
            sync(directory)
