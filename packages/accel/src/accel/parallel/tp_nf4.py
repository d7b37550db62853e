"""Linear layers in torchao's NF4 that are sharded over the tensor-parallel axis.

A rank has the codes of its rows or columns and the scales of their blocks, as DTensors of the shape (outputs, bytes of
a row), which are saved as the vectors that they were. The table, of less than a thousandth of the bytes, is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accel_state.errors import ConfigurationError

from ..core.nf4_weights import CODES, SCALES, keep_part, layout_of
from .tp_collectives import share_of


def parts_of_nf4(module: nn.Module, dim: int, mesh: DeviceMesh) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that are sharded along a dimension of the weight, as matrices, by name.

    Args:
        module: a layer whose weight is stored as bytes; from now on it reads this rank's part of it.
        dim: 0 for outputs, 1 for inputs.
        mesh: the axis.

    Raises:
        ConfigurationError: a part would have fractions of blocks.
    """
    layout = layout_of(module)
    outputs, inputs = layout.shape
    ranks = mesh.size() if dim == 1 else 1
    if inputs % (layout.block_size * ranks):
        raise ConfigurationError(
            f"a layer of {inputs} inputs in NF4 has a scale for each {layout.block_size} weights, and tp_size="
            f"{mesh.size()} would cut its rows into parts of {inputs / ranks:g}. Choose a tp_size that leaves whole "
            "blocks, quantize with a smaller block_size, or shard by FSDP 2 (dp_shard_size)."
        )
    unit = layout.block_size if dim == 1 else 1
    begin, size = share_of(layout.shape[dim] // unit, mesh)
    keep_part(module, dim, begin * unit, size * unit)
    for suffix in (CODES, SCALES):
        stored: Any = module._parameters[f"weight{suffix}"]
        yield f"weight{suffix}", stored.data.view(outputs, -1)
