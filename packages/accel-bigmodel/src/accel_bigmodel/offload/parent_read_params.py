"""Weights that are read by a module around the one that holds them: a hook on the holder would never act."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from ..hooks.base import HookedForward

# These compute with weights of their parts in fused kernels, without calling the parts.
_BORROWERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def borrows(module: object, classes: Collection[str] | None = None) -> bool:
    """Whether a module uses weights of its submodules without calling them: torch's attention, and classes that are
    named.

    Args:
        module: a module; anything else does not.
        classes: names of further classes.
    """
    return isinstance(module, _BORROWERS) or type(module).__name__ in (classes or ())


def lends(module: object) -> bool:
    """Whether a module has no forward and yet holds tensors, as ``nn.ParameterList`` does: whoever is around it reads
    them.
    """
    return isinstance(module, nn.Module) and not _is_called(module) and next(lent_tensors(module), None) is not None


def lent_tensors(module: nn.Module, path: str = "") -> Iterator[str]:
    """Names of the tensors of a module itself, and of what has no forward inside of it.

    Args:
        module: where to look.
        path: what names begin with.
    """
    for table in (module._parameters, module._buffers):
        yield from (path + key for key, tensor in table.items() if tensor is not None)
    for key, child in module._modules.items():
        if child is not None and not _is_called(child):
            yield from lent_tensors(child, f"{path}{key}.")


def called_modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The nearest modules inside of a module that have a forward, with their names.

    Args:
        module: where to look.
        path: what names begin with.
    """
    for key, child in module.named_children():
        if _is_called(child):
            yield path + key, child
        else:
            yield from called_modules(child, f"{path}{key}.")


def reader_of(model: nn.Module, tensor: str, classes: Collection[str] | None = None) -> str:
    """The name of the module in whose forward a tensor is read.

    Args:
        model: the model.
        tensor: full name of the tensor.
        classes: as in :func:`borrows`.
    """
    reader, module = "", model
    path = tensor.split(".")[:-1]
    for depth, key in enumerate(path, 1):
        if borrows(module, classes):
            break
        module = module._modules[key]  # type: ignore[assignment]
        if _is_called(module):
            reader = ".".join(path[:depth])
    return reader


def _is_called(module: nn.Module) -> bool:
    own = module.__dict__.get("forward")
    return type(module).forward is not nn.Module.forward or not (own is None or isinstance(own, HookedForward))
