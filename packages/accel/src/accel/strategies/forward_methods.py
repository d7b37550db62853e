"""Methods other than ``forward`` that compute with the parameters of a sharded model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from torch import nn

from accel_state.errors import ConfigurationError

from ..core.unwrap import clean_name, extract_model_from_parallel
from ..precision.amp import AutocastForward

AUTOMATIC: Final = ("generate", "encode")


class ForwardMethod:
    """A method that runs as the forward of a unit of FSDP, whose hooks gather the parameters that it uses.

    torch's ``register_fsdp_forward_method`` does so for FSDP 2 only, and leaves out mixed precision.

    Args:
        method: the method.
        unit: the module whose hooks gather the parameters: the result of FSDP's wrapping.
        inner: the module inside, which has the forward.
        keeps: returns a block in which a call of the unit inside the method leaves the parameters gathered.
    """

    def __init__(
        self,
        method: Callable[..., Any],
        unit: nn.Module,
        inner: nn.Module,
        keeps: Callable[[nn.Module], AbstractContextManager[None]],
    ) -> None:
        self.method, self.unit, self.inner, self.keeps = method, unit, inner, keeps
        functools.update_wrapper(self, method, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_running(self.inner):  # called by another one
            return self.method(*args, **kwargs)
        own = vars(self.inner).get("forward")
        forward: Any = functools.partial(self._run, own)
        if isinstance(own, AutocastForward):
            autocast: Any = copy.copy(own)
            autocast.forward, forward = forward, autocast
        setattr(self.inner, _RUNNING, True)
        self.inner.forward = forward
        try:
            with self.keeps(self.unit):
                return self.unit(*args, **kwargs)
        finally:
            _set_forward(self.inner, own)
            delattr(self.inner, _RUNNING)

    def _run(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        _set_forward(self.inner, own)  # for calls of the model inside the method
        return self.method(*args, **kwargs)


_RUNNING: Final = "_accel_runs_method"


def is_running(model: nn.Module) -> bool:
    """Return whether a method of a unit runs as its forward."""
    return _RUNNING in vars(model)


def _set_forward(module: nn.Module, own: Any) -> None:
    if own is not None:
        module.forward = own
    else:
        vars(module).pop("forward", None)


def register(
    units: Mapping[nn.Module, nn.Module],
    names: Iterable[str],
    keeps: Callable[[nn.Module], AbstractContextManager[None]],
) -> None:
    """Let methods of a sharded model gather the parameters that they use.

    Args:
        units: for each module that FSDP wraps, the module inside; outer ones first.
        names: of methods, besides ``generate`` and ``encode``: of the model and its units ("embed"), or of a submodule
            of the model ("text_model.embed").
        keeps: returns a block in which calls of a unit leave its parameters gathered.

    Raises:
        ConfigurationError: no module has a method of that name.
    """
    model = next(iter(units.values()))
    for name in [*AUTOMATIC, *names]:
        path, _, method = name.rpartition(".")
        chosen = {_submodule(model, path, name): None} if path else dict.fromkeys(units.values())
        owners = [owner for owner in chosen if callable(getattr(owner, method, None))]
        if not owners and name not in AUTOMATIC:
            raise ConfigurationError(
                f"forward_methods={name!r}: the model and its units have no method {method}. Name a method of one of "
                "them, or of a submodule such as 'text_model.encode'."
            )
        for owner in owners:
            innermost = (pair for pair in reversed(list(units.items())) if owner in set(pair[1].modules()))
            unit, inner = next(innermost)
            setattr(owner, method, ForwardMethod(getattr(owner, method), unit, inner, keeps))


def _submodule(model: nn.Module, path: str, name: str) -> nn.Module:
    try:
        return extract_model_from_parallel(model.get_submodule(path))
    except AttributeError:
        raise ConfigurationError(
            f"forward_methods={name!r}: the model has no module {path}. Its modules have names such as "
            f"{', '.join([clean_name(key) for key, _ in model.named_modules() if key][:5])}."
        ) from None
