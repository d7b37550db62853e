"""Hooks around a module's forward, and how they are added and removed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from accel_state.errors import ArgumentTypeError, check_type

from .._torch_compat import APPLY, apply_to_tensors

_accelerate_added_attributes: list[str] = []
"""Attributes that dispatching adds to a model's own, which callers delete when they remove hooks themselves: none."""


LOAD_HOOK = "_accel_load_hook"
"""The attribute of a module with the handle of its hook for ``load_state_dict``."""

_FORWARD = "_accel_forward"  # the attribute of a module with its forward that runs the hook


class ModelHook:
    """Callbacks before and after a module's forward, and when the hook is added or removed.

    The base class changes nothing; subclasses override what they need.

    Attributes:
        no_grad: run the forward under ``torch.no_grad``.
    """

    no_grad = False
    brings_values = False
    """The weights of the module have their values only after this hook."""
    needs_values = False
    """The hook changes values, so one that brings them runs before it."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is added; return the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before each forward with its arguments; return the arguments to use."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run after each forward with its output; return the output to use."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is removed; return the module."""
        return module

    def abort_forward(self, module: nn.Module) -> None:
        """Run in place of :meth:`post_forward` when the forward raised."""

    def check_conversion(self, module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Run before ``convert`` is applied to all tensors of the module (``half()``, ``to()``); may refuse it."""


class SequentialHook(ModelHook):
    """Several hooks as one: each receives the result of the previous one. They are removed in reverse order.

    Args:
        *hooks: the hooks, in order.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.needs_values = any(hook.needs_values for hook in hooks)
        self._no_grad = False

    @property
    def no_grad(self) -> bool:
        """True if it was set here, or any of the hooks sets it."""
        return self._no_grad or any(hook.no_grad for hook in self.hooks)

    @no_grad.setter
    def no_grad(self, value: bool) -> None:
        self._no_grad = value

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        begun: list[ModelHook] = []
        try:
            for hook in self.hooks:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
                begun.append(hook)
        except BaseException:
            for hook in reversed(begun):
                hook.abort_forward(module)
            raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in reversed(self.hooks):
            module = hook.detach_hook(module)
        return module

    def abort_forward(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.abort_forward(module)

    def check_conversion(self, module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for hook in self.hooks:
            hook.check_conversion(module, convert)


class _Forward:
    """A module's forward, with its hook or as its class defines it. An object, so that it can be pickled."""

    def __init__(self, module: nn.Module, is_hooked: bool) -> None:
        self.module = module
        self.is_hooked = is_hooked
        self.replaced: Callable[..., Any] | None = None

    def unhook(self, replaced: Any) -> None:
        """Call only the forward that the module had before its hook: somebody may have wrapped this one meanwhile."""
        self.is_hooked, self.replaced = False, None if isinstance(replaced, _Forward) else replaced

    # What functools.update_wrapper would set. Properties, because a copied or pickled module must find its own forward.

    @property
    def __wrapped__(self) -> Any:
        module: Any = self.module
        old_forward = module._old_forward if self.is_hooked else self.replaced
        is_replaced = old_forward is not None and not isinstance(old_forward, _Forward)
        return old_forward if is_replaced else type(module).forward.__get__(module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    @property
    def __name__(self) -> str:
        return getattr(self.__wrapped__, "__name__", "forward")

    @property
    def __code__(self) -> CodeType:
        # torch.export names the inputs after the forward's source.
        wrapped = inspect.unwrap(self.__wrapped__)
        code: CodeType = getattr(wrapped, "func", wrapped).__code__
        return code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return (_run_with_hook if self.is_hooked else type(self.module).forward)(self.module, *args, **kwargs)


def _run_with_hook(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = module._old_forward(*args, **kwargs)
        else:
            output = module._old_forward(*args, **kwargs)
    except BaseException:
        hook.abort_forward(module)
        raise
    return hook.post_forward(module, output)


class _CheckedApply:
    """A module's method behind ``to()``, ``half()`` and so on, which asks the hooks first. An object, to be pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for module in self.module.modules() if recurse else (self.module,):
            hook = module.__dict__.get("_hf_hook")
            if isinstance(hook, ModelHook):
                hook.check_conversion(module, convert)
        return apply_to_tensors(self.module, convert, recurse)


def check_conversions(model: nn.Module) -> None:
    """Let the hooks refuse conversions of a model, before any of its tensors is converted."""
    names = {name for name, module in model.named_modules(remove_duplicate=False) if "_hf_hook" in module.__dict__}
    holders = {""}
    for name in names:
        while name not in holders:
            holders.add(name)
            name = name.rpartition(".")[0]
    for name in holders:
        module = model.get_submodule(name)
        module.__dict__[APPLY] = _CheckedApply(module)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Run a hook around a module's forward.

    Args:
        append: keep the module's present hook and run the new one after it. Otherwise the new hook replaces it, without
            undoing its changes (:func:`remove_hook_from_module` does).

    Returns:
        What the hook's ``init_hook`` returned: the module, unless the hook replaces it.
    """
    check_type(module, nn.Module, "add_hook_to_module", "Pass a module: a torch.nn.Module.")
    if not callable(getattr(hook, "init_hook", None)) or isinstance(hook, type):
        raise ArgumentTypeError(
            f"add_hook_to_module got {hook!r} as hook. Pass an object of a class derived from ModelHook."
        )
    old_hook = getattr(module, "_hf_hook", None)
    if append and old_hook is not None:
        remove_hook_from_module(module)
        in_order = (hook, old_hook) if hook.brings_values and old_hook.needs_values else (old_hook, hook)
        hook = SequentialHook(*in_order)
    if _is_forward_of_others(module):
        _unhook_forward(module)
    if not hasattr(module, "_old_forward"):
        is_replaced = isinstance(module, GraphModule) or "forward" in module.__dict__
        module.__dict__["_old_forward"] = module.forward if is_replaced else _Forward(module, is_hooked=False)
    module = hook.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment]
    if isinstance(module, GraphModule):
        # Each GraphModule has its own class, whose forward it calls.
        module.__class__.forward = _run_with_hook
    else:
        module.__dict__[_FORWARD] = module.forward = _Forward(module, is_hooked=True)
    return module


def _is_forward_of_others(module: nn.Module) -> bool:
    """Return True if somebody has given a hooked module another forward, which may call the one that runs the hook."""
    is_hooked = {"_old_forward", _FORWARD} <= module.__dict__.keys()
    return is_hooked and not isinstance(module.__dict__.get("forward"), (_Forward, type(None)))


def _unhook_forward(module: nn.Module) -> Any:
    """Take the original forward out of a module, and return it."""
    old_forward: Any = module._old_forward
    delattr(module, "_old_forward")
    if _FORWARD in module.__dict__:
        module.__dict__.pop(_FORWARD).unhook(old_forward)
    return old_forward


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove a module's hook, undo its changes and restore the original forward, unless it was replaced meanwhile.

    Args:
        module: the module; without a hook nothing happens.
        recurse: remove the hooks of all submodules too.
    """
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        module = hook.detach_hook(module)
        delattr(module, "_hf_hook")
    if hasattr(module, "_old_forward"):
        is_of_others = _is_forward_of_others(module)
        old_forward = _unhook_forward(module)
        if isinstance(module, GraphModule):
            module.__class__.forward = old_forward.__func__
        elif not is_of_others:
            module.__dict__.pop("forward", None)
            if not isinstance(old_forward, _Forward):
                module.forward = old_forward
    if recurse:
        if isinstance(module.__dict__.get(APPLY), _CheckedApply):
            del module.__dict__[APPLY]
        if LOAD_HOOK in module.__dict__:
            module.__dict__.pop(LOAD_HOOK).remove()
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and all its submodules."""
    remove_hook_from_module(module, recurse=True)
