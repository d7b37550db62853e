"""Every private name of torch that this package uses, with what it is for and what would replace it.

``tests/test_torch_compat.py`` fails when torch drops one. Supported: torch >= 2.6; the newest tested version is 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

# torch's own counter of operations is built on it, and nothing public takes its place.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Older versions of torch refuse operators of a higher order, such as flex_attention, while a mode is active.
PASSES_HIGHER_ORDER = hasattr(TorchDispatchMode, "supports_higher_order_operators")


def has_compiled_modules(model: nn.Module) -> bool:
    """Return True if torch.compile was applied to a model, or in place to a part of it."""
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def watch_compilation(began: Callable[..., None], ended: Callable[..., None]) -> Callable[[], None] | None:
    """Call functions when torch.compile begins and ends compiling, once Dynamo is imported; None before that.

    torch has no public event for it: ``torch.compiler.set_stance`` can only forbid to compile. Callbacks get no
    argument in torch 2.6 and one in later versions.

    Returns:
        A function that removes both.
    """
    if "torch._dynamo" not in sys.modules:
        return None
    from torch._dynamo.callback import callback_handler

    handler: Any = callback_handler
    handler.register_start_callback(began)
    handler.register_end_callback(ended)

    def remove() -> None:
        # torch._dynamo.reset() removes all of them.
        if began in handler.start_callbacks:
            handler.remove_start_callback(began)
        if ended in handler.end_callbacks:
            handler.remove_end_callback(ended)

    return remove
