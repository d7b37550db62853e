"""The files of a checkpoint: their names, and reading them without running code."""

from __future__ import annotations

import importlib
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_state import is_torch_version
from accel_state.errors import AccelError

OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
LOADER_NAME = "dl_state_dict"
CUSTOM_NAME = "custom_checkpoint"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"

_NUMPY_NUMBERS = "?bhilqBHILQefdgFDSU"


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint that could not be written, or one that is not whole, is damaged, or does not fit what it is loaded into."""


def numbered(stem: str, index: int, suffix: str) -> str:
    """The file name of the object with this index: the first one has no number."""
    return f"{stem}.{suffix}" if index == 0 else f"{stem}_{index}.{suffix}"


def rng_file(rank: int) -> str:
    """The file name of a rank's random number generators."""
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def custom_file(index: int) -> str:
    """The file name of the registered object with this index."""
    return f"{CUSTOM_NAME}_{index}.pkl"


def numbered_files(folder: Path, stem: str, suffix: str) -> list[str]:
    """Names in a folder that :func:`numbered` could have given, in alphabetical order."""
    pattern = re.compile(rf"{re.escape(stem)}(_[1-9][0-9]*)?\.{re.escape(suffix)}")
    return sorted(path.name for path in folder.iterdir() if pattern.fullmatch(path.name))


def custom_files(folder: Path) -> list[str]:
    """Names in a folder that :func:`custom_file` could have given."""
    return sorted(path.name for path in folder.iterdir() if re.fullmatch(rf"{CUSTOM_NAME}_[0-9]+\.pkl", path.name))


def require_files(folder: Path, names: Iterable[str]) -> None:
    """Raise CheckpointError, which lists them, if files are missing."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} cannot be loaded: it has no {', '.join(missing)}. Prepare and register the same objects, on as many processes, as "
            "when it was saved, or choose another checkpoint."
        )


def require_count(kind: str, saved: int, present: int, folder: Path) -> None:
    """Raise CheckpointError if a checkpoint has another number of some kind of object than there are to load."""
    if saved != present:
        raise CheckpointError(
            f"{folder} has {saved} {kind} and there are {present} to load. Prepare and register the same objects as when it was saved."
        )


@cache
def _plain_values() -> list[Any]:
    """What files may hold besides tensors and the types that torch itself takes for harmless: numbers of numpy, and containers."""
    try:
        multiarray = importlib.import_module("numpy._core.multiarray")
    except ModuleNotFoundError:
        multiarray = importlib.import_module("numpy.core.multiarray")
    makers = [multiarray._reconstruct, multiarray.scalar]
    kinds = [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in _NUMPY_NUMBERS}]
    containers: list[Any] = [defaultdict, list, dict, set, int, float, frozenset, range, slice]
    # numpy 1 and 2 give the same functions different names.
    names = ["numpy._core.multiarray", "numpy.core.multiarray"] if is_torch_version(">=", "2.7") else []
    renamed = [(maker, f"{name}.{maker.__name__}") for maker in makers for name in names]
    return [*makers, *kinds, *containers, *renamed]


class _Allowed:
    """A block in which torch takes plain values for harmless too; what the user has allowed stays allowed."""

    def __enter__(self) -> None:
        self._before = torch.serialization.get_safe_globals()
        torch.serialization.add_safe_globals(_plain_values())

    def __exit__(self, *_: object) -> None:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(self._before)


def read(path: Path, map_location: Any = "cpu", load_kwargs: dict[str, Any] | None = None) -> Any:
    """Read a file of torch's format: tensors, plain values, and what was allowed with ``torch.serialization.add_safe_globals``.

    Args:
        path: the file.
        map_location: where to put tensors, as in ``torch.load``.
        load_kwargs: further arguments of ``torch.load``; ``weights_only=False`` is the caller's word that the file may run code.

    Raises:
        CheckpointError: the file is damaged, or holds anything else; the message names it.
    """
    options = {"map_location": map_location, "weights_only": True, **(load_kwargs or {})}
    try:
        with _Allowed():
            return torch.load(path, **options)
    except FileNotFoundError:
        require_files(path.parent, [path.name])
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} is not loaded: {_refused(error)}") from error
    except Exception as error:
        # A damaged file can make the reader stumble over anything.
        raise CheckpointError(f"{path} is damaged or no file of this format: {type(error).__name__}: {error}") from error


def check_readable(path: Path, what: str) -> None:
    """Raise CheckpointError if a file that was just written could not be loaded again without running code."""
    try:
        with _Allowed():
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"the state of {what} could be saved but not loaded again: {_refused(error)}") from error


def _refused(error: pickle.UnpicklingError) -> str:
    found = re.search(r"(?:GLOBAL|global|class) '?([\w.]+\.[\w.]+)", str(error))
    if found is None:
        return "it is damaged, or holds more than tensors and plain values"
    return (
        f"it holds {found[1]}, and reading that could run code. Keep to tensors, numbers, strings and containers of them in state_dict(), "
        "or allow a class that you trust with torch.serialization.add_safe_globals"
    )
