"""An engine's state on another number of processes, through DeepSpeed's universal checkpoint format."""

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

from accel_state import PartialState, get_logger
from accel_state.errors import AccelError, ConfigurationError

from ..checkpoint.names import CheckpointError

logger = get_logger(__name__)


def mark(engine: Any) -> dict[str, Any]:
    """What an engine's state needs beside it to be converted later."""
    if not engine.zero_optimization():
        return {}
    names = importlib.import_module("deepspeed.checkpoint.constants")
    return {
        names.UNIVERSAL_CHECKPOINT_INFO: {
            names.UNIVERSAL_CHECKPOINT_VERSION_KEY: names.UNIVERSAL_CHECKPOINT_VERSION_VALUE
        }
    }


@contextmanager
def converted(folder: Path, tag: str, engine: Any, saved_by: int | None, read: Callable[[Path], Any]) -> Iterator[Path]:
    """A block in which an engine's state lies in a form that loads on any number of processes. Every rank must enter
    it.

    Args:
        folder: the checkpoint.
        tag: the engine's folder in it.
        engine: what will load it.
        saved_by: the number of processes that saved it.
        read: reads a file without running code from it.

    Yields:
        The folder that has the state under ``tag``.

    Raises:
        CheckpointError: DeepSpeed cannot convert it.
        ConfigurationError: there is no room, or no permission, beside the checkpoint.
    """
    if not engine.zero_optimization():
        yield folder  # nothing is divided
        return
    state = PartialState()
    made: list[Path] = []
    failures: list[AccelError] = []
    if state.is_main_process:
        try:
            made.append(_convert(folder, tag, saved_by, read))
        except (CheckpointError, ConfigurationError) as error:
            failures.append(error)
    place, failure = state.collectives.broadcast_object(
        (str(made[0]) if made else "", failures[0] if failures else None)
    )
    if failure is not None:
        raise failure
    before = engine._config.load_universal_checkpoint
    engine._config.load_universal_checkpoint = True
    try:
        yield Path(place)
        state.wait_for_everyone()
    finally:
        engine._config.load_universal_checkpoint = before
        if made:
            shutil.rmtree(made[0], ignore_errors=True)


def _convert(folder: Path, tag: str, saved_by: int | None, read: Callable[[Path], Any]) -> Path:
    logger.warning(
        "%s was saved on %s processes and is loaded on %d: its states are converted first, beside it, which takes as "
        "much space and time "
        "as another save.",
        folder / tag,
        saved_by,
        PartialState().num_processes,
    )
    # DeepSpeed's own reader would run code in the files; these are known to have none.
    for path in sorted((folder / tag).glob("*.pt")):
        read(path)
    try:
        place = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.accel-universal-"))
    except OSError as error:
        raise ConfigurationError(
            f"{folder} was saved on another number of processes, and cannot be converted beside it ({error}). Copy it "
            "to a folder that "
            f"can be written to, or start {saved_by} processes."
        ) from error
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            importlib.import_module("deepspeed.checkpoint.ds_to_universal").main(_arguments(folder / tag, place / tag))
    except Exception as error:
        shutil.rmtree(place, ignore_errors=True)
        raise CheckpointError(
            f"{folder / tag} was saved on {saved_by} processes, and DeepSpeed cannot convert it for "
            f"{PartialState().num_processes}: "
            f"{type(error).__name__}: {error}. Start {saved_by} processes."
        ) from error
    return place


def complete(engine: Any, source: Path, read: Callable[[Path], Any]) -> None:
    """Put back what the universal format leaves out: buffers, frozen parameters, and at stage 3 what parameter groups
    have of their own.

    Args:
        engine: what has loaded the rest.
        source: the engine's folder in the checkpoint, as it was saved.
        read: reads a file without running code from it.
    """
    states = [read(path) for path in sorted(source.glob("*_model_states.pt"), key=_rank_of)]
    module = states[0]["module"]
    buffers = dict(engine.module.named_buffers())
    for name in states[0]["buffer_names"]:
        buffers[name].copy_(module[name])
    divided = engine.zero_optimization_partition_weights()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad and divided:
            parts = [state["frozen_param_fragments"][name].flatten() for state in states]
            _set_part(parameter.ds_tensor, torch.cat(parts)[: parameter.ds_numel])
        elif not parameter.requires_grad:
            parameter.data.copy_(module[name])
    if divided:
        # DeepSpeed gives all groups the settings of the first one.
        first = min(source.glob("*_optim_states.pt"), key=_rank_of)
        groups = read(first)["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]
        for group, saved in zip(engine.optimizer.optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        # And all of them one and the same step counter, which each would advance.
        for state in engine.optimizer.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _rank_of(path: Path) -> int:
    found = re.search(r"pp_rank_(\d+)_", path.name)
    return int(found[1]) if found else 0


def _set_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Set this rank's part of a divided parameter; that of the last ranks may reach beyond the end."""
    own = target.detach().view(-1)
    values = whole[PartialState().process_index * own.numel() :][: own.numel()]
    own[: values.numel()].copy_(values)


def _arguments(source: Path, target: Path) -> argparse.Namespace:
    return argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        # More than one would be processes of their own, which fork from one that has threads.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
