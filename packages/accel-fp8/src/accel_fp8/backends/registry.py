"""Registry and selection of FP8 back ends."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel_state.errors import ConfigurationError
from accel_state.registry import Registry

from ..recipe import FP8Recipe
from .base import Backend

# In the order in which they are tried by default: specialised ones first.
BACKENDS: Registry[type[Backend]] = Registry(
    "FP8 back end",
    {
        "te": "accel_fp8.backends.te:TransformerEngineBackend",
        "ao": "accel_fp8.backends.ao:TorchAOBackend",
        "native": "accel_fp8.backends.native:NativeBackend",
        "msamp": "accel_fp8.backends.msamp:MSAMPBackend",
    },
)


class BackendChoice(NamedTuple):
    """The name of a back end, and why it was selected."""

    name: str
    reason: str


def choose_backend(name: str | None, device: torch.device) -> BackendChoice:
    """Select the back end for a device.

    Args:
        name: name of a back end; None selects the best one for the device and the installed packages.
        device: device that models compute on.

    Raises:
        ConfigurationError: the name is unknown, or the back end does not support the device.
        MissingDependencyError: its package is not installed.
    """
    if name is not None:
        reason = BACKENDS.load(name).unavailable(device)
        if reason is not None:
            raise ConfigurationError(
                f"the FP8 back end {name!r} cannot compute here: {reason}. Use another one: --fp8_backend native "
                "supports every device."
            )
        return BackendChoice(name, "selected by name")
    for candidate in BACKENDS:
        backend = BACKENDS.load(candidate)
        reason = backend.merit(device)
        if reason is not None and backend.unavailable(device) is None:
            return BackendChoice(candidate, reason)
    raise AssertionError("the native back end supports every device")


def create_backend(recipe: FP8Recipe, device: torch.device) -> tuple[Backend, BackendChoice]:
    """Create the back end for a recipe, and return why it was selected.

    Args:
        recipe: FP8 settings.
        device: device that models compute on.

    Raises:
        ConfigurationError: see :func:`choose_backend`; or the back end does not support the recipe.
        MissingDependencyError: its package is not installed.
    """
    choice = choose_backend(recipe.backend, device)
    return BACKENDS.load(choice.name)(recipe, device), choice
