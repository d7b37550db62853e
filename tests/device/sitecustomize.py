"""Puts the device in ``ACCEL_TEST_DEVICE`` in the place of the CPU, in every process that a test starts.

Tests ask for the CPU (``cpu=True``, ``ACCELERATE_USE_CPU``), so that they do the same on every machine. With this
folder on ``PYTHONPATH``, accel takes such a request for one of the device. Nothing is imported before accel imports it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

_NAME = os.environ.get("ACCEL_TEST_DEVICE")


def _detect_device(module: ModuleType) -> None:
    original = module.detect
    module.detect = lambda cpu=False: original()


def _start_on_device(module: ModuleType) -> None:
    original = module.PartialState.__init__

    def start(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        original(self, **kwargs)

    module.PartialState.__init__ = start


# A GPU adds in another order than the CPU: what trains a few steps differs by so much at most, relative to 1.
_ROUNDING = 1e-4


def _compare_values(module: ModuleType) -> None:
    """Tests compare what was computed on the device with what the CPU computes. accel's own code may not mix them."""
    import torch

    assert_close = module.assert_close

    def close(actual: Any, expected: Any, *, check_device: bool = False, **kwargs: Any) -> None:
        if _NAME == "cuda" and getattr(actual, "dtype", None) == torch.float32 and _is_in_test(sys._getframe(1)):
            kwargs["rtol"] = max(kwargs.get("rtol") or 0.0, _ROUNDING)
            kwargs["atol"] = max(kwargs.get("atol") or 0.0, _ROUNDING)
        assert_close(actual, expected, check_device=check_device, **kwargs)

    module.assert_close = close


# About devices themselves, and where the inputs of a model may be: they move what is to be moved.
_MOVE_THEMSELVES = ("test_accelerators.py",)


def _is_in_test(frame: FrameType) -> bool:
    file = Path(frame.f_code.co_filename)
    return "tests" in file.parts and file.name not in _MOVE_THEMSELVES


def _do_as_a_user_would(module: ModuleType) -> None:
    """Tests hand tensors of the CPU to models and losses, and compare bits: here they move them first, as a user does.

    Only what a test calls itself is changed. What accel calls gets what accel has moved.
    """
    import torch
    from torch.nn import functional
    from torch.utils import _pytree as pytree

    allclose = torch.allclose

    def compared(function: Any) -> Any:
        def compare(input: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
            if input.device != other.device and _is_in_test(sys._getframe(1)):
                input, other = input.cpu(), other.cpu()
                if _NAME == "cuda" and function is not allclose and input.is_floating_point():
                    return input.shape == other.shape and allclose(input, other, _ROUNDING, _ROUNDING, True)
            return function(input, other, *args, **kwargs)

        return compare

    def place_of(module: torch.nn.Module) -> torch.device | None:
        """Where the inputs of a module belong. A prepared model on the CPU would be a mistake of accel's."""
        weight = next((weight for weight in module.parameters() if not weight.is_meta), None)
        is_prepared = getattr(module, "_is_accelerate_prepared", False) or hasattr(module, "_hf_hook")
        return None if weight is None or (weight.is_cpu and is_prepared) else weight.device

    def with_inputs_moved(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and _is_in_test(sys._getframe(1)):
                given = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
                place = place_of(args[0]) if isinstance(args[0], torch.nn.Module) else None
                if place is None:  # a loss
                    place = next((item.device for item in given if item.device.type == _NAME), None)
                if place is not None and any(item.device != place and not item.is_meta for item in given):
                    args, kwargs = pytree.tree_map_only(
                        torch.Tensor, lambda item: item if item.is_meta else item.to(place), (args, kwargs)
                    )
            return function(*args, **kwargs)

        return functools.wraps(function)(call)

    torch.equal, torch.allclose = compared(torch.equal), compared(torch.allclose)
    for name in ("mse_loss", "l1_loss", "nll_loss", "cross_entropy", "binary_cross_entropy_with_logits"):
        setattr(functional, name, with_inputs_moved(getattr(functional, name)))
    torch.nn.Module.__call__ = with_inputs_moved(torch.nn.Module.__call__)


def _share_gpus(module: ModuleType) -> None:
    """Where a machine has fewer GPUs than a test has ranks, several compute on one.

    NCCL refuses that for two ranks of one machine, so each pretends to be a machine of its own (``NCCL_HOSTID``), and
    they send through sockets.
    """
    import ctypes

    import torch

    cuda, options = module.CudaDevice, module.CudaDevice.process_group_options

    def device(self: Any, local_rank: int) -> Any:
        return torch.device("cuda", local_rank % max(self.device_count(), 1))

    def process_group_options(self: Any, device: Any) -> Any:
        # Not in os.environ, of which a test must leave nothing behind.
        ctypes.CDLL(None).setenv(b"NCCL_HOSTID", str(os.getpid()).encode(), 1)
        return options(self, device)

    device.shares_gpus = True  # type: ignore[attr-defined]
    cuda.device, cuda.process_group_options = device, process_group_options


_CHANGES = {
    "accel_state.devices.registry": _detect_device,
    "accel_state.state.partial": _start_on_device,
    "torch.testing._comparison": _compare_values,
    "accel_state.devices.base": _do_as_a_user_would,  # imported with the first part of accel, when torch is complete
}


if os.environ.get("ACCEL_TEST_SHARE_GPUS") == "1":
    _CHANGES["accel_state.devices.cuda"] = _share_gpus


class _Finder(importlib.abc.MetaPathFinder):
    """Applies a change to a module that was just loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = _CHANGES.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if change is not None else None
        if spec is None or spec.loader is None or change is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _NAME == "cuda":
    # Without it, DeepSpeed asks CUDA for its devices when it is imported, and what imported it cannot start ranks.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if _NAME and os.environ.get("ACCEL_TEST_IN_PLACE", "1") == "1":
    sys.meta_path.insert(0, _Finder())
