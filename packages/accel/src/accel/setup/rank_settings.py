"""Compares the settings of the ranks, which launchers such as srun and torchrun do not."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from accel_state import PartialState
from accel_state.errors import ConfigurationError

from .._torch_compat import default_store


def compare_settings(process: PartialState, settings: dict[str, Any]) -> None:
    """Compare this rank's settings with those of the rank that was here first, without waiting for others.

    Only the first Accelerator of each rank in a process group is compared: ranks may make others as they like.

    Raises:
        ConfigurationError: a setting differs.
    """
    # In the "fake" group of `accel plan` there are no other ranks.
    store = default_store() if dist.is_initialized() and dist.get_backend() != "fake" else None
    if store is None or store.add(f"accel/accelerators/{process.process_index}", 1) > 1:
        return
    own = {"rank": process.process_index, **settings}
    first = json.loads(store.compare_set("accel/settings", "", json.dumps(own)))
    differing = [name for name in settings if settings[name] != first[name]]
    if differing:
        here, there = (", ".join(f"{name}={each[name]!r}" for name in differing) for each in (own, first))
        raise ConfigurationError(
            f"rank {own['rank']} has {here}, and rank {first['rank']} has {there}. Give all ranks the same arguments "
            "and environment variables, as `accel launch` does; mpirun passes a variable on with -x NAME."
        )
