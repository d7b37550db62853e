"""Weights that torchao keeps in 4 bits (``NF4Tensor``), each stored as three parameters of bytes.

An ``NF4Tensor`` has five inner tensors. torch's wrappers and checkpoints see it as one floating-point tensor: DDP
dequantizes it to send it and quantizes the result again, and no file format has its parts. Vectors of bytes are sent,
sharded over any number of ranks and saved like any other parameter, and no mixed precision converts them. The codes of
the weights and the scales of their blocks are vectors of their own, so that tensor parallelism can shard them by rows
or columns. The layer's attribute stays an ``NF4Tensor``, made of views of the gathered bytes wherever it is read.
"""

from __future__ import annotations

import copyreg
import dataclasses
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Final

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from .local_part import local

CODES: Final = "_nf4"
"""What the name of the parameter with the weights' codes of 4 bits has after that of the weight."""
SCALES: Final = "_nf4_scales"
"""The same for the scales of blocks, of one byte each."""
TABLE: Final = "_nf4_table"
"""The same for what remains: the scales of these scales, their mean, and the values of the codes."""


def is_nf4(tensor: object) -> bool:
    """Return True if a tensor is an ``NF4Tensor`` of torchao."""
    return type(tensor).__name__ == "NF4Tensor" and type(tensor).__module__.startswith("torchao.")


def has_nf4(model: nn.Module) -> bool:
    """Return True if a model has weights in 4 bits of torchao, as they are loaded or as bytes."""
    return any(_LAYOUTS in vars(module) or any(map(is_nf4, module._parameters.values())) for module in model.modules())


def check_nf4(model: nn.Module, strategy: Any) -> None:
    """Refuse such weights with strategies that have not been compared with one process."""
    if not strategy.trains_nf4 and has_nf4(model):
        raise ConfigurationError(
            f"{type(model).__name__} has weights in 4 bits of torchao (NF4Tensor), which have not been compared with "
            f"one process under {type(strategy).__name__}. Use DDP, FSDP 2 (fsdp_version=2), or a mesh of "
            "dp_shard_size, cp_size and tp_size."
        )


def is_stored_in_nf4(module: Any, name: str = "weight") -> bool:
    """Return True if a module's parameter of this name has become parameters of bytes."""
    return isinstance(module, nn.Module) and name in vars(module).get(_LAYOUTS, ())


def store_as_bytes(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Replace the ``NF4Tensor`` parameters of a model by frozen parameters of bytes, in place.

    Returns:
        each replaced parameter and that of its codes, for optimizers that have them.
    """
    made: dict[int, tuple[nn.Parameter, dict[str, nn.Parameter]]] = {}  # tied weights stay tied
    for module in list(model.modules()):
        for name, old in list(module._parameters.items()):
            if old is None or not is_nf4(old):
                continue
            layout = Layout.of(old)
            if id(old) not in made:
                packed = layout.pack(old).items()
                made[id(old)] = old, {suffix: nn.Parameter(value, requires_grad=False) for suffix, value in packed}
            delattr(module, name)
            for suffix, value in made[id(old)][1].items():
                module.register_parameter(name + suffix, value)
            vars(module).setdefault(_LAYOUTS, {})[name] = layout
            module.__class__ = _reading(type(module), name)  # type: ignore[arg-type]
    return [(old, new[CODES]) for old, new in made.values()]


def layout_of(module: nn.Module, name: str = "weight") -> Layout:
    """Return what a parameter that was stored as bytes is made of."""
    layouts: dict[str, Layout] = getattr(module, _LAYOUTS)
    return layouts[name]


def keep_part(module: nn.Module, dim: int, begin: int, size: int, name: str = "weight") -> None:
    """Let an attribute be a part of the weight; the parameters of codes and scales are those of the part."""
    layouts: dict[str, Layout] = getattr(module, _LAYOUTS)
    layouts[name] = dataclasses.replace(layouts[name], part=(dim, begin, size))


@cache
def _reading(cls: type[nn.Module], name: str) -> type[nn.Module]:
    """Return the class whose attribute of this name is read from the bytes."""

    def read(module: nn.Module) -> torch.Tensor:
        layout = layout_of(module, name)
        stored = [local(getattr(module, name + suffix)) for suffix in (CODES, SCALES, TABLE)]
        if stored[0].numel() != layout.shape_here.numel() // 2:
            # Sharded by FSDP and not gathered: shape and type can be read, and values cannot be mistaken for others.
            return layout.unpack(layout.on_meta(), stored[0].device)
        return layout.unpack(stored, stored[0].device)

    def reduce(module: nn.Module, protocol: Any) -> Any:
        """Return what pickle and copy need: the class is made on demand, and has the name of the one below it."""
        make, arguments, *state = super(made, module).__reduce_ex__(protocol)
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            make, arguments = _remade, (cls, name)
        elif make is _remade:  # by the class below, which reads another attribute
            arguments = (*arguments, name)
        return (make, arguments, *state)

    namespace = {name: property(read), "__reduce_ex__": reduce, "__module__": cls.__module__, "__doc__": cls.__doc__}
    made: Any = type(cls.__name__, (cls,), namespace)
    return made


def _remade(cls: type[nn.Module], *names: str) -> nn.Module:
    """Return a module of such a class, without its state."""
    for name in names:
        cls = _reading(cls, name)  # type: ignore[arg-type]
    return cls.__new__(cls)


_LAYOUTS: Final = "_accel_nf4_layouts"
_CODES, _SCALES = "quantized_data", "quantized_scalers"  # the names of the inner tensors


@dataclasses.dataclass(frozen=True)
class Layout:
    """What an ``NF4Tensor`` is made of.

    Attributes:
        cls: the class, of the version of torchao that is installed.
        context: what is not in tensors.
        shape: of the weight.
        stride: of the weight.
        table: the inner tensors besides codes and scales, those with the largest elements first, so that each is
            aligned.
        part: the dimension, the offset and the size of the part of the weight that there is; None for all of it.
    """

    cls: Any
    context: dict[str, Any]
    shape: torch.Size
    stride: tuple[int, ...]
    table: tuple[tuple[str, torch.Size, torch.dtype], ...]
    part: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, tensor: Any) -> Layout:
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names if name not in (_CODES, _SCALES)}
        ordered = sorted(inner, key=lambda name: -inner[name].element_size())
        table = tuple((name, inner[name].shape, inner[name].dtype) for name in ordered)
        return cls(type(tensor), context, tensor.shape, tensor.stride(), table)

    @property
    def block_size(self) -> int:
        """The number of consecutive weights that share a scale."""
        return int(self.context["block_size"])

    def pack(self, tensor: Any) -> dict[str, torch.Tensor]:
        """Return the bytes of a weight, by the suffixes of their names."""
        rest = [_bytes(getattr(tensor, name)) for name, _, _ in self.table]
        codes, scales = (_bytes(getattr(tensor, name)) for name in (_CODES, _SCALES))
        return {CODES: codes, SCALES: scales, TABLE: torch.cat(rest)}

    @property
    def shape_here(self) -> torch.Size:
        """The shape of the part, or of the weight."""
        if self.part is None:
            return self.shape
        return torch.Size(self.part[2] if dim == self.part[0] else size for dim, size in enumerate(self.shape))

    def on_meta(self) -> list[torch.Tensor]:
        """Return bytes without values, as :meth:`unpack` takes them."""
        elements = self.shape_here.numel()
        table = sum(shape.numel() * dtype.itemsize for _, shape, dtype in self.table)
        sizes = (elements // 2, elements // self.block_size, table)
        return [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]

    def unpack(self, stored: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the weight, or its part, in the memory of its codes, scales and table."""
        codes, scales, table = stored
        sizes = [shape.numel() * dtype.itemsize for _, shape, dtype in self.table]
        inner = {_CODES: codes.detach().reshape(-1), _SCALES: scales.detach().reshape(-1).view(torch.int8)}
        for (name, shape, dtype), size, end in zip(self.table, sizes, accumulate(sizes), strict=True):
            inner[name] = table.detach()[end - size : end].view(dtype).view(shape)
        meta = dataclasses.replace(self.context["tensor_meta"], device=device, requires_grad=False)
        context, shape, stride = {**self.context, "tensor_meta": meta}, self.shape_here, self.stride
        if self.part is not None:
            # A rank may have a part only of the blocks that share a scale of scales: each block gets its own.
            blocks = self._blocks(self.part, codes.device)
            inner["quantization_factor"] = inner["quantization_factor"][blocks // self.context["scaler_block_size"]]
            stride = (shape[1], 1)
            context["tensor_meta"] = dataclasses.replace(meta, original_shape=shape, original_strides=stride)
            context |= {"n_blocks": blocks.numel(), "scaler_block_size": 1}
        weight: torch.Tensor = self.cls.__tensor_unflatten__(inner, context, shape, stride)
        return weight

    def _blocks(self, part: tuple[int, int, int], device: torch.device) -> torch.Tensor:
        """Return the numbers of a part's blocks in the whole weight."""
        dim, begin, size = part
        outputs, in_row = self.shape[0], self.shape[1] // self.block_size
        numbers = torch.arange(outputs * in_row, device=device).view(outputs, in_row)
        unit = 1 if dim == 0 else self.block_size
        return numbers.narrow(dim, begin // unit, size // unit).flatten()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
