"""Every private name of torch that this package uses; tests/test_torch_compat.py fails when torch drops one."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

# Tensors with shapes and devices but without memory. Replaced by nothing public yet (torch.fx uses the same module).
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

Call = TypeVar("Call", bound=Callable[..., Any])


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return the parameters registered in a module itself. The public setters refuse plain tensors and are slower."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """Return the buffers registered in a module itself; as above."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, Any]:
    """Return the submodules registered in a module; ``named_children`` leaves out those with two names."""
    return module._modules


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's buffers that its state dict leaves out; torch has no public query."""
    return module._non_persistent_buffers_set


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model that ``torch.compile`` has wrapped, or the model itself. The class has no public name."""
    original = children_of(model).get("_orig_mod")
    return model if original is None else original


# Through this method Module.to(), half(), cuda() and so on convert all tensors; torch has no hook around them.
APPLY = "_apply"


def apply_to_tensors(
    module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Convert all tensors of a module as its class does."""
    result: nn.Module = type(module)._apply(module, convert, recurse)
    return result


def without_torch_function() -> Any:
    """Return a context in which ``__torch_function__`` of tensor classes is not called; torch has no public one."""
    return torch._C.DisableTorchFunctionSubclass()


def untraced(function: Call) -> Call:
    """Keep ``torch.compile`` out of a function and what it calls, as ``torch.compiler.disable`` does.

    That one imports the compiler, which takes longer than loading a model.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            skip: Any = getattr(torch._dynamo, "skip_frame", torch._dynamo.graph_break)
            skip()
        callback = torch._C._dynamo.eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._dynamo.eval_frame.set_eval_frame(callback)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "weights are offloaded"  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, or 0 for tensors of inference mode, which do not count it."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def in_transform() -> bool:
    """Return True inside ``torch.func`` transforms (``grad``, ``vmap``), which refuse hooks on saved tensors."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, also without memory, where the public ``data_ptr()`` is 0 or fails."""
    return int(tensor.untyped_storage()._cdata)


def is_untouched(tensor: torch.Tensor) -> bool:
    """Return True if no operation has changed a new tensor in place. Torch has no public counter of changes."""
    return tensor._version == 0 and not tensor.requires_grad


def on_meta() -> torch.device:
    """Return the meta device, as a context in which libraries may be imported.

    The import of Dynamo in torch 2.6 computes a value. In this context it fails half-way, and Transformers ignores the
    error; whatever needs Dynamo later in the process fails then, :class:`FakeTensorMode` for one.
    """
    from accel_state import is_torch_version  # only here: loading a model does not use it, and it takes 10 ms

    if is_torch_version("<", "2.7"):
        importlib.import_module("torch._dynamo")
    return torch.device("meta")


def leave_outputs_unchecked(stage: Any) -> None:
    """Let the last stage of a pipeline return what the model does, which is sent nowhere and has no example.

    Torch 2.11 compares it with the example that a stage must have; there is no option against it.
    """
    if hasattr(stage, "_validate_fwd_outputs"):
        stage._validate_fwd_outputs = lambda outputs: None


def expect_no_gradients(stage: Any) -> None:
    """Let a stage of a pipeline that only computes outputs pass no gradients to another stage on its rank.

    Without a loss, schedules of torch skip the backward passes in their order, but not what they pass within a rank.
    """
    stage.get_local_bwd_output = lambda chunk: ()
    stage.set_local_bwd_input = lambda gradients, chunk: None
