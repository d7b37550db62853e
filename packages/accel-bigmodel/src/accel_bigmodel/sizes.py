"""How many bytes a model and its parts need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from accel_state import CustomDtype, dtype_byte_size

from .tensors import as_dtype

Dtype = str | torch.dtype | CustomDtype


def tensor_bytes(tensor: torch.Tensor, dtype: Dtype | None = None, special: Dtype | None = None) -> int:
    """Bytes of a tensor that is converted to ``dtype`` when loaded.

    Args:
        tensor: any tensor, of the meta device too.
        dtype: the type that floating point values are converted to; never a larger one than they have.
        special: the type of just this tensor, which goes before ``dtype``.
    """
    own = tensor.element_size()
    if special is not None:
        return int(tensor.numel() * _width(special))
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.numel() * own
    return int(tensor.numel() * min(_width(dtype), own))


def _width(dtype: Dtype) -> float:
    if isinstance(dtype, CustomDtype):
        return dtype_byte_size(dtype)
    if isinstance(dtype, str) and dtype in {member.value for member in CustomDtype}:
        return dtype_byte_size(CustomDtype(dtype))
    return as_dtype(dtype).itemsize


def named_tensors(model: nn.Module, buffers_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a model with their full names; one that is shared comes once, under its first name."""
    if not buffers_only:
        yield from model.named_parameters()
    yield from model.named_buffers()


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of each module and tensor of a model, by full name; the whole model is ``""``. Shared weights count once.

    Args:
        model: any model, on the meta device too.
        dtype: the type that floating point weights are converted to when loaded.
        special_dtypes: types of single weights by full name, which go before ``dtype``.
        buffers_only: leave parameters out.
    """
    special = special_dtypes or {}
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in named_tensors(model, buffers_only):
        size = tensor_bytes(tensor, dtype, special.get(name))
        sizes[""] += size
        end = name.find(".")
        while end != -1:
            sizes[name[:end]] += size
            end = name.find(".", end + 1)
        sizes[name] += size
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> int:
    """Bytes of all buffers of a model; arguments as in :func:`compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str] | str | None,
) -> tuple[int, list[str]]:
    """The size of the largest layer, and the names of the layers of that size.

    A layer is a module that must stay together (its class is in ``no_split_module_classes``), one without submodules,
    or a tensor that a larger module holds directly.

    Args:
        modules: full names and modules (or tensors) to look into.
        module_sizes: bytes by full name, from :func:`compute_module_sizes`.
        no_split_module_classes: names of classes.
    """
    whole = as_names(no_split_module_classes)
    largest, names = 0, []
    for name, _ in layers(modules, whole):
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def layers(
    modules: Sequence[tuple[str, nn.Module]], whole: Sequence[str]
) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    """The layers (see :func:`get_max_layer_size`) of some modules, in the order of their names."""
    pending: list[tuple[str, nn.Module | torch.Tensor]] = list(reversed(modules))
    while pending:
        name, part = pending.pop()
        if not isinstance(part, nn.Module) or type(part).__name__ in whole or not part._modules:
            yield name, part
        else:
            pending.extend(reversed(list(parts(name, part))))


def parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    """What a module is made of, with full names: the tensors that it holds directly, and its submodules."""
    prefix = f"{name}." if name else ""
    for table in (module._parameters, module._buffers, module._modules):
        for key, value in table.items():
            if value is not None:
                yield prefix + key, value


def as_names(names: Sequence[str] | str | None) -> list[str]:
    """A list of names from a list, one name, or nothing."""
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """(bytes of the model, (bytes of its largest layer, names of the layers of that size)).

    Layers are kept whole as the model's ``_no_split_modules`` says, where it says something.
    """
    sizes = compute_module_sizes(model)
    together = getattr(model, "_no_split_modules", None)
    return sizes.get("", 0), get_max_layer_size(
        list(model.named_children()), sizes, sorted(together) if together else None
    )


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """The names that no other name lies under: those of tensors, where the sizes are from :func:`compute_module_sizes`."""
    containers = {""}
    for name in module_sizes:
        containers.update(name[:end] for end in range(len(name)) if name[end] == ".")
    return [name for name in module_sizes if name not in containers]
