"""The gradients that a model has accumulated: discarding, saving and restoring those of an open window."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..core.unwrap import clean_name, extract_model_from_parallel


class AccumulatedGradients:
    """The accumulated gradients of models whose ranks hold whole parameters.

    Attributes:
        can_be_saved: whether those of an open accumulation window can be saved and restored.
    """

    def __init__(self, can_be_saved: bool = True) -> None:
        self.can_be_saved = can_be_saved

    def drop(self, model: nn.Module) -> None:
        """Discard the gradients of a model."""
        extract_model_from_parallel(model).zero_grad(set_to_none=True)

    def shapes(self, model: nn.Module) -> dict[str, torch.Size]:
        """Return the full shapes of a model's gradients by name."""
        named = extract_model_from_parallel(model, keep_torch_compile=False).named_parameters()
        return {clean_name(name): parameter.shape for name, parameter in named}

    def gather(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the full gradients of a sharded model by name, averaged over the ranks; empty except on rank 0.

        Every rank must call it. It is called if the strategy shards parameters.
        """
        raise NotImplementedError(f"{type(self).__name__} belongs to a strategy that does not shard parameters")

    def put(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Set the gradients of a model from full ones by name; a parameter without one gets None."""
        for name, parameter in extract_model_from_parallel(model, keep_torch_compile=False).named_parameters():
            gradient = gradients.get(clean_name(name))
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)
