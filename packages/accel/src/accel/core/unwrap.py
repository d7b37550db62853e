"""The user's model inside its wrappers, and the names that the user gave its weights."""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any, TypeVar, overload

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from .._torch_compat import COMPILED_CALL, NAME_PREFIXES, OPTIMIZED_MODULE, ORIGINAL_MODULE

Model = TypeVar("Model", bound=nn.Module)

PREPARED = "_is_accelerate_prepared"
"""The mark of prepared objects, which other libraries read and set."""

# Wrapper classes by module. They are not imported, which is slow: where the module of a class was never imported, there
# is no object of the class. The same holds for OPTIMIZED_MODULE.
_WRAPPERS = (
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine"),
)


def is_prepared(obj: Any) -> bool:
    """Return True if ``prepare`` has returned this object, or a library has marked it as prepared."""
    # Without __getattr__: a wrapper that forwards attributes, such as a PEFT model, is not prepared itself.
    if inspect.getattr_static(obj, PREPARED, False) is True:
        return True
    original = vars(obj).get("_modules", {}).get(ORIGINAL_MODULE) if isinstance(obj, nn.Module) else None
    return original is not None and is_prepared(original)


def is_compiled_module(module: nn.Module) -> bool:
    """Return True if ``torch.compile(module)`` or ``module.compile()`` was applied to the module as a whole."""
    return getattr(module, COMPILED_CALL) is not None or is_compiled_wrapper(module)


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return True if a module is the wrapper that ``torch.compile(module)`` returns."""
    return isinstance(module, getattr(sys.modules.get(OPTIMIZED_MODULE[0]), OPTIMIZED_MODULE[1], ()))


@overload
def extract_model_from_parallel(
    model: DistributedDataParallel | DataParallel[Any],
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> Any: ...
@overload
def extract_model_from_parallel(
    model: Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Model: ...
def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the user's model inside the wrappers of distributed training.

    Args:
        model: any model, wrapped or not.
        keep_fp32_wrapper: keep mixed precision's autocast around its forward; otherwise the original forward is
            restored.
        keep_torch_compile: return a compiled model if ``model`` was one.
        recursive: also unwrap the submodules.
    """
    inner, compiled = _peel(model)
    if recursive:
        _unwrap_children(inner)
    if not keep_fp32_wrapper:
        _restore_forward(inner)
    if keep_torch_compile:
        return inner if compiled is None or compiled is inner else _with_compilation(inner, compiled)
    if getattr(inner, COMPILED_CALL) is None:
        return inner
    plain = copy.copy(inner)  # shares parameters and submodules
    setattr(plain, COMPILED_CALL, None)
    return plain


def innermost_model(model: nn.Module) -> nn.Module:
    """Return the user's own model, for its parameters and buffers: compiled ones are not copied."""
    return _peel(model)[0]


def _peel(model: nn.Module) -> tuple[nn.Module, Any]:
    """Return the user's model, and the innermost compiled wrapper around it, or None."""
    optimized = getattr(sys.modules.get(OPTIMIZED_MODULE[0]), OPTIMIZED_MODULE[1], ())
    wrappers: list[Any] = [DistributedDataParallel, DataParallel]
    for module_name, class_name in _WRAPPERS:
        if module_name in sys.modules:
            wrappers.append(getattr(sys.modules[module_name], class_name))
    compiled: nn.Module | None = None
    while True:
        is_wrapper = isinstance(model, optimized)
        if is_wrapper or getattr(model, COMPILED_CALL) is not None:
            compiled = model
        if is_wrapper:
            model = getattr(model, ORIGINAL_MODULE)
        elif isinstance(model, tuple(wrappers)):
            model = model.module  # type: ignore[assignment]
        else:
            return model, compiled


def _unwrap_children(model: nn.Module) -> None:
    for name, child in model.named_children():
        inner, _ = _peel(child)
        if inner is not child:
            setattr(model, name, inner)
        _unwrap_children(inner)


def _restore_forward(model: nn.Module) -> None:
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    model.__dict__.pop("forward", None)
    if model.forward != original:
        # The user (or another library) had set a forward of its own on the instance.
        model.forward = original


def _with_compilation(inner: nn.Module, compiled: Any) -> nn.Module:
    """Return the user's model, compiled with the settings of a compiled wrapper around it."""
    if not is_compiled_wrapper(compiled):
        inner.compile(**getattr(compiled, "_accel_compile_kwargs", {}))
        return inner
    if getattr(compiled, ORIGINAL_MODULE) is inner:
        return compiled
    rewrapped: nn.Module = type(compiled)(inner, compiled.dynamo_ctx)
    return rewrapped


def parameter_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` under the names of the uncompiled model, with the values of offloaded weights."""
    state_dict = None
    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            from accel_bigmodel import get_state_dict_offloaded_model, has_offloaded_weights

            state_dict = get_state_dict_offloaded_model(model) if has_offloaded_weights(model) else None
            break
    cleaned = {}
    for name, value in (model.state_dict() if state_dict is None else state_dict).items():
        cleaned[clean_name(name)] = value
    return cleaned


def clean_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers around its modules."""
    for prefix in NAME_PREFIXES:
        name = name.replace(prefix, "")
    return name


def trainable_names(model: nn.Module) -> set[str]:
    """Return the names of a model's parameters that require gradients, tied ones under each of their names."""
    parameters = innermost_model(model).named_parameters(remove_duplicate=False)
    return {clean_name(name) for name, parameter in parameters if parameter.requires_grad}


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return groups of names that refer to the same parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(clean_name(name))
    return [names for names in groups.values() if len(names) > 1]


def names_in_order(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters in the order of its groups."""
    names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def is_peft_model(model: Any) -> bool:
    """Return True if a model, wrapped or not, is a PeftModel of the package peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)
