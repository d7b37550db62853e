"""Hooks around a module's forward, and how they get there and away again."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule


class ModelHook:
    """What happens before and after the forward of a module, and when the hook comes and goes.

    Every method may be left out by a subclass; the base class changes nothing.

    Attributes:
        no_grad: run the forward without recording it for gradients.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is added; returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before each forward with its arguments; returns those that the forward gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after each forward with its result; returns the one that the caller gets."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed; returns the module."""
        return module

    def abort_forward(self, module: nn.Module) -> None:
        """Called in place of :meth:`post_forward` when the forward raised."""


class SequentialHook(ModelHook):
    """Several hooks as one: each gets what the one before it returned. They are removed in the reverse order.

    Args:
        *hooks: the hooks, in order.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:  # type: ignore[override]
        """Whether one of the hooks says so."""
        return any(hook.no_grad for hook in self.hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
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


class OwnForward:
    """The forward that a module's class gives it. An object, because a bound method is pickled by a name that may not
    be its own.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


class HookedForward:
    """Stands in for a module's forward while it has a hook. An object, so that the module can be copied and pickled
    with it.

    Args:
        module: the module; it keeps its hook in ``_hf_hook`` and its own forward in ``_old_forward``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __signature__(self) -> inspect.Signature:
        # Libraries look at the names of a forward's arguments.
        return inspect.signature(self.module._old_forward)  # type: ignore[arg-type]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        return run_with_hook(module, module._hf_hook, module._old_forward, args, kwargs)  # type: ignore[arg-type]


def run_with_hook(
    module: nn.Module, hook: ModelHook, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One forward with its hook."""
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
    except BaseException:
        hook.abort_forward(module)
        raise
    return hook.post_forward(module, output)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Let a hook act around a module's forward. The module is changed, and returned as the hook's ``init_hook`` returns
    it.

    Args:
        module: the module.
        hook: the hook.
        append: keep the hook that the module has, and let the new one act after it. Otherwise the new one takes its
            place; the old one is not asked to undo what it did (:func:`remove_hook_from_module` does that).
    """
    old_hook = getattr(module, "_hf_hook", None)
    if append and old_hook is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(old_hook, hook)
    if not hasattr(module, "_old_forward"):
        module._old_forward = _own_forward(module)
    module = hook.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment]
    if isinstance(module, GraphModule):
        # It writes its forward into a class of its own whenever it is recompiled, and calls that one.
        module.__class__.forward = _forward_of_class
    else:
        module.forward = HookedForward(module)
    return module


def _own_forward(module: nn.Module) -> Any:
    if isinstance(module, GraphModule):
        return module.forward
    # What somebody else has set on the module goes before its class's.
    return module.__dict__["forward"] if "forward" in module.__dict__ else OwnForward(module)


def _forward_of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return run_with_hook(module, module._hf_hook, module._old_forward, args, kwargs)  # type: ignore[arg-type]


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take a module's hook away: what it did is undone, and the module's own forward is back.

    Args:
        module: the module; nothing happens where it has no hook.
        recurse: those of all its submodules too.
    """
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        module = hook.detach_hook(module)
        delattr(module, "_hf_hook")
    if hasattr(module, "_old_forward"):
        _restore_forward(module)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def _restore_forward(module: nn.Module) -> None:
    own: Any = module._old_forward
    delattr(module, "_old_forward")
    if isinstance(module, GraphModule):
        module.__class__.forward = own.__func__
        return
    module.__dict__.pop("forward", None)
    if not isinstance(own, OwnForward):
        module.forward = own


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks of a module and all its submodules away, and what a dispatch has noted on the module."""
    remove_hook_from_module(module, recurse=True)
