"""Adagrad, with states that come at the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adagrad, Optimizer


class LateAdagrad(Optimizer):
    """The Adagrad of a script, in the form in which ZeRO can divide it.

    torch's has its states from the beginning, so DeepSpeed puts a new one in its place: over all parameters in one group, and out of reach
    of the script's schedulers. Other optimizers make their states at the first step, and so does this one.

    Args:
        given: the optimizer; its parameter groups are shared, so what changes its learning rate changes this one's.
    """

    _init_group: Any = Adagrad._init_group

    def __init__(self, given: Adagrad) -> None:
        super().__init__(given.param_groups, given.defaults)
        self._need_device_dtype_check_for_fused = True
        # torch's schedulers warn unless the optimizer that they were made with has stepped.
        given._opt_called = True  # type: ignore[attr-defined]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: computes the loss again.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "sum": torch.full_like(parameter, group["initial_accumulator_value"]),
                    }
        return Adagrad.step(self, closure)  # type: ignore[arg-type]
