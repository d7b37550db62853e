"""Linear layers in 4 bits that are sharded over the tensor-parallel axis.

Of bitsandbytes: a rank has the packed bytes of its rows or columns, which are a DTensor of the shape (outputs, bytes of
a row, 1), and is saved in the layer's own shape. Scales belong to blocks of consecutive weights of a row, so a rank
needs whole blocks. Every rank has all scales, as under FSDP, and those of its part in float32.

In torchao's NF4: a rank has the codes of its rows or columns and the scales of their blocks, as DTensors of the shape
(outputs, bytes of a row), which are saved as the vectors that they were. The table, of less than a thousandth of the
bytes, is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from accel_state.errors import ConfigurationError

from .._torch_compat import shard_replicated
from ..core.fused_dtensor import remember_packed
from ..core.nf4_weights import CODES, SCALES, keep_part, layout_of
from ..core.quantized_layers import ON_SCALES
from .tp_collectives import share_of

_STATE: Final = "_accel_tp_quant_state"


def is_four_bit(module: Any) -> bool:
    """Return True if a module is a quantized ``Linear4bit``, or a part of one."""
    names = [f"{cls.__module__}.{cls.__name__}" for cls in type(module).__mro__]
    is_layer = "bitsandbytes.nn.modules.Linear4bit" in names
    return is_layer and (hasattr(module, _STATE) or getattr(module.weight, "quant_state", None) is not None)


def shard_four_bit(module: Any, dim: int, mesh: DeviceMesh) -> None:
    """Replace the packed weight by this rank's part of its outputs (``dim`` 0) or inputs (1).

    Raises:
        ConfigurationError: a part would have fractions of blocks.
    """
    old, state = module.weight, module.weight.quant_state
    outputs, inputs = state.shape
    of_input = inputs // mesh.size() if dim == 1 else inputs
    if of_input % state.blocksize or inputs % (mesh.size() if dim == 1 else 1):
        raise ConfigurationError(
            f"a 4-bit layer of {inputs} inputs has a scale for each {state.blocksize} weights, and tp_size="
            f"{mesh.size()} would cut its rows into parts of {inputs / (mesh.size() if dim == 1 else 1):g}. Choose a "
            "tp_size that leaves whole blocks, quantize with a smaller blocksize, or shard by FSDP 2 (dp_shard_size)."
        )
    packed = old.data.reshape(outputs, -1, 1)
    shard, device = shard_replicated(packed, mesh, [Shard(dim)]), old.device
    begin, size = share_of(outputs if dim == 0 else inputs // state.blocksize, mesh)
    shape = torch.Size((size, inputs) if dim == 0 else (outputs, of_input))

    def take_part() -> None:
        scales = _scales(state).view(outputs, -1).narrow(dim, begin, size).contiguous().flatten()
        setattr(module, _STATE, _part(state, scales, shape, device))

    take_part()
    setattr(module, ON_SCALES, take_part)
    remember_packed(module, "weight", old.shape)
    module._parameters["weight"] = nn.Parameter(shard, requires_grad=False)


def _scales(state: Any) -> torch.Tensor:
    if not state.nested:
        scales: torch.Tensor = state.absmax
        return scales
    from bitsandbytes.functional import dequantize_blockwise

    full: torch.Tensor = dequantize_blockwise(state.absmax, state.state2) + state.offset
    return full.float()


def _part(state: Any, scales: torch.Tensor, shape: torch.Size, device: torch.device) -> Any:
    return type(state)(
        absmax=scales.to(device),
        shape=shape,
        code=state.code.to(device),
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )


def four_bit_product(module: Any, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return the product with this rank's part of the weight, in the type that the layer computes in."""
    import bitsandbytes

    if not module.compute_type_is_set:
        module.set_compute_type(x)
        module.compute_type_is_set = True
    own = x if module.compute_dtype is None else x.to(module.compute_dtype)
    library: Any = bitsandbytes  # whose types do not export what it documents
    out: torch.Tensor = library.matmul_4bit(own, packed.reshape(-1, 1).t(), quant_state=getattr(module, _STATE))
    return out.to(x.dtype)


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
