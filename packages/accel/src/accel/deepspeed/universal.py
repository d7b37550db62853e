"""Loads an engine's state on another number of processes, through DeepSpeed's universal checkpoint format."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint.names import CheckpointError
from accel_state import PartialState, get_logger
from accel_state.errors import AccelError, ConfigurationError

logger = get_logger(__name__)


def universal_info(engine: Any) -> dict[str, Any]:
    """The client state that makes an engine's checkpoint convertible."""
    if not engine.zero_optimization():
        return {}
    names = importlib.import_module("deepspeed.checkpoint.constants")
    version = {names.UNIVERSAL_CHECKPOINT_VERSION_KEY: names.UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    return {names.UNIVERSAL_CHECKPOINT_INFO: version}


@contextmanager
def converted(
    directory: Path, tag: str, engine: Any, saved_by: int | None, read: Callable[[Path], Any]
) -> Iterator[Path]:
    """Yield a directory with the state converted for any number of processes. Every rank must enter it."""
    if not engine.zero_optimization():
        yield directory  # not sharded
        return
    state = PartialState()
    target: Path | None = None
    failure: AccelError | None = None
    if state.is_main_process:
        try:
            target = _convert(directory, tag, saved_by, read)
        except (CheckpointError, ConfigurationError) as error:
            failure = error
    path, failure = state.collectives.broadcast_object((str(target or ""), failure))
    if failure is not None:
        raise failure
    before = engine._config.load_universal_checkpoint
    engine._config.load_universal_checkpoint = True
    try:
        yield Path(path)
        state.wait_for_everyone()
    finally:
        engine._config.load_universal_checkpoint = before
        if target is not None:
            shutil.rmtree(target, ignore_errors=True)


def _convert(directory: Path, tag: str, saved_by: int | None, read: Callable[[Path], Any]) -> Path:
    source, processes = directory / tag, PartialState().num_processes
    logger.warning(
        "%s was saved on %s processes and is loaded on %d: its states are first converted to a temporary directory "
        "next to it, which takes as much space and time as another save.",
        source,
        saved_by,
        processes,
    )
    # DeepSpeed's converter would run code from the files, so first make sure that they contain none.
    for path in sorted(source.glob("*.pt")):
        read(path)
    try:
        target = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.accel-universal-"))
    except OSError as error:
        raise ConfigurationError(
            f"{directory} was saved on another number of processes, and cannot be converted next to it ({error}). Copy "
            f"it to a writable directory, or launch {saved_by} processes."
        ) from error
    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target / tag),
        # More workers would be forked from this process, which has threads.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            importlib.import_module("deepspeed.checkpoint.ds_to_universal").main(arguments)
    except Exception as error:
        shutil.rmtree(target, ignore_errors=True)
        raise CheckpointError(
            f"{source} was saved on {saved_by} processes, and DeepSpeed cannot convert it for {processes}: "
            f"{type(error).__name__}: {error}. Launch {saved_by} processes."
        ) from error
    return target


def restore_omitted_state(engine: Any, source: Path, read: Callable[[Path], Any]) -> None:
    """Restore what the universal format omits: buffers, frozen parameters, and at stage 3 settings of groups."""
    states = [read(path) for path in sorted(source.glob("*_model_states.pt"), key=_rank_of)]
    module = states[0]["module"]
    buffers = dict(engine.module.named_buffers())
    for name in states[0]["buffer_names"]:
        buffers[name].copy_(module[name])
    is_sharded = engine.zero_optimization_partition_weights()
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            continue
        if is_sharded:
            fragments = [state["frozen_param_fragments"][name].flatten() for state in states]
            _set_shard(parameter.ds_tensor, torch.cat(fragments)[: parameter.ds_numel])
        else:
            parameter.data.copy_(module[name])
    if is_sharded:
        # DeepSpeed gives all groups the settings of the first one.
        first = min(source.glob("*_optim_states.pt"), key=_rank_of)
        groups = read(first)["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]
        for group, saved in zip(engine.optimizer.optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        # All states share one step counter, which every parameter would advance.
        for state in engine.optimizer.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _rank_of(path: Path) -> int:
    match = re.search(r"pp_rank_(\d+)_", path.name)
    return int(match[1]) if match else 0


def _set_shard(target: torch.Tensor, full: torch.Tensor) -> None:
    """Set this rank's shard of a parameter; the last ranks' shards may be padded."""
    shard = target.detach().view(-1)
    values = full[PartialState().process_index * shard.numel() :][: shard.numel()]
    shard[: values.numel()].copy_(values)
