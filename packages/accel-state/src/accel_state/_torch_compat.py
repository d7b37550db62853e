"""The private names of torch that accel-state uses; tests/test_torch_compat.py fails when torch drops one."""

from __future__ import annotations

import importlib
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def default_store() -> dist.Store:
    """Return the store of the default process group.

    It will be replaced by ``dist.group.WORLD.get_group_store()`` (in 2.13).
    """
    return dist.distributed_c10d._get_default_store()


def connect_again(timeout: timedelta) -> dist.Store | None:
    """Another connection to the store of the default process group; None if it is no store of a server.

    Args:
        timeout: how long one call into it may take.
    """
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)


def process_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this rank that were not destroyed; torch has no public list of them."""
    return list(dist.distributed_c10d._world.pg_map)


def collectives_issued() -> int:
    """Return how many collectives the process groups of this rank have issued.

    Groups without a count have issued none.
    """
    total = 0
    group: Any  # torch's types leave the count out
    for group in process_groups():
        with suppress(RuntimeError):
            total += int(group._get_sequence_number_for_group())
    return total


def _xla() -> Any:
    return importlib.import_module("torch_xla")._XLAC


def xla_tensor_id(tensor: torch.Tensor) -> int:
    """Return a number that two XLA tensors have in common if one is the other; torch_xla has no public one."""
    return int(_xla()._xla_get_tensor_id(tensor))


def xla_has_started() -> bool:
    """Return True if the runtime of torch_xla was started in this process.

    Only the functions that start it are public.
    """
    return bool(_xla()._xla_runtime_is_initialized())


def xla_mode_is_fixed() -> bool:
    """Return True if an XLA device was used, after which several devices cannot be combined.

    Otherwise torch_xla crashes.
    """
    return bool(_xla()._xla_get_spmd_config_is_locked())
