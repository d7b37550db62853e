"""Layers that are sharded over the tensor-parallel axis.

A parameter becomes a DTensor over the axis; the layer's forward computes with this rank's shard. Inputs and outputs are
plain tensors: replicated on the ranks of the axis, or sharded along the last dimension.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel, parallelize_module

from accel_state.errors import ConfigurationError

from .._torch_compat import keeps_local, shard_replicated
from ..core.fused_dtensor import remember_packed
from ..core.kept_results import is_keeping, keep
from ..core.nf4_weights import is_stored_in_nf4
from .async_products import in_autocast_dtype
from .differentiable import Collective, differentiable
from .tp_collectives import collectives_of_sum, joined, part, share_of, shared, summed
from .tp_four_bit import four_bit_product, is_four_bit, parts_of_nf4, shard_four_bit

LINEAR_LAYERS: Final = (
    "torch.nn.Linear (also in torchao's NF4) and Conv1D themselves, bitsandbytes' Linear4bit, and LoRA of PEFT on these"
)

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def is_conv1d(module: Any) -> bool:
    """Return True if a module is Transformers' Conv1D: a linear layer whose weight is (inputs, outputs)."""
    return (
        type(module).__name__ == "Conv1D"
        and hasattr(module, "nf")
        and isinstance(getattr(module, "weight", None), nn.Parameter)
    )


def is_linear(module: Any) -> bool:
    """Return True if a module computes exactly a linear layer; low-rank and most quantized subclasses do not."""
    if is_conv1d(module) or is_four_bit(module):
        return True
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def is_in_blocks(module: Any) -> bool:
    """Return True if a module's weight is in 4 bits, of bitsandbytes or torchao, with scales of blocks."""
    return is_four_bit(module) or is_stored_in_nf4(module)


def is_scaled(module: nn.Module) -> bool:
    """Return True if a module is an embedding that multiplies its output by ``embed_scale`` (Gemma, BART)."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).__name__.endswith("ScaledWordEmbedding")
        and hasattr(module, "embed_scale")
    )


class Style:
    """How a module is sharded."""

    supported: ClassVar[str] = ""  # the kinds of modules that it can shard, for messages

    def fits(self, module: nn.Module) -> bool:
        """Return True if a module can be sharded this way."""
        return is_linear(module)

    def apply(self, module: nn.Module, mesh: DeviceMesh, sharder: ParameterSharder) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value}' for key, value in vars(self).items())})"


class Region(Protocol):
    """How the products of layers are computed and added up, and what the bias of a row-wise layer is."""

    def computed(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor | None: ...

    def reduce(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor: ...

    def parameter(self, parameter: torch.Tensor) -> torch.Tensor: ...


class WholeSequences:
    """Each rank has the full output."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def computed(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """Return the product of a column-wise layer without its bias, where that was computed before the call."""
        return None

    def reduce(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of the products of a row-wise layer."""
        return reduced_product(layer, x, collectives_of_sum(self.mesh))

    def parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter


class ParameterSharder:
    """Shards parameters along the axis, tied ones once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._made: dict[nn.Parameter, tuple[nn.Parameter, tuple[int, torch.Size]]] = {}
        self.inputs: dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]] = {}
        """How layers mark their input, if not as replicated."""
        self.regions: dict[nn.Module, Region] = {}
        """How layers between which hidden states are sharded along the sequence compute their products."""
        self.outputs: dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]] = {}
        """What layers with gathered outputs do with their columns, if not that."""

    def input_of(self, module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that marks a layer's input as replicated."""
        return self.inputs.get(module) or partial(shared, mesh=self.mesh)

    def region_of(self, module: nn.Module) -> Region:
        """Return how a layer computes its products, and what happens to them."""
        return self.regions.get(module) or WholeSequences(self.mesh)

    def __call__(self, module: nn.Module, name: str, dim: int, pieces: int = 1) -> None:
        """Replace a module's parameter by its shard along a dimension."""
        if name == "weight" and is_four_bit(module):
            shard_four_bit(module, dim, self.mesh)
        elif name == "weight" and is_stored_in_nf4(module):
            for stored, view in parts_of_nf4(module, dim, self.mesh):
                self._shard(module, stored, dim, view)
        elif pieces == 1:
            self._shard(module, name, dim)
        else:
            old = module._parameters[name]
            assert old is not None
            # The pieces that are concatenated along `dim` get a dimension of their own.
            self._shard(module, name, dim + 1, old.data.unflatten(dim, (pieces, -1)))

    def _shard(self, module: nn.Module, name: str, dim: int, view: torch.Tensor | None = None) -> None:
        """Shard a parameter, or a view of it, which is saved in the parameter's shape."""
        old = module._parameters[name]
        assert old is not None
        whole = old.data if view is None else view
        if old not in self._made:
            shard = shard_replicated(whole, self.mesh, [Shard(dim)])
            self._made[old] = nn.Parameter(shard, old.requires_grad), (dim, whole.shape)
        new, done = self._made[old]
        if done != (dim, whole.shape):
            raise ConfigurationError(
                f"{name} of a {type(module).__name__} is shared with a layer that is sharded along another dimension. "
                "Shard neither: TorchTensorParallelConfig(plan=...)."
            )
        if view is not None:
            remember_packed(module, name, old.shape)
        module._parameters[name] = new


def _local(parameter: Any) -> Any:
    """Return this rank's shard, through which gradients flow, or the parameter itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def matrix_of(module: nn.Module) -> torch.Tensor:
    """Return this rank's shard of the weight, as a matrix of (inputs, outputs)."""
    weight: torch.Tensor = _local(module.weight)
    return weight.flatten(1) if is_conv1d(module) else weight.flatten(0, -2).t()


def product(module: nn.Module, x: torch.Tensor, bias: Any) -> torch.Tensor:
    """Return the product with this rank's shard of the weight."""
    weight = _local(module.weight)
    if is_stored_in_nf4(module):
        return nn.functional.linear(x, weight, bias)
    if is_four_bit(module):
        out = four_bit_product(module, x, weight)
        return out if bias is None else out + bias.to(out.dtype)
    if not is_conv1d(module):
        return nn.functional.linear(x, weight.flatten(0, -2), bias)
    if bias is None:
        return x @ weight.flatten(1)
    return torch.addmm(bias, x.flatten(0, -2), weight.flatten(1)).view(*x.shape[:-1], -1)


def reduced_product(layer: nn.Module, x: torch.Tensor, collectives: tuple[Collective, Collective]) -> torch.Tensor:
    """Return what a collective makes of the products of a row-wise layer.

    Args:
        layer: the layer.
        x: this rank's part of its inputs.
        collectives: the collective, and the function of its gradient.
    """
    if is_keeping() and not is_in_blocks(layer):
        return kept_product(x, matrix_of(layer), *collectives)
    return differentiable(product(layer, x, None), *collectives)


def _replace_forward(module: nn.Module, forward: Forward) -> None:
    module.forward = types.MethodType(forward, module)


class Columns(Style):
    """Column-wise: each rank computes a part of the outputs."""

    supported = LINEAR_LAYERS

    def __init__(self, pieces: int = 1, gathers: bool = False) -> None:
        self.pieces = pieces
        self.gathers = gathers

    def apply(self, module: nn.Module, mesh: DeviceMesh, sharder: ParameterSharder) -> None:
        outputs = 1 if is_conv1d(module) else 0
        width = int(module.out_features if is_four_bit(module) else module.weight.shape[outputs])  # type: ignore[arg-type,index]
        if self.pieces > 1 and is_in_blocks(module):
            raise ConfigurationError(
                f"a 4-bit layer of {width} outputs holds {self.pieces} matrices, which have not been compared with one "
                "process under tensor parallelism. Shard by FSDP 2 (dp_shard_size), or leave the layer out of the plan."
            )
        if self.pieces > 1 and width % (self.pieces * mesh.size()):
            raise ConfigurationError(
                f"a layer of {width} outputs holds {self.pieces} matrices, which tp_size={mesh.size()} does not divide "
                "evenly. Choose a size that does, or do not shard the layer: TorchTensorParallelConfig(plan=...)."
            )
        sharder(module, "weight", outputs, self.pieces)
        if module.bias is not None:
            sharder(module, "bias", 0, self.pieces)
        share = sharder.input_of(module)
        gather = sharder.outputs.get(module) or partial(joined, mesh=mesh, width=width)
        gathers, region = self.gathers, sharder.region_of(module)

        def forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            bias = None if layer.bias is None else _local(layer.bias).flatten()
            out = region.computed(layer, x)
            if out is None:
                out = product(layer, share(x), bias)
            elif bias is not None:
                out = out + bias.to(out.dtype)
            return gather(out) if gathers else out

        _replace_forward(module, forward)


class Rows(Style):
    """Row-wise: each rank multiplies a part of the inputs, and the products are added up over the ranks."""

    supported = LINEAR_LAYERS

    def __init__(self, splits: bool = False) -> None:
        self.splits = splits

    def apply(self, module: nn.Module, mesh: DeviceMesh, sharder: ParameterSharder) -> None:
        sharder(module, "weight", 0 if is_conv1d(module) else 1)
        splits, region = self.splits, sharder.region_of(module)

        def forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            out = region.reduce(layer, part(x, mesh) if splits else x)
            bias: Any = layer.bias
            return out if bias is None else out + region.parameter(bias).to(out.dtype)

        _replace_forward(module, forward)


class VocabularyRows(Style):
    """Each rank looks up the tokens of its part of the vocabulary."""

    supported = (
        "torch.nn.Embedding itself and Transformers' ScaledWordEmbedding, without max_norm, scale_grad_by_freq "
        "and sparse"
    )

    def fits(self, module: nn.Module) -> bool:
        if not isinstance(module, nn.Embedding) or not (
            type(module).forward is nn.Embedding.forward or is_scaled(module)
        ):
            return False
        if is_stored_in_nf4(module):
            return False
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse

    def apply(self, module: nn.Module, mesh: DeviceMesh, sharder: ParameterSharder) -> None:
        vocabulary = int(module.weight.shape[0])  # type: ignore[index]
        begin, size = share_of(vocabulary, mesh)
        sharder(module, "weight", 0)
        scaled, padding = is_scaled(module), getattr(module, "padding_idx", None)
        local_padding = padding - begin if padding is not None and begin <= padding < begin + size else None

        def forward(layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
            is_elsewhere = (ids < begin) | (ids >= begin + size)
            weight = _local(layer.weight)
            if not size:
                # More ranks than tokens: nothing to look up, but every rank must join the all-reduce.
                rows = weight.new_zeros((*ids.shape, weight.shape[-1])) + weight.sum()
            else:
                rows = nn.functional.embedding((ids - begin).masked_fill(is_elsewhere, 0), weight, local_padding)
            out = summed(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0), mesh)
            if not scaled:
                return out
            scale: Any = layer.embed_scale
            return out * (scale.to(out.dtype) if isinstance(scale, torch.Tensor) else scale)

        _replace_forward(module, forward)


class Heads(Style):
    """A norm of single heads (of queries or keys): replicated, and applied to the heads of this rank."""

    supported = "modules with the parameters of one head"

    def fits(self, module: nn.Module) -> bool:
        return True

    def apply(self, module: nn.Module, mesh: DeviceMesh, sharder: ParameterSharder) -> None:
        apply_torch_style(module, mesh, SequenceParallel(sequence_dim=2, use_local_output=True))


def apply_torch_style(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    """Shard a module by a style of torch, without a broadcast: its parameters are the same on all ranks."""
    style.src_data_rank = None
    parallelize_module(module, mesh, style, **keeps_local(parallelize_module))


def kept_product(x: torch.Tensor, matrix: torch.Tensor, reduce: Collective, spread: Collective) -> torch.Tensor:
    """Return ``reduce(x @ matrix)``, which a recomputation takes from the forward pass.

    Args:
        x: this rank's part of the inputs.
        matrix: this rank's rows of the weight.
        reduce: the collective that adds up the products of the ranks.
        spread: the collective that makes the gradient of the product from the gradient of the result.
    """
    x, matrix = in_autocast_dtype([x, matrix])
    output: torch.Tensor = _KeptSum.apply(_Factors.apply(x, matrix), x.detach(), matrix.detach(), reduce, spread)
    return output


class _Factors(torch.autograd.Function):
    """Two matrices, in the place of their product, which :class:`_KeptSum` computes where it is needed.

    A recomputation that ends with what is saved here does not get to the sum.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, matrix)
        return x.new_empty(()).expand(*x.shape[:-1], matrix.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, matrix = ctx.saved_tensors
        of_x = gradients[0] @ matrix.t() if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_x, None
        # As in the backward pass of a linear layer: the other way round, a product may be rounded otherwise.
        return of_x, (gradients[0].flatten(0, -2).t() @ x.flatten(0, -2)).t()


class _KeptSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, factors: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, reduce: Collective, spread: Collective
    ) -> Any:
        ctx.spread = spread
        return keep(lambda: reduce(x @ matrix))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.spread(gradients[0]), None, None, None, None
