"""Which linear layers compute in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .matmul import MULTIPLE
from .recipe import LayerFilter


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of a model with their names, in the order of registration."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))


def has_fitting_dimensions(layer: nn.Linear) -> bool:
    """Whether both dimensions are multiples of 16, as hardware that multiplies in 8 bits asks for."""
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0


def first_and_last_linear(model: nn.Module) -> tuple[str | None, str | None]:
    """The names of the first and the last linear layer; None for a model without any."""
    names = [name for name, _ in linear_layers(model)]
    return (names[0], names[-1]) if names else (None, None)


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Whether a layer should compute in 8 bits: neither the first nor the last linear layer, and of fitting dimensions.

    Embeddings and heads sit at the ends of a model, where rounding does the most harm.

    Args:
        module: the whole model; or the layer itself, of which only the dimensions can be judged.
        fqn: the name of the layer in the model.
    """
    if isinstance(module, nn.Linear):
        return has_fitting_dimensions(module)
    layer = dict(module.named_modules()).get(fqn)
    return fqn not in first_and_last_linear(module) and (
        not isinstance(layer, nn.Linear) or has_fitting_dimensions(layer)
    )


def layer_filter(model: nn.Module, chosen: LayerFilter | None) -> LayerFilter:
    """The filter to convert a model with: the user's own, or the one that keeps the first and the last linear layer.

    Layers of dimensions that do not fit are kept in any case.

    Args:
        model: the whole model.
        chosen: the user's filter.
    """
    ends = first_and_last_linear(model)

    def keep_ends(layer: nn.Module, name: str) -> bool:
        return name not in ends

    accepts = chosen or keep_ends
    return lambda layer, name: (
        isinstance(layer, nn.Linear) and has_fitting_dimensions(layer) and bool(accepts(layer, name))
    )
