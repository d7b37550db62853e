"""The files of a checkpoint: their names, and reading them without running code."""

from __future__ import annotations

import importlib
import pickle
import re
import threading
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from accel_state import is_torch_version

from .digests import Workers
from .names import LOADER_NAME as LOADER_NAME
from .names import OPTIMIZER_NAME as OPTIMIZER_NAME
from .names import RNG_STATE_NAME as RNG_STATE_NAME
from .names import SAMPLER_NAME as SAMPLER_NAME
from .names import SCALER_NAME as SCALER_NAME
from .names import SCHEDULER_NAME as SCHEDULER_NAME
from .names import CheckpointError as CheckpointError
from .names import custom_file as custom_file
from .names import custom_files as custom_files
from .names import is_file_of_a_state as is_file_of_a_state
from .names import numbered as numbered
from .names import numbered_files as numbered_files
from .names import require_files as require_files
from .names import rng_file as rng_file

# In the file of each rank: tells a checkpoint that has lost its manifest from one of a library that writes none.
MANIFEST_MARK = "accel_manifest"

_NUMPY_NUMBERS = "?bhilqBHILQefdgFDSU"


def require_count(kind: str, saved: int, present: int, folder: Path) -> None:
    """Raise CheckpointError if a checkpoint has another number of some kind of object than there are to load."""
    if saved != present:
        raise CheckpointError(
            f"{folder} has {saved} {kind} and there are {present} to load. Prepare and register the same objects as "
            "when it was saved."
        )


@cache
def _plain_values() -> list[Any]:
    """What files may hold besides tensors and the types that torch itself takes for harmless: numbers of numpy, and
    containers.
    """
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
    """A block in which torch takes plain values for harmless too; what the user has allowed, before or meanwhile, stays
    allowed.

    Torch has one such list for the process, and a save in the background reads its own files back while the loop may be
    loading.
    """

    _lock: ClassVar = threading.Lock()
    _blocks: ClassVar = 0
    _outermost: ClassVar[AbstractContextManager[Any]] = nullcontext()

    def __enter__(self) -> None:
        cls = type(self)
        with cls._lock:
            cls._blocks += 1
            if cls._blocks == 1:
                known = torch.serialization.get_safe_globals()
                cls._outermost = _allowing([value for value in _plain_values() if value not in known])
                cls._outermost.__enter__()

    def __exit__(self, *_: object) -> None:
        cls = type(self)
        with cls._lock:
            cls._blocks -= 1
            if cls._blocks == 0:
                cls._outermost.__exit__(None, None, None)


def _allowing(values: list[Any]) -> AbstractContextManager[Any]:
    """A block in which torch takes some values for harmless."""
    # It takes away what it has added, and nothing else for any moment: another thread may be loading what the user has
    # allowed.
    allowing = getattr(torch.serialization, "safe_globals", None)
    return allowing(values) if allowing is not None else _allowing_before_torch_2_5(values)


@contextmanager
def _allowing_before_torch_2_5(values: list[Any]) -> Iterator[None]:
    torch.serialization.add_safe_globals(values)
    try:
        yield
    finally:
        kept = [value for value in torch.serialization.get_safe_globals() if value not in values]
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(kept)


def read(path: Path, map_location: Any = "cpu", load_kwargs: dict[str, Any] | None = None, mapped: bool = False) -> Any:
    """Read a file of torch's format: tensors, plain values, and what was allowed with
    ``torch.serialization.add_safe_globals``.

    Args:
        path: the file.
        map_location: where to put tensors, as in ``torch.load``.
        load_kwargs: further arguments of ``torch.load``; ``weights_only=False`` is the caller's word that the file may
            run code.
        mapped: map the file rather than read it, for tensors that will be copied elsewhere at once.

    Raises:
        CheckpointError: the file is damaged, or holds anything else; the message names it.
    """
    options = {"map_location": map_location, "weights_only": True, **(load_kwargs or {})}
    try:
        if mapped and _is_zip(path):  # the format of torch before 1.6 cannot be mapped
            options.setdefault("mmap", True)
        with _Allowed():
            return torch.load(path, **options)
    except FileNotFoundError:
        require_files(path.parent, [path.name])
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} is not loaded: {_refused(error)}") from error
    except Exception as error:
        # A damaged file can make the reader stumble over anything.
        raise CheckpointError(
            f"{path} is damaged or no file of this format: {type(error).__name__}: {error}"
        ) from error


def was_saved_with_manifest(path: Path) -> bool:
    """Whether a rank's file says that its checkpoint has a manifest; False for what cannot be read, or is of another
    library.
    """
    try:
        state = read(path)
    except CheckpointError:
        return False
    return isinstance(state, dict) and bool(state.get(MANIFEST_MARK))


def start_checking_sums(folder: Path, workers: Workers) -> Callable[[], None]:
    """Have workers compare files of torch's format with the checksums in them, which torch itself writes and does not
    read.

    Returns:
        A function to call when the workers' block has been left, which raised CheckpointError if a file is damaged.
    """
    for path in sorted(folder.iterdir()):
        if is_file_of_a_state(path.name) and path.is_file() and _is_zip(path):
            workers.submit(partial(_check_sums, path))
    return lambda: None


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # one that is damaged
        return True


def _check_sums(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged: {type(error).__name__}: {error}. Choose another checkpoint."
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: its checksum of {damaged} does not hold. Choose another checkpoint.")


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
        f"it holds {found[1]}, and reading that could run code. Keep to tensors, numbers, strings and containers of "
        "them in state_dict(), "
        "or allow a class that you trust with torch.serialization.add_safe_globals"
    )
