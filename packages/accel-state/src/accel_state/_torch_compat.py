"""The private names of torch that accel-state uses; tests/test_torch_compat.py fails when torch drops one."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist


def default_store() -> dist.Store:
    """The store of the default process group; to be replaced by ``dist.group.WORLD.get_group_store()`` (in 2.13)."""
    return dist.distributed_c10d._get_default_store()


def process_groups() -> list[dist.ProcessGroup]:
    """The process groups of this rank that were not destroyed; torch has no public list of them."""
    return list(dist.distributed_c10d._world.pg_map)


def _xla() -> Any:
    return importlib.import_module("torch_xla")._XLAC


def xla_tensor_id(tensor: torch.Tensor) -> int:
    """A number that two XLA tensors have in common if one is the other; torch_xla has no public one."""
    return int(_xla()._xla_get_tensor_id(tensor))


def xla_has_started() -> bool:
    """Whether the runtime of torch_xla was started in this process; only the functions that start it are public."""
    return bool(_xla()._xla_runtime_is_initialized())


def xla_mode_is_fixed() -> bool:
    """Whether an XLA device was used, after which several devices cannot be combined; torch_xla crashes if they are."""
    return bool(_xla()._xla_get_spmd_config_is_locked())
