"""Checks of what a checkpoint's files contain, made before anything is loaded: structure, shapes, and bounds.

The manifest shows that files are as they were written, not that their contents fit the objects of this run. A state
whose contents do not fit must change nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel_state import get_logger
from accel_state.errors import AccelError
from accel_state.tensor_storage import id_tensor_storage

from .names import CheckpointError, require_number

logger: Final = get_logger(__name__)

# State of torch's optimizers that has a value for each value of the parameter.
_MOMENTS = frozenset({
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "grad_avg", "exp_inf"),
    *("sum", "ax", "prev", "step_size"),
})  # fmt: skip
# Of these it is known what they keep for a parameter, and which settings a step reads.
_KNOWN_OPTIMIZERS = ("torch.optim.", "deepspeed.ops.")
# What a step reads of a parameter that has a state.
_READ_BY_STEPS: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("Adam", "AdamW", "RAdam", "SparseAdam"), frozenset({"step", "exp_avg", "exp_avg_sq"})),
    **dict.fromkeys(("FusedAdam", "DeepSpeedCPUAdam"), frozenset({"exp_avg", "exp_avg_sq"})),
    "NAdam": frozenset({"step", "exp_avg", "exp_avg_sq", "mu_product"}),
    "Adamax": frozenset({"step", "exp_avg", "exp_inf"}),
    "Adadelta": frozenset({"step", "square_avg", "acc_delta"}),
    "Adagrad": frozenset({"step", "sum"}),
    "RMSprop": frozenset({"step", "square_avg"}),
    "ASGD": frozenset({"step", "eta", "mu", "ax"}),
    "Rprop": frozenset({"step", "prev", "step_size"}),
}
_LOADS_AS_SAVED = (nn.Module._load_from_state_dict, nn.BatchNorm1d._load_from_state_dict)


@dataclass(frozen=True)
class Change:
    """The load of one object, which can be undone.

    Attributes:
        path: the file, for messages.
        apply: loads what was read.
        remember: returns a function that restores the object as it is now.
    """

    path: Path
    apply: Callable[[], Any]
    remember: Callable[[], Callable[[], Any]]


def apply_changes(
    reversible: list[Change],
    collective: list[Change],
    others: list[Callable[[], Any]],
    on_all_ranks: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Load everything on all ranks, or leave everything that can be undone as it was.

    Args:
        reversible: what is loaded first.
        collective: what is loaded next, by calls in which ranks communicate: every rank makes them in this order.
        others: calls that load checked contents, such as weights; every rank makes them in this order.
        on_all_ranks: makes a block that fails on every rank if it fails on one.
    """
    with ExitStack() as undo:
        # Those that communicate come after all that may fail on one rank alone.
        for changes in (reversible, collective) if collective else (reversible,):
            with on_all_ranks():
                for change in changes:
                    undo.callback(_restore, change.path, change.remember())
                    try:
                        change.apply()
                    except AccelError:
                        raise
                    except Exception as error:
                        raise CheckpointError(
                            f"{change.path} does not fit its object ({type(error).__name__}: {error}). Nothing was "
                            "loaded. Prepare and register the same objects, in the same order, as when it was saved."
                        ) from error
        with on_all_ranks():
            for call in others:
                call()
        undo.pop_all()


def _restore(path: Path, restore: Callable[[], Any]) -> None:
    try:
        restore()
    except Exception as error:
        logger.error("the object of %s could not be restored: %s: %s", path, type(error).__name__, error)


def loading(obj: Any, state: Any, path: Path) -> Change:
    """Return the load of an object with ``state_dict`` and ``load_state_dict``, such as an optimizer."""
    return Change(path, partial(obj.load_state_dict, state), partial(remember, obj))


def loading_attributes(obj: Any, values: Mapping[str, Any], path: Path) -> Change:
    """Return the assignment of attributes."""

    def assign(new: Mapping[str, Any]) -> None:
        for name, value in new.items():
            setattr(obj, name, value)

    return Change(path, partial(assign, values), lambda: partial(assign, {name: getattr(obj, name) for name in values}))


def remember(obj: Any) -> Callable[[], Any]:
    """Return a function that restores an object with ``state_dict`` and ``load_state_dict`` as it is now."""
    if isinstance(obj, Optimizer):
        # torch replaces its state, so no tensor is copied, and may fill that of an optimizer that has none before it
        # loads another one.
        state, groups = copy.copy(obj.state), list(map(dict, obj.param_groups))

        def restore() -> None:
            obj.state, obj.param_groups = state, groups

        return restore
    try:
        current = obj.state_dict()
        # Copies of tensors are in host memory, which is larger than a device's.
        copies: dict[int, Any] = {}
        seen, pending = set(), [current]
        while pending:
            value = pending.pop()
            if type(value) in (torch.Tensor, nn.Parameter):
                copies[id(value)] = value.detach().to("cpu", copy=True)
            elif type(value) in (dict, list, tuple) and id(value) not in seen:
                seen.add(id(value))
                if type(value) is dict:
                    copies.update(zip(map(id, value), value, strict=True))  # keys stay the same objects
                pending += value.values() if type(value) is dict else value
        current = copy.deepcopy(current, copies)
    except Exception as error:
        # It may have no state before one is loaded, or a state that only its own code can copy.
        logger.debug("a failed load could not restore %s: %s: %s", type(obj).__name__, type(error).__name__, error)
        return lambda: None
    return partial(obj.load_state_dict, current)


def loading_weights(
    module: nn.Module,
    weights: Any,
    path: Path,
    strict: bool = True,
    clean: Callable[[str], str] = str,
    **kwargs: Any,
) -> Callable[[], Any]:
    """Return the call that loads weights into a model, after a check that they fit.

    Args:
        module: the model.
        weights: what was read.
        path: the file, for messages.
        strict: whether names that differ are an error; otherwise what fits is loaded.
        clean: the name in files of a name in the model.
        **kwargs: for ``load_state_dict``.

    Raises:
        CheckpointError: they do not fit.
    """
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{path} holds a {type(weights).__name__} instead of the weights of a model.")
    renamed, absent, unknown = {}, [], set(weights)
    state = module.state_dict()
    for name in state:
        cleaned = clean(name)
        if cleaned in weights:
            renamed[name] = weights[cleaned]
            unknown.discard(cleaned)
        else:
            absent.append(name)
    missing = []
    if absent:
        # Files have one name for each tensor: a tied weight is loaded by its other name.
        given = {_identity(name, state[name]) for name in renamed}
        missing = [name for name in absent if _identity(name, state[name]) not in given]
    if strict and (missing or unknown):
        raise CheckpointError(
            f"{path} does not fit {type(module).__name__}: it lacks {_some(missing)} and has {_some(unknown)} that "
            "the model lacks. Load it into the model that was saved, or pass strict=False to load what fits."
        )
    check_weights(module, state, renamed, path)
    return partial(module.load_state_dict, renamed, strict=False, **kwargs)


def _identity(name: str, value: Any) -> Any:
    """Return what is equal for the names of one tensor."""
    if not isinstance(value, torch.Tensor):
        return name
    local = value.to_local() if hasattr(value, "to_local") else value
    layout = local.storage_offset(), value.shape, local.stride(), local.numel() or id(value)
    return *id_tensor_storage(local), *layout


def _some(unsorted: Iterable[str]) -> str:
    names = sorted(unsorted)
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more names" if len(names) > 5 else shown or "no names"


def check_weights(module: nn.Module, state: Mapping[str, Any], renamed: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if weights are not tensors, or have other shapes than the model's.

    Modules that load values in a way of their own, such as quantized ones, check these themselves.

    Args:
        module: the model.
        state: its state dict.
        renamed: what it will load, by the same names.
        path: the file, for messages.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    for name, expected in state.items():
        owner = modules.get(name.rpartition(".")[0])
        if name not in renamed or not isinstance(expected, torch.Tensor) or owner is None:
            continue
        if type(owner)._load_from_state_dict not in _LOADS_AS_SAVED:
            continue
        value = renamed[name]
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: {name} is a {type(value).__name__}, not a tensor. Choose another one.")
        if nn.parameter.is_lazy(expected):
            continue
        if value.shape != expected.shape and (expected.ndim, value.shape) != (0, (1,)):
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(value.shape)}, but {tuple(expected.shape)} in this model. Load it "
                "into the model that was saved."
            )


def check_optimizer(optimizer: Any, state: Any, path: Path) -> None:
    """Raise CheckpointError if the state of an optimizer does not fit its parameters."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(state, dict):
        raise _misfit(path, "is not a dictionary")
    if not isinstance(groups, list):
        return
    saved: Any = state.get("param_groups")
    if not isinstance(saved, list) or not isinstance(state.get("state"), dict):
        raise _misfit(path, "lacks state or param_groups")
    sizes = []
    for group in saved:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise _misfit(path, "has parameter groups without parameters")
        sizes.append(len(group["params"]))
    present = list(map(len, map(itemgetter("params"), groups)))
    if sizes != present:
        raise CheckpointError(
            f"{path} has parameter groups of {sizes} parameters, and the optimizer has groups of {present}. Build the "
            "optimizer as it was when the state was saved."
        )
    parameters: dict[Any, Any] = {}
    for group, own in zip(saved, groups, strict=True):
        if "lr" in own and not is_number(group.get("lr")):
            raise _misfit(path, f"has the learning rate {group.get('lr')!r}")
        parameters.update(zip(group["params"], own["params"], strict=True))
    if not type(optimizer).__module__.startswith(_KNOWN_OPTIMIZERS):
        return  # what other optimizers keep for a parameter may have any shape
    shapes: dict[Any, tuple[torch.Size, ...]] = {}
    for key, parameter in parameters.items():
        shapes[key] = (parameter.shape,) if key in state["state"] else ()
    _check_known(optimizer, saved, state["state"], shapes, path)


def check_named_optimizer(
    optimizer: Any, state: Any, shapes_of: Callable[[str], tuple[torch.Size, ...]], path: Path
) -> None:
    """Raise CheckpointError if the state of an optimizer by parameter names is not one, or has other shapes.

    Args:
        optimizer: the optimizer.
        state: its state, with names in place of numbers.
        shapes_of: the shapes that a parameter, and what is kept for each of its values, may have; empty if unknown.
        path: the file or directory, for messages.
    """
    check_named_structure(state, path)
    shapes: dict[Any, tuple[torch.Size, ...]] = {}
    for group in state["param_groups"]:
        if "lr" in group and any("lr" in own for own in optimizer.param_groups) and not is_number(group["lr"]):
            raise _misfit(path, f"has the learning rate {group['lr']!r}")
        shapes.update(zip(group["params"], map(shapes_of, group["params"]), strict=True))
    if not type(optimizer).__module__.startswith(_KNOWN_OPTIMIZERS):
        return
    _check_known(optimizer, state["param_groups"], state["state"], shapes, path)


def check_named_structure(state: Any, path: Path) -> None:
    """Raise CheckpointError if something is not the state of an optimizer: groups, and a dictionary a parameter."""
    if not isinstance(state, dict):
        raise _misfit(path, "is not a dictionary")
    groups, entries = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(entries, dict):
        raise _misfit(path, "lacks state or param_groups")
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise _misfit(path, "has parameter groups without parameters")
        names = group["params"]
        if not all(isinstance(name, (str, int)) for name in names):
            raise _misfit(path, f"has parameters named {names[:3]!r}")
    for key, values in entries.items():
        if not isinstance(values, dict):
            raise _misfit(path, f"has state of parameter {key!r} that is not a dictionary")


def _check_known(
    optimizer: Any,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Any, Any],
    shapes: Mapping[Any, tuple[torch.Size, ...]],
    path: Path,
) -> None:
    """Raise CheckpointError if something that a step reads is missing, no number, or has another shape.

    Args:
        optimizer: the optimizer, of a known kind.
        groups: the saved groups.
        states: what was saved for each parameter.
        shapes: the shapes that each parameter of the groups, and its state, may have; empty if unknown.
        path: the file or directory, for messages.
    """
    for key, entries in states.items():
        if key not in shapes:
            raise _misfit(path, f"has state of parameter {key!r}, which none of its groups has")
        if not isinstance(entries, dict):
            raise _misfit(path, f"has state of parameter {key!r} that is not a dictionary")
        for name, value in entries.items() if shapes[key] else ():
            if name == "step":
                step = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
                if not isinstance(step, (int, float)) or not 0 <= step <= 2**63:
                    raise _misfit(path, f"has {step!r} steps of parameter {key!r}")
            if name not in _MOMENTS or value is None:
                continue
            if not isinstance(value, torch.Tensor) or value.shape not in shapes[key]:
                found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise _misfit(path, f"has {name} of {found} for parameter {key!r} of shape {tuple(shapes[key][0])}")
    kind = type(optimizer).__name__
    for group in groups:
        for name, default in optimizer.defaults.items():
            value = group.get(name)
            if isinstance(default, bool) or name in ("foreach", "fused"):
                if not isinstance(group.get(name, default), (bool, NoneType)):
                    raise _misfit(path, f"has {name}={value!r}")
                continue
            numbers = default if isinstance(default, (tuple, list)) else (default,)
            if name == "lr" or not numbers or not all(map(is_number, numbers)):
                continue
            given = value if isinstance(value, (tuple, list)) else (value,)
            if len(given) != len(numbers) or not all(map(is_number, given)):
                raise _misfit(path, f"has a parameter group with {name}={value!r}")
        before = None
        for entries in filter(None, map(states.get, group["params"])):
            alike = kind == "Adafactor" or before in (None, set(entries))  # which keeps other parts of matrices
            if not alike or not _READ_BY_STEPS.get(kind, frozenset()) <= set(entries):
                raise _misfit(path, "lacks a part of a parameter's state")
            before = set(entries)


def is_number(value: Any) -> bool:
    """Return True if something is a finite number, or a tensor of one."""
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)


def check_scheduler(scheduler: Any, state: Any, path: Path) -> None:
    """Raise CheckpointError if the state of one of torch's schedulers, which accept anything, is not one."""
    if not isinstance(scheduler, LRScheduler):
        return
    if not isinstance(state, dict):
        raise _misfit(path, "is not a dictionary")
    groups = len(scheduler.optimizer.param_groups)
    if "last_epoch" in scheduler.__dict__ and "last_epoch" not in state:
        raise _misfit(path, "has no last_epoch")
    for name in ("last_epoch", "_step_count"):
        if name in state:
            require_number(state[name], f"{path}: {name}", minimum=-1)
    for name in ("base_lrs", "_last_lr"):
        if name in scheduler.__dict__ and name in state:
            rates = state[name]
            if not isinstance(rates, list) or len(rates) != groups:
                raise _misfit(path, f"has {name}={rates!r}")
            for rate in rates:
                if not is_number(rate):
                    raise _misfit(path, f"has the learning rate {rate!r}")


def check_sampler(state: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if a seed or an epoch cannot be one."""
    seed = state["initial_seed"]
    # Seeds of torch have 64 bits, with or without a sign.
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise _misfit(path, f"has the seed {seed!r}")
    require_number(state["epoch"], f"{path}: epoch")


def check_scaler(scaler: torch.amp.GradScaler, state: Any, path: Path) -> None:
    """Raise CheckpointError if the state of a loss scaler is not one."""
    if not scaler.is_enabled():
        return
    if not isinstance(state, dict):
        raise _misfit(path, "is not a dictionary")
    missing = set(scaler.state_dict()) - set(state)
    if missing:
        raise _misfit(path, f"lacks {', '.join(sorted(missing))}: it was saved without a loss scaler")
    for name in ("scale", "growth_factor", "backoff_factor"):
        value = state[name]
        if not is_number(value) or value <= 0:
            raise _misfit(path, f"has {name}={value!r}, which must be positive and finite")
    require_number(state["growth_interval"], f"{path}: growth_interval", minimum=1)
    require_number(state["_growth_tracker"], f"{path}: _growth_tracker")


def _misfit(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path} {problem}. It does not match this object; choose another checkpoint.")
