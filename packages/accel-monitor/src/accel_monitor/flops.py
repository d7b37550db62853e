"""Counts the floating-point operations of one step, by what torch dispatches.

The formulas are torch's own (``torch.utils.flop_counter``): 2 operations for each multiplication and addition of matrix
products, convolutions and attention; what is element by element counts nothing. Added are operators that they lack.
Operators of a DTensor are counted by the parts that a rank computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from accel_state.flops import attention_flops, grouped_product_flops

from ._torch_compat import TorchDispatchMode
from .parts import Part
from .recorder import Recorder

_aten = torch.ops.aten
_STEPS_BEFORE = 2


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return attention_flops(query.shape, key.shape, value.shape)


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return attention_flops(query.shape, key.shape, value.shape) * 5 // 2


def _grouped_product(first: Any, second: Any, *_: Any, **__: Any) -> int:
    return grouped_product_flops(first.shape, second.shape)


# Torch's own formula refuses fewer heads of keys than of queries in 2.11.
_KERNELS = ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu")

_FORMULAS: dict[Any, Any] = {
    **flop_registry,
    **{
        getattr(_aten, name): formula
        for name, formula in (
            *((f"_scaled_dot_product_{kernel}", _attention) for kernel in _KERNELS),
            *((f"_scaled_dot_product_{kernel}_backward", _attention_backward) for kernel in _KERNELS),
            ("_grouped_mm", _grouped_product),
        )
        if hasattr(_aten, name)
    },
}
# Their backward passes compute five products: the scores again, and four gradients.
_ATTENTION_BACKWARD = {packet for packet in _FORMULAS if "attention" in str(packet) and "backward" in str(packet)}


class StepFlops(TorchDispatchMode):
    """Counts while it is active.

    Attributes:
        total: operations of the model: forward and backward.
        recomputed: operations that were done before: of forward passes within the backward pass (activation
            checkpointing), and of the scores of fused attention.
        uncounted: the first operator that cannot be counted, such as flex_attention; None if there was none.
    """

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.total: int = 0
        self.recomputed: int = 0
        self.uncounted: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a subclass, such as DTensor, whose parts come back here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if packet is None:  # of a higher order, with a function of its own
            self.uncounted = self.uncounted or str(func)
        elif packet in _FORMULAS:
            try:
                operations = int(_FORMULAS[packet](*args, **kwargs, out_val=result))
            except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
                # torch's formulas assert what they know of shapes; training goes on.
                self.uncounted = self.uncounted or str(func)
                return result
            again = operations // 5 if packet in _ATTENTION_BACKWARD else 0
            self.recomputed += again
            self._add(operations - again)
        return result

    def _add(self, operations: int) -> None:
        # The operators of a backward pass run without gradients; one that runs with them is of a forward pass again.
        if self._recorder.part == Part.BACKWARD and torch.is_grad_enabled():
            self.recomputed += operations
        else:
            self.total += operations


class FlopCount:
    """Counts the third step, when everything is compiled.

    Args:
        recorder: whose steps.
        may_count: asked once, before it counts.
        counted: called once, with the count of a step.
    """

    def __init__(self, recorder: Recorder, may_count: Callable[[], bool], counted: Callable[[StepFlops], None]) -> None:
        self._recorder, self._may_count, self._counted = recorder, may_count, counted
        self._mode: StepFlops | None = None
        self._steps = 0

    def begin_batch(self) -> None:
        """Run by the loop with a batch for training."""
        if self._mode is None and self._steps >= _STEPS_BEFORE and self._may_count():
            self._mode = StepFlops(self._recorder)
            self._mode.__enter__()

    def end_step(self) -> None:
        """Run by the loop after a step."""
        self._steps += 1
        mode = self._leave()
        if mode is not None:
            self._counted(mode)

    def abandon(self) -> None:
        """Run by the loop where it leaves its loader: the step is not whole."""
        self._leave()

    def _leave(self) -> StepFlops | None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)
        return mode
