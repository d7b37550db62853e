"""Errors for weights that a script reads while ZeRO stage 3 has freed them.

A freed parameter is an empty tensor, so that its norm is 0 without an error of torch. Its class is :class:`FreedWeight`
until it is gathered, and again ``nn.Parameter`` then: computing with gathered weights costs nothing more.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

# An attribute of parameters: the error to raise.
_ERROR = "accel_error_while_freed"
_VALUES = {getattr(torch.Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
_VALUES.add(torch.Tensor.data.__set__)  # type: ignore[attr-defined]  # DeepSpeed would overwrite them
_OTHER_METHODS = {
    *("numel", "nelement", "size", "dim", "ndimension", "stride", "element_size", "storage_offset", "data_ptr"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_pinned", "is_shared", "get_device", "type"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "untyped_storage"),
    *("__repr__", "__format__", "__len__", "__delete__"),
}


class FreedWeight(nn.Parameter):
    """A parameter that ZeRO stage 3 has freed, whose values only DeepSpeed and accel may use."""

    @property
    def ds_status(self) -> Any:
        """DeepSpeed's status of the parameter."""
        return vars(self)["ds_status"]

    @ds_status.setter
    def ds_status(self, status: Any) -> None:
        vars(self)["ds_status"] = status
        if status.name == "AVAILABLE":
            self.__class__ = nn.Parameter  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _computes(func) and _is_script(sys._getframe(1)):
            raise ConfigurationError(_error_of((*args, *(kwargs or {}).values())))
        return nn.Parameter.__torch_function__(func, types, args, kwargs or {})


def watch(parameters: Mapping[torch.Tensor, str]) -> None:
    """Raise errors when a script computes with freed parameters.

    Args:
        parameters: the error of each.
    """
    zero = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    if not hasattr(zero.free_param, "__wrapped__"):
        zero.free_param = _marking(zero.free_param)  # type: ignore[attr-defined]
    for parameter, error in parameters.items():
        setattr(parameter, _ERROR, error)
        if vars(parameter)["ds_status"] is zero.ZeroParamStatus.NOT_AVAILABLE:
            _mark(parameter)


def _marking(free: Any) -> Any:
    @functools.wraps(free)
    def free_and_mark(param: Any) -> None:
        free(param)
        _mark(param)

    return free_and_mark


def _mark(parameter: Any) -> None:
    if type(parameter) is nn.Parameter and _ERROR in vars(parameter):
        parameter.__class__ = FreedWeight


def _computes(func: Any) -> bool:
    """Return True if a function of torch reads or writes the values of its arguments."""
    name = getattr(func, "__name__", "")
    return func in _VALUES if name in ("__get__", "__set__") else name not in _OTHER_METHODS


def _is_script(frame: FrameType | None) -> bool:
    """Return True if neither DeepSpeed nor accel has called torch, and no method of modules moves or loads them."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        package = name.partition(".")[0]
        if package != "torch":
            return package not in ("accel", "deepspeed") and not package.startswith("accel_")
        saves = frame.f_code.co_name == "state_dict" or frame.f_code.co_name.endswith("to_state_dict")
        if name == "torch.nn.modules.module" and not saves:
            return False
        frame = frame.f_back
    return True


def _error_of(arguments: Any) -> str:
    """Return the error of the first freed parameter among arguments, which may be lists of tensors."""
    found = ""
    for item in arguments:
        if isinstance(item, FreedWeight):
            found = vars(item)[_ERROR]
        elif isinstance(item, (list, tuple)):
            found = _error_of(item)
        if found:
            break
    return found
