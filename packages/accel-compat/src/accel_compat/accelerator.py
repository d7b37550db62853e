"""The module ``accelerate.accelerator``: that of accel, with the Accelerator of scripts written for Accelerate."""

from __future__ import annotations

import functools
import sys
from typing import Any, ClassVar

import accel.accelerator
from accel_state.errors import ConfigurationError

__all__ = ["Accelerator"]


class Accelerator(accel.accelerator.Accelerator):
    """An Accelerator for scripts written for Accelerate.

    Its ``load_state`` leaves it to the script to move the loaders, and gathers cover all processes of a mesh.
    """

    follows_reference: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mesh = self.strategy.active_plugins.get("mesh")
        sequences = 1 if mesh is None or self.strategy.uses_engine else mesh.size("sp")
        if sequences > 1 and "transformers.trainer" in sys.modules:
            raise ConfigurationError(
                f"sp_size={sequences}: Transformers' Trainer, which this script has imported, computes the loss of "
                "sequences that are split by heads with DeepSpeed's process groups only. Set cp_size instead, or use "
                "DeepSpeed (TrainingArguments(deepspeed=...)). In a loop of your own, import Accelerator from accel."
            )


functools.update_wrapper(Accelerator.__init__, accel.accelerator.Accelerator.__init__)  # libraries read the signature


def __getattr__(name: str) -> Any:
    return getattr(accel.accelerator, name)
