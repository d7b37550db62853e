"""The private names of torch that accel-state uses; tests/test_torch_compat.py fails when torch drops one."""

from __future__ import annotations

import torch.distributed as dist


def default_store() -> dist.Store:
    """The store of the default process group; to be replaced by ``dist.group.WORLD.get_group_store()`` (in 2.13)."""
    return dist.distributed_c10d._get_default_store()
