"""Changes of what a checkpoint's files hold, for tests of states whose contents do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DELETE = object()


def rewrite(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A change of what a file of torch's format holds."""

    def apply(directory: Path) -> None:
        content = torch.load(directory / name, weights_only=False)
        torch.save(change(content), directory / name)

    return apply


def put(*path: Any, value: Any) -> Callable[[Any], Any]:
    """A change that sets the value at a path of keys; the value :data:`DELETE` deletes what is there."""

    def apply(content: Any) -> Any:
        target = content
        for key in path[:-1]:
            target = target[key]
        if value is DELETE:
            del target[path[-1]]
        else:
            target[path[-1]] = value
        return content

    return apply
