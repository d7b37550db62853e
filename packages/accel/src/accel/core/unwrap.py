"""Getting back to the user's model, and to the names it gave its weights."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from .._torch_compat import NAME_PREFIXES, compiled_call, drop_compiled_call, is_optimized_module, original_module


def _is_fully_sharded(module: nn.Module) -> bool:
    """Whether version 1 of FSDP wrapped this module; its class is loaded only where it is used."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _is_deepspeed_engine(module: nn.Module) -> bool:
    """Whether DeepSpeed made this module."""
    engine = sys.modules.get("deepspeed.runtime.engine")
    return engine is not None and isinstance(module, engine.DeepSpeedEngine)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` or ``module.compile()`` was applied to the whole module."""
    return is_optimized_module(module) or compiled_call(module) is not None


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The user's model inside the wrappers of distributed training.

    Args:
        model: any model, wrapped or not.
        keep_fp32_wrapper: keep mixed precision's autocast around its forward. When off, the original forward is put
            back.
        keep_torch_compile: return a compiled model if ``model`` was one.
        recursive: also unwrap the submodules.
    """
    inner, compiled = _peel(model)
    if recursive:
        _unwrap_children(inner)
    if not keep_fp32_wrapper:
        _restore_forward(inner)
    return _with_compilation(inner, compiled) if keep_torch_compile else _without_compilation(inner)


def _peel(model: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """The user's model, and the innermost layer around it that was compiled."""
    compiled: nn.Module | None = None
    while True:
        if is_compiled_module(model):
            compiled = model
        if is_optimized_module(model):
            model = original_module(model)
        elif (
            isinstance(model, (DistributedDataParallel, DataParallel))
            or _is_fully_sharded(model)
            or _is_deepspeed_engine(model)
        ):
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


def _with_compilation(inner: nn.Module, compiled: nn.Module | None) -> nn.Module:
    """The user's model, compiled with the settings of the layer around it that was."""
    if compiled is None or compiled is inner:
        return inner
    if not is_optimized_module(compiled):
        inner.compile(**getattr(compiled, "_accel_compile_kwargs", {}))
        return inner
    if original_module(compiled) is inner:
        return compiled
    rewrapped: nn.Module = type(compiled)(inner, compiled.dynamo_ctx)
    return rewrapped


def _without_compilation(model: nn.Module) -> nn.Module:
    if compiled_call(model) is None:
        return model
    plain = copy.copy(model)  # shares parameters and submodules
    drop_compiled_call(plain)
    return plain


def parameter_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` under the names of the uncompiled model, with the values of offloaded weights.

    Compiled submodules leave their mark in the names. What is offloaded is mapped from where it lies, and not read as a
    whole.
    """
    return {clean_name(name): value for name, value in _state_dict(model).items()}


def _state_dict(model: nn.Module) -> dict[str, Any]:
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        from accel_bigmodel import get_state_dict_offloaded_model, has_offloaded_weights

        if has_offloaded_weights(model):
            return get_state_dict_offloaded_model(model)
    return model.state_dict()


def clean_name(name: str) -> str:
    """A parameter's name without the marks of what lies around its modules."""
    for prefix in NAME_PREFIXES:
        name = name.replace(prefix, "")
    return name


def tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of names that refer to the same parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(clean_name(name))
    return [names for names in groups.values() if len(names) > 1]


def names_in_order(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's parameters in the order of its groups."""
    names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """What tensors that share memory have in common: device, storage address, and size in bytes."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def is_peft_model(model: Any) -> bool:
    """Whether a model, wrapped or not, is one of peft's. Where peft has not been imported there can be none."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)
