"""Reading files of torch's format without running code from them."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import threading
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import filterfalse
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from accel_state import is_torch_version
from accel_state.errors import ConfigurationError

from .names import CheckpointError, require_files

# In the file of each rank: distinguishes a checkpoint that has lost its manifest from one of a library without one.
MANIFEST_MARK = "accel_manifest"

_NUMPY_NUMBERS = "?bhilqBHILQefdgFDSU"


def _harmless_values() -> list[Any]:
    """Return what files may hold besides torch's own types: numpy's numbers, and containers."""
    try:
        multiarray = importlib.import_module("numpy._core.multiarray")
    except ModuleNotFoundError:
        multiarray = importlib.import_module("numpy.core.multiarray")
    makers = [multiarray._reconstruct, multiarray.scalar]
    kinds = [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in _NUMPY_NUMBERS}]
    containers: list[Any] = [defaultdict, list, dict, set, int, float, frozenset, range, slice]
    # numpy 1 and 2 give the same functions different names; torch 2.6 takes no names.
    names = ["numpy._core.multiarray", "numpy.core.multiarray"] if is_torch_version(">=", "2.7") else []
    renamed = [(maker, f"{name}.{maker.__name__}") for maker in makers for name in names]
    return [*makers, *kinds, *containers, *renamed]


HARMLESS = _harmless_values()
# What needs no look at the file that was written, and how many values are checked instead.
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.Size, torch.dtype, torch.device})
_MOST = 1_000_000

_lock = threading.Lock()
_open_blocks = 0
_outermost: AbstractContextManager[Any] | None = None


@contextmanager
def allowing_harmless() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` accept :data:`HARMLESS` too in the block."""
    global _open_blocks, _outermost
    # torch has one list for the process, and a save in the background may read while the loop is loading.
    with _lock:
        if _open_blocks == 0:
            known = torch.serialization.get_safe_globals()
            _outermost = torch.serialization.safe_globals(list(filterfalse(known.__contains__, HARMLESS)))
            _outermost.__enter__()
        _open_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _open_blocks -= 1
            if _open_blocks == 0 and _outermost is not None:
                _outermost.__exit__(None, None, None)


def read(
    path: Path,
    map_location: Any = "cpu",
    load_kwargs: dict[str, Any] | None = None,
    mapped: bool = False,
    content: BinaryIO | None = None,
) -> Any:
    """Read a file of torch's format: tensors, :data:`HARMLESS` values, and types that the user has allowed.

    Args:
        path: the file.
        map_location: where its tensors go.
        load_kwargs: for ``torch.load``.
        mapped: map it into memory, if it can be.
        content: what to read; the path is its name.
    """
    options = {"map_location": map_location, "weights_only": True, **(load_kwargs or {})}
    try:
        if mapped and _is_zip(path):  # the format of torch before 1.6 cannot be mapped
            options.setdefault("mmap", True)
        with allowing_harmless():
            return torch.load(path if content is None else content, **options)
    except FileNotFoundError:
        require_files(path.parent, [path.name])
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} is not loaded: {_refusal(error)}") from error
    except Exception as error:
        # A damaged file can raise any error while it is read.
        raise CheckpointError(
            f"{path} is damaged, or not in torch's format: {type(error).__name__}: {error}"
        ) from error


def read_safetensors(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, torch.Tensor]:
    """Return the tensors of a file in the safetensors format.

    Args:
        path: the file.
        map_location: a device, or a dictionary as in ``torch.load``: in such a file all tensors are on the "cpu".

    Raises:
        CheckpointError: the file cannot be read.
        ConfigurationError: ``map_location`` is neither.
    """
    target = map_location.get("cpu", "cpu") if isinstance(map_location, Mapping) else map_location
    try:
        device = torch.device("cpu" if target is None else target)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"map_location={map_location!r} is not a device: {error}. For a file in the safetensors format pass a "
            'device ("cpu", torch.device(...), an index), or {"cpu": device}.'
        ) from error
    try:
        # Through the CPU, where the file is mapped: the library knows only some of the devices by name.
        weights: dict[str, torch.Tensor] = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged, or not in the safetensors format: {error}") from error
    return weights if device.type == "cpu" else {name: weight.to(device) for name, weight in weights.items()}


def check_readable(path: Path, value: Any, what: str) -> None:
    """Raise CheckpointError if a file to which a value was just written cannot be loaded without running code."""
    # Tensors, numbers, strings and containers of them always can. What holds very many things, or itself, is read.
    pending = [value]
    for _ in range(_MOST):
        if not pending:
            return
        one = pending.pop()
        kind = type(one)
        if kind is dict:
            pending += one
            pending += one.values()
        elif kind in (list, tuple):
            pending += one
        elif kind in (torch.Tensor, nn.Parameter):
            if one.__dict__ or one.layout is not torch.strided or one.is_quantized:
                break
        elif kind not in _PLAIN:
            break
    try:
        with allowing_harmless():
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"the state of {what} could be saved but not loaded again: {_refusal(error)}") from error


def _refusal(error: pickle.UnpicklingError) -> str:
    match = re.search(r"(?:GLOBAL|global|class) '?([\w.]+\.[\w.]+)", str(error))
    if match is None:
        return "it is damaged, or holds more than tensors and plain values"
    return (
        f"it holds {match[1]}, and reading that could run code. Keep to tensors, numbers, strings and containers of "
        "them in state_dict(), or allow a class that you trust with torch.serialization.add_safe_globals"
    )


def was_saved_with_manifest(path: Path) -> bool:
    """Return True if a rank's file says that its checkpoint has a manifest; False if it cannot be read."""
    try:
        state = read(path)
    except CheckpointError:
        return False
    return isinstance(state, dict) and bool(state.get(MANIFEST_MARK))


def check_sums(path: Path) -> None:
    """Compare a file of torch's ZIP format with the checksums in it, which torch writes and does not check."""
    if not _is_zip(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged: {type(error).__name__}: {error}. Choose another checkpoint."
        ) from error
    if damaged is not None:
        raise CheckpointError(
            f"{path} is damaged: the checksum of {damaged} does not match. Choose another checkpoint."
        )


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # damaged
        return True
