"""Which engines a loss depends on, where several are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def reached(loss: torch.Tensor, wrappers: Sequence[Any]) -> list[Any]:
    """The engines, in their order, of which some parameter's gradient is computed by ``loss.backward()``."""
    owner = {id(parameter): index for index, wrapper in enumerate(wrappers) for parameter in wrapper.engine.module.parameters()}
    found: set[int] = set()
    seen: set[Any] = set()
    pending = [loss.grad_fn]
    while pending and len(found) < len(wrappers):
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in owner:
            found.add(owner[id(variable)])
        pending.extend(following for following, _ in node.next_functions)
    return [wrappers[index] for index in sorted(found)]
