"""Parameters read by a parent of their owner: the owning module's hook never fires because a parent reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from .._torch_compat import buffers_of, children_of, parameters_of

# Their fused kernels use parameters of submodules without calling the submodules.
_FUSED_MODULES = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def reads_child_params(module: object, classes: Collection[str] | None = None) -> bool:
    """Whether a module uses parameters of submodules without calling them: torch's attention, and named classes."""
    return isinstance(module, _FUSED_MODULES) or type(module).__name__ in (classes or ())


def is_param_container(module: object) -> bool:
    """Whether a module holds tensors but has no forward, like ``nn.ParameterList``: its parent reads them."""
    return isinstance(module, nn.Module) and not _has_forward(module) and next(own_tensors(module), None) is not None


def own_tensors(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of the tensors that a module reads itself: its own, and those of submodules without a forward."""
    for table in (parameters_of(module), buffers_of(module)):
        yield from (prefix + key for key, tensor in table.items() if tensor is not None)
    for key, child in children_of(module).items():
        if child is not None and not _has_forward(child):
            yield from own_tensors(child, f"{prefix}{key}.")


def called_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The nearest modules inside a module that have a forward, with their names."""
    for key, child in module.named_children():
        if _has_forward(child):
            yield prefix + key, child
        else:
            yield from called_children(child, f"{prefix}{key}.")


def reading_module(model: nn.Module, tensor: str, classes: Collection[str] | None = None) -> str:
    """The name of the module in whose forward a tensor is read; ``classes`` as in :func:`reads_child_params`."""
    reader, module = "", model
    path = tensor.split(".")[:-1]
    for depth, key in enumerate(path, 1):
        if reads_child_params(module, classes):
            break
        module = children_of(module)[key]
        if _has_forward(module):
            reader = ".".join(path[:depth])
    return reader


def _has_forward(module: nn.Module) -> bool:
    # A hook replaces the forward of the instance, whether the class has one or not.
    replaced = "forward" in module.__dict__ and "_hf_hook" not in module.__dict__
    return replaced or type(module).forward is not nn.Module.forward
