"""The back ends by name, and which of them to take."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel_state.errors import ConfigurationError
from accel_state.registry import Registry

from ..recipe import FP8Recipe
from .base import Backend

# The order in which they are tried where none was asked for: the fastest on the hardware it is made for comes first.
BACKENDS: Registry[type[Backend]] = Registry(
    "FP8 back end",
    {
        "te": "accel_fp8.backends.te:TransformerEngineBackend",
        "ao": "accel_fp8.backends.ao:TorchAOBackend",
        "native": "accel_fp8.backends.native:NativeBackend",
        "msamp": "accel_fp8.backends.msamp:MSAMPBackend",
    },
)


class Choice(NamedTuple):
    """A back end, and why it was taken."""

    name: str
    reason: str


def choose_backend(name: str | None, device: torch.device) -> Choice:
    """Which back end computes on a device.

    Args:
        name: the one that was asked for; None takes the best that device and environment support.
        device: where models compute.

    Raises:
        ConfigurationError: the one asked for is not known, or cannot compute on this device.
        MissingDependencyError: its package is not installed.
    """
    if name is not None:
        refusal = BACKENDS.load(name).unavailable(device)
        if refusal is not None:
            raise ConfigurationError(
                f"the FP8 back end {name!r} cannot compute here: {refusal}. Take another one: --fp8_backend native "
                "works on any device."
            )
        return Choice(name, "it was asked for")
    for candidate in BACKENDS:
        backend = BACKENDS.load(candidate)
        reason = backend.merit(device)
        if reason is not None and backend.unavailable(device) is None:
            return Choice(candidate, reason)
    raise AssertionError("the native back end computes on every device")


def create_backend(recipe: FP8Recipe, device: torch.device) -> tuple[Backend, Choice]:
    """The back end that a recipe asks for, or the best one, and why it was taken.

    Args:
        recipe: what is computed in 8 bits, and how.
        device: where models compute.

    Raises:
        ConfigurationError: see :func:`choose_backend`; or the recipe asks for what the back end cannot do.
        MissingDependencyError: its package is not installed.
    """
    choice = choose_backend(recipe.backend, device)
    return BACKENDS.load(choice.name)(recipe, device), choice
