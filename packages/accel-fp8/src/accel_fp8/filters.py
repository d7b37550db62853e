"""Selection of the linear layers that compute in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from .matmul import MULTIPLE
from .recipe import LayerFilter


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Return the linear layers of a model with their names, in the order of registration."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))


def has_fitting_dimensions(layer: nn.Linear) -> bool:
    """Return True if both dimensions are multiples of 16, which FP8 hardware requires."""
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer of a model; None for a model without linear layers."""
    names = [name for name, _ in linear_layers(model)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Iterable[str | None]) -> bool:
    """Return True if a layer should compute in 8 bits: it has fitting dimensions and is not filtered out.

    Args:
        module: the layer.
        fqn: its name in the model.
        layers_to_filter: names of layers that stay in high precision.
    """
    if isinstance(module, nn.Linear) and not has_fitting_dimensions(module):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return True if a layer should compute in 8 bits: it has fitting dimensions and is not filtered out.

    Embeddings and heads are at the ends of a model, where rounding is most harmful.

    Args:
        module: the whole model; or the layer itself, of which only the dimensions are checked.
        fqn: the name of the layer in the model.
    """
    if isinstance(module, nn.Linear):
        return has_fitting_dimensions(module)
    layer = dict(module.named_modules()).get(fqn)
    fits = not isinstance(layer, nn.Linear) or has_fitting_dimensions(layer)
    return fits and fqn not in find_first_last_linear_layers(module)


def layer_filter(model: nn.Module, custom: LayerFilter | None) -> LayerFilter:
    """Return the filter for converting a model: ``custom``, or one that excludes the first and the last linear layer.

    Layers whose dimensions do not fit are always excluded.
    """
    ends = find_first_last_linear_layers(model)

    def accepts(layer: nn.Module, name: str) -> bool:
        if not isinstance(layer, nn.Linear) or not has_fitting_dimensions(layer):
            return False
        return name not in ends if custom is None else bool(custom(layer, name))

    return accepts
