"""Private names of torch that this package uses; ``tests/test_torch_compat.py`` fails when torch drops one."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, get_worker_info

# Pins every tensor in a nested batch, as the loader's own thread does. The public Tensor.pin_memory takes one tensor.
from torch.utils.data._utils.pin_memory import pin_memory as pin_memory


def has_live_workers(loader: DataLoader[Any]) -> bool:
    """Return True if persistent workers of an earlier epoch are running (``_iterator``; torch has no public query)."""
    return loader._iterator is not None


def stop_workers(loader: DataLoader[Any]) -> None:
    """Stop persistent workers, so that the next epoch starts new ones (``_iterator``; torch has no public method)."""
    loader._iterator = None


_to_shut_down: weakref.WeakSet[Any] = weakref.WeakSet()


def shut_down_at_exit(batches: Iterator[Any]) -> None:
    """End the workers of a running iteration when Python exits (``_shutdown_workers``; torch has no public method).

    multiprocessing would send them SIGTERM and wait, without end for workers that ignore it.
    """
    if not _to_shut_down:
        atexit.unregister(_shut_down)
        atexit.register(_shut_down)  # runs before the handler of multiprocessing, which was registered earlier
    _to_shut_down.add(batches)


def _shut_down() -> None:
    for batches in list(_to_shut_down):
        batches._shutdown_workers()


def default_store() -> dist.Store:
    """Return the store of the default process group; ``dist`` has no public accessor."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def set_attribute(loader: DataLoader[Any], name: str, value: Any) -> None:
    """Set an attribute that ``DataLoader.__setattr__`` guards against changes after construction."""
    object.__setattr__(loader, name, value)


def set_worker_identity(worker_id: int, seed: int) -> None:
    """Change id and seed in the worker's ``get_worker_info()``, which refuses plain assignment.

    torch always gives the first batch to worker 0, and offers no way to begin with another worker.
    """
    info = get_worker_info()
    object.__setattr__(info, "id", worker_id)
    object.__setattr__(info, "seed", seed)


@contextmanager
def hidden_worker_info() -> Iterator[None]:
    """Make ``get_worker_info()`` None in the block, so that a data set reads its whole stream in every worker.

    torch has no public way to tell a data set that it is not to divide its samples among the workers.
    """
    module: Any = sys.modules["torch.utils.data._utils.worker"]
    former, module._worker_info = module._worker_info, None
    try:
        yield
    finally:
        module._worker_info = former
