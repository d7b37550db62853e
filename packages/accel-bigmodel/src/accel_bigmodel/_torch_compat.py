"""Every private name of torch that this package uses; tests/test_torch_compat.py fails when torch drops one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Tensors with shapes and devices but without memory. Replaced by nothing public yet (torch.fx uses the same module).
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """The parameters registered in a module itself. The public setters refuse plain tensors and are slower."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The buffers registered in a module itself; as above."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, Any]:
    """The submodules registered in a module; ``named_children`` leaves out those with two names."""
    return module._modules


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of a module's buffers that its state dict leaves out; torch has no public query."""
    return module._non_persistent_buffers_set


# Through this method Module.to(), half(), cuda() and so on convert all tensors; torch has no hook around them.
APPLY = "_apply"


def apply_to_tensors(
    module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Convert all tensors of a module as its class does."""
    result: nn.Module = type(module)._apply(module, convert, recurse)
    return result


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, also without memory, where the public ``data_ptr()`` is 0 or fails."""
    return int(tensor.untyped_storage()._cdata)
