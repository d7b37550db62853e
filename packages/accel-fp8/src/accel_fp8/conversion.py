"""The whole of it in two calls, for a model without an Accelerator: :func:`convert`, and :func:`autocast` around its
forward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from .backends.base import Backend
from .backends.registry import create_backend
from .recipe import FP8Recipe

_ATTRIBUTE = "_fp8_backend"
logger = logging.getLogger(__name__)


def convert(
    model: nn.Module,
    recipe: FP8Recipe | None = None,
    *,
    device: torch.device | str | None = None,
    process_group: Any = None,
    sharded: bool = False,
) -> nn.Module:
    """Let layers of a model compute in 8-bit floating point, in place. Which back end does so, and why, goes to the
    log.

    Convert before wrapping (DDP, FSDP) and compiling. The parameters stay the same objects, so an optimizer may exist
    already; MS-AMP alone needs it: ``create_backend(recipe, device)[0].initialize(model, optimizer)``.

    Args:
        model: the whole model.
        recipe: what is computed in 8 bits, and how; by default the launcher's settings.
        device: where the model will compute; by default where its parameters are.
        process_group: the data-parallel processes, where they are not all.
        sharded: whether FSDP 2 will shard it.

    Returns:
        The given model.

    Raises:
        ConfigurationError: the back end cannot compute there, or what the recipe asks for.
        MissingDependencyError: its package is not installed.
    """
    recipe = recipe or FP8Recipe.from_environment()
    place = (
        torch.device(device)
        if device is not None
        else next((p.device for p in model.parameters()), torch.device("cpu"))
    )
    backend, choice = create_backend(recipe, place)
    if backend.takes_optimizer:
        raise ConfigurationError(
            f"the FP8 back end {choice.name!r} prepares a model together with its optimizer: "
            "create_backend(recipe, device)[0].initialize(model, optimizer)."
        )
    logger.info("FP8 back end %s: %s", choice.name, choice.reason)
    backend.convert(model, process_group, sharded)
    backend.recipe = replace(recipe, module_filter_func=None)  # see convert_to_native
    model.__dict__[_ATTRIBUTE] = backend
    return model


@contextmanager
def autocast(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """A block for the forward pass of a model that :func:`convert` converted: bfloat16 around the layers that compute
    in 8 bits.

    Args:
        model: the converted model, or a wrapper (DDP, torch.compile) around it.
        enabled: False leaves out the autocast.

    Raises:
        ConfigurationError: the model was not converted.
    """
    backend = _backend_of(model)
    with backend.autocast(enabled), backend.forward_context(model.training and enabled):
        yield


def _backend_of(model: nn.Module) -> Backend:
    for module in model.modules():
        backend = module.__dict__.get(_ATTRIBUTE)
        if backend is not None:
            return backend
    raise ConfigurationError(
        "autocast(model): the model is not converted. Call accel_fp8.convert(model, recipe) first."
    )
