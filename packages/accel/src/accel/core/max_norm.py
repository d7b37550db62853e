"""Embeddings that change their weights in forward passes."""

from __future__ import annotations

from torch import nn

from accel_state.errors import ConfigurationError


def refuse_max_norm(model: nn.Module) -> None:
    """Refuse embeddings with ``max_norm`` where ranks have different samples, or parts of the weights.

    Raises:
        ConfigurationError: the model has such an embedding.
    """
    for name, module in model.named_modules():
        max_norm = getattr(module, "max_norm", None)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and max_norm is not None:
            raise ConfigurationError(
                f"{name or type(model).__name__} has max_norm={max_norm}: each rank would shorten the rows of its own "
                "batch only, and the weights would differ between ranks. Set max_norm=None, and shorten the embedded "
                "rows in the model's forward (torch.renorm(rows, 2, 0, max_norm)), or train in one process."
            )
