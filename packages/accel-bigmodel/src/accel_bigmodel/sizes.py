"""Sizes of a model and its parts in bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_state import CustomDtype, dtype_byte_size
from accel_state.errors import ConfigurationError, check_type

from ._torch_compat import buffers_of, children_of, parameters_of
from .tensors import as_dtype

Dtype = str | torch.dtype | CustomDtype


def tensor_bytes(tensor: torch.Tensor, dtype: Dtype | None = None, special: Dtype | None = None) -> int:
    """Return bytes of a tensor after conversion."""
    width: float = tensor.element_size()
    if special is not None:
        width = _width(special)
    elif dtype is not None and (tensor.is_floating_point() or tensor.is_complex()):
        width = min(_width(dtype), width)
    return int(tensor.numel() * width)


def _width(dtype: Dtype) -> float:
    if isinstance(dtype, CustomDtype):
        return dtype_byte_size(dtype)
    if isinstance(dtype, str) and dtype in {member.value for member in CustomDtype}:
        return dtype_byte_size(CustomDtype(dtype))
    return as_dtype(dtype).itemsize


def named_tensors(model: nn.Module, buffers_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a model with their full names; tied ones once, under their first name."""
    if not buffers_only:
        yield from model.named_parameters()
    yield from model.named_buffers()


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return bytes of each module and tensor of a model, by full name; the model itself is ``""``.

    Tied weights count once.

    Args:
        dtype: the dtype that floating point weights are converted to when loaded.
        special_dtypes: dtypes of single weights by full name; they override ``dtype``.
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
    """Return bytes of all buffers of a model; arguments as in :func:`compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str] | str | None,
) -> tuple[int, list[str]]:
    """Return the size of the largest layer in bytes, and the names of the layers of that size.

    A layer is a module whose class is in ``no_split_module_classes``, a module without submodules, or a tensor that a
    larger module holds directly.

    Args:
        modules: full names and modules (or tensors).
        module_sizes: bytes by full name, from :func:`compute_module_sizes`.
        no_split_module_classes: names of classes.
    """
    largest, names = 0, []
    for name, _ in named_layers(modules, as_names(no_split_module_classes)):
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def named_layers(
    modules: Sequence[tuple[str, nn.Module]], no_split: Sequence[str]
) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    """Yield the layers (see :func:`get_max_layer_size`) of some modules, in the order of the model."""
    pending: list[tuple[str, nn.Module | torch.Tensor]] = list(reversed(modules))
    while pending:
        name, part = pending.pop()
        if not isinstance(part, nn.Module) or type(part).__name__ in no_split or not children_of(part):
            yield name, part
        else:
            pending.extend(reversed(list(direct_members(name, part))))


def direct_members(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    """Yield the tensors and submodules that a module holds directly, with full names."""
    prefix = f"{name}." if name else ""
    for table in (parameters_of(module), buffers_of(module), children_of(module)):
        for key, value in table.items():
            if value is not None:
                yield prefix + key, value


def visiting_module(model: nn.Module, tensor: str, classes: Collection[str] | None = None) -> str:
    """Return the name of the module whose forward an offloaded tensor is brought for.

    Args:
        tensor: its full name.
        classes: classes of modules that get the weights of all their submodules at once.
    """
    module, path = model, tensor.split(".")[:-1]
    for depth, key in enumerate(path):
        if type(module).__name__ in (classes or ()):
            return ".".join(path[:depth])
        module = children_of(module)[key]
    return ".".join(path)


def as_names(names: Sequence[str] | str | None) -> list[str]:
    """Return a list of names from a list, a single name, or None."""
    if names is None:
        return []
    check_type(names, (str, Iterable), "a list of class names", "Pass names of classes, such as ['LlamaDecoderLayer'].")
    return [names] if isinstance(names, str) else list(names)


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """(bytes of the model, (bytes of its largest layer, names of the layers of that size)).

    Modules of the model's ``_no_split_modules`` count as one layer.
    """
    sizes = compute_module_sizes(model)
    no_split = sorted(getattr(model, "_no_split_modules", None) or ())
    return sizes.get("", 0), get_max_layer_size(list(model.named_children()), sizes, no_split)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names that contain no other name: those of tensors in a result of :func:`compute_module_sizes`."""
    containers = {""}
    for name in module_sizes:
        containers.update(name[:end] for end in range(len(name)) if name[end] == ".")
    return [name for name in module_sizes if name not in containers]


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, Any]],
) -> tuple[int, list[str], list[Any]]:
    """Return the size of a module together with the modules that share weights with it.

    Args:
        tied_params: full names under which other modules hold its weights.
        module_size: bytes of the module.
        module_sizes: bytes by full name.
        modules_to_treat: full names and modules to search.

    Returns:
        Bytes with tied weights counted once; names and modules of the others.

    Raises:
        ConfigurationError: a tied weight that none of the modules holds.
    """
    size, names, modules = module_size, [], []
    for weight in tied_params:
        holder = next(((n, m) for n, m in modules_to_treat if weight == n or weight.startswith(f"{n}.")), None)
        if holder is None:
            raise ConfigurationError(f"none of modules_to_treat holds {weight}")
        size -= module_sizes[weight]
        if holder[0] not in names:
            names.append(holder[0])
            modules.append(holder[1])
            size += module_sizes[holder[0]]
    return size, names, modules


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return all modules of a model, children before parents.

    Args:
        return_fqns: return pairs of full name and module.
    """
    pending, modules = [("", model)], []
    while pending:
        name, module = pending.pop()
        modules.append((name, module) if return_fqns else module)
        pending += [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    return modules[::-1]
