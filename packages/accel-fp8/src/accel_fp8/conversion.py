"""FP8 training without an Accelerator: :func:`convert` a model, and run its forward in :func:`autocast`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from .backends.registry import create_backend
from .recipe import FP8Recipe

_ATTRIBUTE = "_fp8_backend"
logger: Final = logging.getLogger(__name__)


def convert(
    model: nn.Module,
    recipe: FP8Recipe | None = None,
    *,
    device: torch.device | str | None = None,
    process_group: Any = None,
    sharded: bool = False,
) -> nn.Module:
    """Convert layers of a model to 8-bit floating point, in place. The selected back end is logged at level INFO.

    Convert before wrapping (DDP, FSDP) and compiling. The parameters stay the same objects, so an optimizer may exist
    already. MS-AMP needs the optimizer: ``create_backend(recipe, device)[0].initialize(model, optimizer)``.

    Args:
        model: the whole model.
        recipe: FP8 settings; defaults to the launcher's.
        device: device that the model will compute on; defaults to that of its parameters.
        process_group: the data-parallel process group; defaults to all processes.
        sharded: whether FSDP 2 will shard the model.

    Returns:
        The given model.

    Raises:
        ConfigurationError: the back end does not support the device or the recipe.
        MissingDependencyError: the package of the back end is not installed.
    """
    recipe = recipe or FP8Recipe.from_environment()
    if device is None:
        device = next((parameter.device for parameter in model.parameters()), "cpu")
    backend, choice = create_backend(recipe, torch.device(device))
    if backend.takes_optimizer:
        raise ConfigurationError(
            f"the FP8 back end {choice.name!r} prepares a model together with its optimizer. Call "
            "create_backend(recipe, device)[0].initialize(model, optimizer)."
        )
    logger.info("FP8 back end %s: %s", choice.name, choice.reason)
    backend.convert(model, process_group, sharded)
    backend.recipe = replace(recipe, module_filter_func=None)  # see convert_to_native
    model.__dict__[_ATTRIBUTE] = backend
    return model


@contextmanager
def autocast(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Context for the forward pass of a converted model: bfloat16 around the layers that compute in 8 bits.

    Args:
        model: a model converted by :func:`convert`, or a wrapper (DDP, torch.compile) around it.
        enabled: False disables the autocast.

    Raises:
        ConfigurationError: the model was not converted.
    """
    backends = (module.__dict__.get(_ATTRIBUTE) for module in model.modules())
    backend = next((backend for backend in backends if backend is not None), None)
    if backend is None:
        raise ConfigurationError(
            "autocast(model): the model is not converted. Call accel_fp8.convert(model, recipe) first."
        )
    with backend.autocast(enabled), backend.forward_context(model.training and enabled):
        yield
