"""Errors for weights of a sharded model that are used outside of a forward that gathers them.

There, a weight is a DTensor or one rank's piece. What torch raises about it names neither the weight nor a way out, so
it is explained where accel sees it: in ``accelerator.backward``, at the end of ``accelerator.accumulate``, and where
Python prints an error that ends the script. Nothing of this runs in a step without an error.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError
from accel_state.memory import should_reduce_batch_size

_MIXED = "got mixed torch.Tensor and DTensor"
_OTHER_SIZE = "returned an invalid gradient at index"  # in backward passes of flat parameters, which change their size
_FREED = re.compile(r"setStorage: .* out of bounds for storage of size 0")
_GRADIENT_OF_GRADIENT = (
    "the backward pass needs weights of a sharded model that an earlier backward pass has freed. This happens with a "
    "loss that contains gradients, such as a gradient penalty (torch.autograd.grad(..., create_graph=True)): a sharded "
    "model does not gather its weights again to differentiate a gradient, also with reshard_after_forward=False. Train "
    "this model with DDP."
)

_explainer: Callable[[], Any] = type(None)  # a reference to the strategy of the latest sharded model
_print_before: Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None = None


def message(name: str, advice: str) -> str:
    """Return the error for a weight; ``advice`` is what to do instead."""
    return f"{name} was used outside of a forward that gathers it, where a rank holds only a part of it. {advice}"


def explain(
    error: BaseException, names: Mapping[torch.Tensor, str], advice: str, loss: torch.Tensor | None = None
) -> ConfigurationError | None:
    """Return what an error of torch means if a weight of a sharded model has caused it, else None.

    Args:
        error: what was raised.
        names: the parameters of sharded models, in the form that they have outside of a forward.
        advice: what to do instead.
        loss: the loss, if its backward pass has raised the error.
    """
    if not isinstance(error, (RuntimeError, IndexError)) or should_reduce_batch_size(error):
        return None
    frame, line = _innermost(error.__traceback__)
    used = [loss] if loss is not None else [] if frame is None else list(_tensors_in(frame, line))
    if _OTHER_SIZE in str(error) and loss is not None:
        used = _of_invalid_gradient(loss, str(error)) or used
    if _MIXED in str(error) or _OTHER_SIZE in str(error):
        # Otherwise a weight must be in the statement itself: outputs of the model are computed with weights, too.
        used += [node.variable for tensor in used for node in accumulating_nodes(tensor)]
    name = next((names[tensor] for tensor in used if tensor in names), None)
    if name is not None:
        return ConfigurationError(message(name, advice))
    # Optimizers and clipping read all parameters at once.
    if _MIXED in str(error) and "_foreach" not in str(error) and frame is not None and not _is_of("accel", frame):
        return ConfigurationError(message("a weight of a sharded model", advice))
    if names and _FREED.search(str(error)):
        return ConfigurationError(_GRADIENT_OF_GRADIENT)
    return None


def explain_at_exit(strategy: Any) -> None:
    """Let Python print the explanation of a strategy with an error that ends the script."""
    global _explainer, _print_before
    _explainer = weakref.ref(strategy)
    if _print_before is None:
        _print_before, sys.excepthook = sys.excepthook, _print


def accumulating_nodes(loss: torch.Tensor) -> dict[Any, int]:
    """Return the nodes that accumulate gradients of a loss, with the lowest sequence number of those before them."""
    found: dict[Any, int] = {}
    for node, following in uses_of_leaves(loss):
        found[following] = min(found.get(following, node._sequence_nr()), node._sequence_nr())
    return found


def uses_of_leaves(loss: torch.Tensor) -> Iterator[tuple[Any, Any]]:
    """Yield each node of a loss that has used a leaf, and the node that accumulates the gradient of that leaf."""
    for node in _nodes_before(loss):
        for following, _ in node.next_functions:
            if hasattr(following, "variable"):
                yield node, following


def _nodes_before(loss: torch.Tensor) -> Iterator[Any]:
    """Yield the nodes of a loss, each once, without those that accumulate gradients."""
    pending: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and not hasattr(following, "variable") and following not in seen:
                seen.add(following)
                pending.append(following)


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    assert _print_before is not None
    strategy = _explainer()
    explained = None if strategy is None else strategy.explain(error)
    if explained is not None:
        explained.__cause__ = error
        kind, error, trace = type(explained), explained, None
    _print_before(kind, error, trace)


def _of_invalid_gradient(loss: torch.Tensor, text: str) -> list[torch.Tensor]:
    """Return the weights that the function in an error about sizes has computed with, freed ones first."""
    match = re.match(r"Function (\w+) returned an invalid gradient at index (\d+)", text)
    if match is None:
        return []
    found = []
    for node in _nodes_before(loss):
        inputs = node.next_functions[int(match[2]) :][:1]
        following: Any = inputs[0][0] if inputs else None
        if node.name() == match[1] and hasattr(following, "variable"):
            freed = any(0 in item.shape for item in following._input_metadata)
            found.append((not freed, following.variable))
    return [variable for _, variable in sorted(found, key=lambda item: item[0])]


def _is_of(package: str, frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == package


def _innermost(trace: TracebackType | None) -> tuple[FrameType | None, int]:
    """Return the innermost frame outside of torch, and its line."""
    found: tuple[FrameType | None, int] = (None, 0)
    while trace is not None:
        if not _is_of("torch", trace.tb_frame):
            found = trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    return found


def _tensors_in(frame: FrameType, line: int) -> Iterator[torch.Tensor]:
    """Yield the tensors that a statement reads, without calling anything."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except SyntaxError:  # not Python, such as the cell of a notebook
        return
    around = [
        node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not around:
        return
    statement = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
    for node in ast.walk(statement):
        value = _value_of(node, frame)
        if isinstance(value, torch.Tensor):
            yield value


def _value_of(node: ast.AST, frame: FrameType) -> Any:
    """Return the value of a name, an attribute or an item at a constant index; None for other expressions."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value_of(node.value, frame)
        if isinstance(owner, nn.Module):
            return getattr(owner, node.attr, None)
        if isinstance(owner, torch.Tensor):
            return owner if node.attr in ("T", "mT") else None
        return getattr(owner, "__dict__", {}).get(node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = _value_of(node.value, frame)
        index: Any = node.slice.value
        try:
            return owner[index] if isinstance(owner, (list, tuple, dict, nn.ModuleList)) else None
        except (LookupError, TypeError):
            return None
    return None
