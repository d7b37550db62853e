"""Loading into models whose parameters are sharded over ranks (DTensors)."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .files import checkpoint_files
from .tensor_files import open_file


def load_into_sharded_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    """Load each rank's shards; every rank calls this. Arguments as in :func:`load_checkpoint_in_model`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state: dict[str, Any] = {}
    if not broadcast_from_rank0 or dist.get_rank() == 0:
        for path, names in checkpoint_files(checkpoint).items():
            file = open_file(path)
            state.update(file.tensors(file.names() if names is None else names))
    options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict
    )
    with torch.no_grad():
        set_model_state_dict(model, state, options=options)
