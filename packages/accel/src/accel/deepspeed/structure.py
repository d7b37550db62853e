"""Checks of an engine's files, made before anything of a checkpoint is loaded.

DeepSpeed loads an engine part by part, and a file that does not fit stops it in between. So each rank first compares
its files with the state that its engine has now: what is in them, shapes, and bounds of numbers.
"""

from __future__ import annotations

import importlib
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from accel_checkpoint.names import CheckpointError, require_number
from accel_checkpoint.validation import (
    check_named_optimizer,
    check_optimizer,
    check_scheduler,
    check_weights,
    is_number,
)

Read = Callable[[Path], Any]

# Parts of an optimizer's state that are its own torch optimizer's state.
_INNER = ("base_optimizer_state", "optimizer_state_dict")
# Parts that loading does not use.
_UNUSED = frozenset({
    *("zero_stage", "group_paddings", "partition_count", "param_slice_mappings", "universal_checkpoint_info"),
    *("ds_zero_partition_groups", "param_alignment_paddings", "ds_version"),
})  # fmt: skip
_POSITIVE = frozenset({"cur_scale", "scale_factor", "scale_window"})


def check_engine(engine: Any, directory: Path, tag: str, read: Read, strict: bool) -> None:
    """Raise CheckpointError if the files that this rank loads, saved by as many ranks, do not fit its engine."""
    path = Path(engine._get_ckpt_name(str(directory), tag))
    content = read(path)
    check_counters(engine, content, path)
    weights = content.get("module")
    _check_module(engine, weights, path, strict)
    fragments = content.get("frozen_param_fragments")
    if fragments is not None:
        _require(isinstance(fragments, dict), path, "has no dictionary of frozen_param_fragments")
        for name, parameter in _frozen(engine):
            expected = getattr(parameter, "ds_tensor", parameter).shape
            _require_tensor(fragments.get(name), expected, path, f"frozen_param_fragments.{name}")
    if engine.zero_optimization():
        ranks = require_number(content.get("dp_world_size"), f"{path}: dp_world_size", minimum=1)
        _require(ranks == engine.seq_dp_world_size, path, f"was saved by {ranks} data-parallel ranks")
        path = Path(engine._get_zero_ckpt_name(str(directory), tag))
        state = read(path)
        _require(isinstance(state, dict), path, "is not a dictionary")
        check_optimizer_state(engine, state.get("optimizer_state_dict"), path)
    elif engine.optimizer is not None and not engine.has_moe_layers:
        check_optimizer_state(engine, content.get("optimizer"), path)


def check_counters(engine: Any, content: Any, path: Path) -> None:
    """Raise CheckpointError if something is not the state of an engine without its weights and its optimizer."""
    _require(isinstance(content, dict), path, "is not a dictionary")
    for name in ("global_steps", "skipped_steps"):
        require_number(content.get(name), f"{path}: {name}")
    require_number(content.get("global_samples", 0), f"{path}: global_samples")
    require_number(content.get("mp_world_size"), f"{path}: mp_world_size", minimum=1)
    if isinstance(engine.lr_scheduler, LRScheduler):
        check_scheduler(engine.lr_scheduler, content.get("lr_scheduler"), path)
    elif engine.lr_scheduler is not None:
        _fit(content.get("lr_scheduler"), engine.lr_scheduler.state_dict(), path, "lr_scheduler")


def _check_module(engine: Any, weights: Any, path: Path, strict: bool) -> None:
    _require(isinstance(weights, dict), path, "has no weights")
    state = engine.module.state_dict()
    missing, unknown = sorted(set(state) - set(weights)), sorted(map(str, set(weights) - set(state)))
    if engine.has_moe_layers:
        missing = unknown = []  # experts are in files of their own
    _require(not (strict and (missing or unknown)), path, f"lacks {missing[:5]} and has {unknown[:5]} of the weights")
    sharded = {name for name, parameter in engine.module.named_parameters() if hasattr(parameter, "ds_id")}
    for name in sharded & set(weights):
        _require_tensor(weights[name], torch.Size([0]), path, name)  # their values are in the optimizer's state
    others = {name: value for name, value in weights.items() if name in state and name not in sharded}
    check_weights(engine.module, state, others, path)


def check_optimizer_state(engine: Any, state: Any, path: Path, shapes: bool = True) -> None:
    """Raise CheckpointError if something is not the state of an engine's optimizer.

    Args:
        engine: the engine.
        state: the state.
        path: its file.
        shapes: whether it is that of this rank, and not of any rank of another number of them.
    """
    inner = getattr(engine.optimizer, "optimizer", None)
    if inner is None:
        check_optimizer(engine.optimizer, state, path)
        return
    _require(isinstance(state, dict), path, "has no state of an optimizer")
    own = engine.optimizer.state_dict()
    for name in sorted(own.keys() - _UNUSED):
        _require(name in state, path, f"has no {name}")
        value = state[name]
        if name in _INNER and isinstance(own[name], dict):
            with _with_parameters(engine.optimizer):
                if shapes:
                    check_optimizer(inner, value, path)
                else:
                    check_named_optimizer(inner, value, lambda _: (), path)
        elif name == "loss_scaler":
            _check_loss_scaler(value, path)
        else:
            _fit(value, own[name], path, name, shapes)
    if "ds_version" in own:
        _require(_is_version(state.get("ds_version")), path, f"has ds_version={state.get('ds_version')!r}")
    padding = own.get("param_alignment_paddings")
    _require(state.get("param_alignment_paddings", padding) == padding, path, "has another param_alignment_paddings")


@contextmanager
def _with_parameters(optimizer: Any) -> Iterator[None]:
    """Put the parameters, which stage 3 takes out, back into the groups of torch's optimizer."""
    if not hasattr(optimizer, "_set_fp32_optimizer_param_groups"):
        yield
        return
    optimizer._set_fp32_optimizer_param_groups()
    try:
        yield
    finally:
        optimizer._clear_fp32_optimizer_param_groups()


def _check_loss_scaler(scaler: Any, path: Path) -> None:
    library = importlib.import_module("deepspeed.runtime.fp16.loss_scaler")
    _require(type(scaler) in (library.LossScaler, library.DynamicLossScaler), path, "has no loss scaler")
    model = library.LossScaler(1.0) if type(scaler) is library.LossScaler else library.DynamicLossScaler(1.0)
    found, wanted = vars(scaler), vars(model)
    _require(found.keys() == wanted.keys(), path, f"has a loss scaler of {sorted(map(str, found))[:9]}")
    for name, value in wanted.items():
        if name != "dtype":
            _fit(found[name], value, path, f"loss_scaler.{name}")


def check_source(engine: Any, source: Path, saved_by: int, read: Read, expected_info: Mapping[str, Any]) -> None:
    """Raise CheckpointError if files saved by another number of ranks do not fit an engine.

    DeepSpeed's converter makes file names of the names in them.

    Args:
        engine: the engine.
        source: the directory of the files.
        saved_by: number of ranks that saved them.
        read: reads a file.
        expected_info: what the state says about how it can be converted.
    """
    shapes = [_plain_shapes(group) for group in engine._get_zero_param_shapes()]
    sharded = engine.zero_optimization_partition_weights()
    for path in sorted(source.glob("*_model_states.pt")):
        content = read(path)
        check_counters(engine, content, path)
        saved = content.get("param_shapes")
        _require(isinstance(saved, list) and list(map(_plain_shapes, saved)) == shapes, path, "has other parameters")
        for key, value in expected_info.items():
            _require(content.get(key) == value, path, f"has another {key} than what accel saves")
        _check_omitted(engine, content, path, saved_by)
    paths = sorted(source.glob("*_optim_states.pt"))
    _require(len(paths) == saved_by, source, f"has optimizer states of {len(paths)} of {saved_by} ranks")
    totals = [0] * len(shapes)
    steps: dict[Any, float] = {}
    for path in paths:
        content = read(path)
        _require(isinstance(content, dict), path, "is not a dictionary")
        state = content.get("optimizer_state_dict")
        check_optimizer_state(engine, state, path, shapes=False)
        lengths = _check_flat(state, shapes, path)
        totals = [total + length for total, length in zip(totals, lengths, strict=True)]
        for key, entries in next(state[name] for name in _INNER if name in state)["state"].items():
            step = entries.get("step", 0)
            _require(is_number(step) and 0 <= step <= 2**63, path, f"has {step!r} steps")
            _require(steps.setdefault(key, float(step)) == float(step), path, "has other steps than other ranks")
    for group, total in zip(shapes, totals, strict=True):
        sizes = [math.prod(shape) for shape in group.values()]
        wanted = sum(math.ceil(size / saved_by) * saved_by for size in sizes) if sharded else sum(sizes)
        _require(total == wanted, source, f"has {total} values of a group of parameters with {wanted}")


def _check_omitted(engine: Any, content: Mapping[str, Any], path: Path, saved_by: int) -> None:
    """Check what is loaded from the original files: buffers and frozen parameters."""
    weights: Any = content.get("module")
    fragments: Any = content.get("frozen_param_fragments")
    listed: Any = content.get("buffer_names")
    _require(isinstance(weights, dict), path, "has no weights")
    buffers = dict(engine.module.named_buffers())
    known = isinstance(listed, list) and all(isinstance(name, str) and name in buffers for name in listed)
    _require(known, path, "has other buffers than the model")
    for name in listed:
        _require_tensor(weights.get(name), buffers[name].shape, path, name)
    for name, parameter in _frozen(engine):
        if not hasattr(parameter, "ds_tensor"):
            _require_tensor(weights.get(name), parameter.shape, path, name)
            continue
        _require(isinstance(fragments, dict), path, "has no frozen_param_fragments")
        part = torch.Size([math.ceil(parameter.ds_numel / saved_by)])  # each rank has one
        _require_tensor(fragments.get(name), part, path, name)


def _check_flat(state: Mapping[str, Any], shapes: list[dict[str, tuple[int, ...]]], path: Path) -> list[int]:
    """Check the flat values of a rank, one after the other; returns how many there are of each group."""
    paddings = state.get("group_paddings", [0] * len(shapes))
    flat = state["fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"]
    fits = isinstance(paddings, list) and len(paddings) == len(flat) == len(shapes)
    _require(fits, path, f"has {len(flat)} groups of values for {len(shapes)} groups of parameters")
    inner = next(state[name] for name in _INNER if name in state)
    for index, values in enumerate(flat):
        padding = require_number(paddings[index], f"{path}: group_paddings")
        for name, value in inner["state"].get(index, {}).items():
            if isinstance(value, torch.Tensor) and name != "step":
                _require_tensor(value, torch.Size([values.numel() + padding]), path, name)
        _require(bool(inner["state"].get(index)) or not inner["state"], path, "lacks the state of a group")
    mappings = state.get("param_slice_mappings", [])
    for index, fragments in enumerate(mappings):
        _require(isinstance(fragments, dict) and set(fragments) <= set(shapes[index]), path, "has other parameters")
        for name, place in fragments.items():
            start = require_number(getattr(place, "start", None), f"{path}: start of {name}")
            numel = require_number(getattr(place, "numel", None), f"{path}: numel of {name}")
            _require(start + numel <= flat[index].numel(), path, f"has no values of {name} at {start}")
    return [values.numel() for values in flat]


def _plain_shapes(group: Any) -> Any:
    return {name: tuple(shape) for name, shape in group.items()} if isinstance(group, dict) else group


def _frozen(engine: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            yield name, parameter


def _is_version(value: Any) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return isinstance(value, str) and bool(Version(value))
    except InvalidVersion:
        return False


def _fit(value: Any, own: Any, path: Path, name: str, shapes: bool = True) -> None:
    """Raise CheckpointError if a value is not of the form that the engine's own has."""
    if isinstance(own, torch.Tensor):
        if shapes:
            _require_tensor(value, own.shape, path, name)
        else:
            _require(isinstance(value, torch.Tensor) and value.ndim == own.ndim, path, f"has no tensor {name}")
    elif isinstance(own, Mapping):
        fits = isinstance(value, Mapping) and value.keys() == own.keys()
        _require(fits, path, f"has another {name}")
        for key, item in own.items():
            _fit(value[key], item, path, f"{name}.{key}", shapes)
    elif isinstance(own, (list, tuple)):
        fits = isinstance(value, (list, tuple)) and len(value) == len(own)
        _require(fits, path, f"has another number of {name}")
        for index, item in enumerate(own):
            _fit(value[index], item, path, f"{name}[{index}]", shapes)
    elif isinstance(own, bool) or own is None:
        _require(isinstance(value, bool) or value is own or (own is None and is_number(value)), path, _has(name, value))
    elif isinstance(own, (int, float)):
        _require(is_number(value) and abs(value) <= 2.0**127, path, _has(name, value))
        least = 0 if own >= 0 else -1
        positive = name.rpartition(".")[2] in _POSITIVE
        _require(value > 0 if positive else value >= least, path, _has(name, value))
        if isinstance(own, int):
            _require(isinstance(value, int) and value <= 2**63, path, _has(name, value))
    else:
        _require(type(value) is type(own), path, _has(name, value))


def _has(name: str, value: Any) -> str:
    return f"has {name}={reprlib.repr(value)}"


def _require_tensor(value: Any, shape: torch.Size, path: Path, name: str) -> None:
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    _require(
        isinstance(value, torch.Tensor) and value.shape == shape, path, f"has {name} of {found}, not {tuple(shape)}"
    )


def _require(holds: bool, path: Path, problem: str) -> None:
    if not holds:
        raise CheckpointError(f"{path} {problem}. It does not fit the engine; choose another checkpoint.")
