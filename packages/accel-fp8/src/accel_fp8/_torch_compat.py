"""Private names of torch that this package uses; ``tests/test_torch_compat.py`` fails when torch drops one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

F = TypeVar("F", bound=Callable[..., Any])

# Scaled product of two float8 matrices. torch.nn.functional.scaled_mm replaces it from torch 2.10 on.
scaled_mm = torch._scaled_mm

# One kernel for many tensors. The public optimizers use them too; torch has no public name for them.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_zero_ = torch._foreach_zero_

# Prefix of the names in a compiled model, which DDP sees instead of the model's own.
COMPILED_PREFIX = "_orig_mod."

# Attribute with the names of parameters and buffers that DDP does not broadcast.
DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"


def forward_pre_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the hooks of ``register_forward_pre_hook`` by id; torch has no public way to find a registered hook."""
    return module._forward_pre_hooks


def constant_result(function: F) -> F:
    """Let torch.compile call ``function`` while it traces, and treat the result as a constant.

    Same as ``torch.compiler.assume_constant_result``, which imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
