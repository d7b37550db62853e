"""Loads an engine's state on another number of processes, through DeepSpeed's universal checkpoint format."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from accel_checkpoint.names import CheckpointError
from accel_state import PartialState, get_logger
from accel_state.errors import AccelError, ConfigurationError

from . import structure

logger: Final = get_logger(__name__)


def universal_info(engine: Any) -> dict[str, Any]:
    """Return the client state that makes an engine's checkpoint convertible."""
    if not engine.zero_optimization():
        return {}
    names = importlib.import_module("deepspeed.checkpoint.constants")
    version = {names.UNIVERSAL_CHECKPOINT_VERSION_KEY: names.UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    return {names.UNIVERSAL_CHECKPOINT_INFO: version}


class Conversion:
    """The conversion of engines' states, saved by another number of processes, for any number of them.

    Args:
        directory: the checkpoint.
        engines: the directory in it of each engine to load, and the engine.
        saved_by: number of processes that saved it.
        read: reads a file without running code from it.
        read_mapped: the same, without reading tensors before they are used.
    """

    def __init__(
        self,
        directory: Path,
        engines: Sequence[tuple[str, Any]],
        saved_by: int,
        read: Callable[[Path], Any],
        read_mapped: Callable[[Path], Any],
    ) -> None:
        self._directory = directory
        self._engines = engines
        self._saved_by = saved_by
        self._read, self._read_mapped = read, read_mapped
        self._own: Path | None = None  # the directory that this process made
        self._target = Path()

    def convert(self) -> None:
        """Check and convert the files, on the main process. Every rank must call it; a failure raises on all.

        Raises:
            CheckpointError: the files do not fit the engines, or cannot be converted.
            ConfigurationError: there is no place for the result.
        """
        state = PartialState()
        failure: AccelError | None = None
        if state.is_main_process:
            try:
                self._convert_all()
            except AccelError as error:
                failure = error
            except Exception as error:
                failure = CheckpointError(f"{self._directory} does not fit ({type(error).__name__}: {error}).")
        path, failure = state.collectives.broadcast_object((str(self._own or ""), failure))
        if failure is not None:
            raise failure
        self._target = Path(path)

    def _convert_all(self) -> None:
        for tag, engine in self._engines:
            source, info = self._directory / tag, universal_info(engine)
            structure.check_source(engine, source, self._saved_by, self._read_mapped, info)
        try:
            self._own = Path(
                tempfile.mkdtemp(dir=self._directory.parent, prefix=f".{self._directory.name}.accel-universal-")
            )
        except OSError as error:
            raise ConfigurationError(
                f"{self._directory} was saved on another number of processes, and cannot be converted next to it "
                f"({error}). Copy it to a writable directory, or launch {self._saved_by} processes."
            ) from error
        for tag, _ in self._engines:
            _convert(self._directory / tag, self._own / tag, self._saved_by, self._read)

    @contextmanager
    def loading(self, engine: Any) -> Iterator[Path]:
        """Yield the directory that an engine loads from."""
        before = engine._config.load_universal_checkpoint
        engine._config.load_universal_checkpoint = True
        try:
            yield self._target
        finally:
            engine._config.load_universal_checkpoint = before

    def finish(self) -> None:
        """Remove the converted files once all ranks have loaded them. Every rank must call it."""
        PartialState().wait_for_everyone()
        self.remove()

    def remove(self) -> None:
        """Remove the converted files."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)


def _convert(source: Path, target: Path, saved_by: int, read: Callable[[Path], Any]) -> None:
    processes = PartialState().num_processes
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
    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
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
        raise CheckpointError(
            f"{source} was saved on {saved_by} processes, and DeepSpeed cannot convert it for {processes}: "
            f"{type(error).__name__}: {error}. Launch {saved_by} processes."
        ) from error


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
            set_shard(parameter.ds_tensor, torch.cat(fragments)[: parameter.ds_numel])
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


def set_shard(target: torch.Tensor, full: torch.Tensor) -> None:
    """Set this rank's shard of a parameter; the last ranks' shards may be padded."""
    shard = target.detach().view(-1)
    values = full[PartialState().process_index * shard.numel() :][: shard.numel()]
    shard[: values.numel()].copy_(values)
