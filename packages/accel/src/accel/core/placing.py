"""Moves models so that their parameters stay the objects that optimizers and tied layers hold."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from accel_state.errors import ConfigurationError


def makes_parameters(device: torch.device) -> bool:
    """Return True if ``to`` gives modules new parameters, which an optimizer does not know.

    That is so with ``torch.__future__.set_overwrite_module_params_on_conversion``, and on devices whose tensors cannot
    take the place of others (XLA, and plug-ins that do not implement ``_has_compatible_shallow_copy_type``).
    """
    probe = nn.Linear(1, 1, bias=False, device="cpu")
    before = probe.weight
    return probe.to(device).weight is not before


def move_in_place(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model by exchanging the contents of its parameters, without new parameters.

    Raises:
        ConfigurationError: other objects refer to its parameters, so that they cannot be exchanged.
    """
    if all(tensor.device == device for tensor in chain(model.parameters(), model.buffers())):
        return model
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    except RuntimeError as error:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be moved to {device} in place, because other objects refer to its "
            f"parameters ({error}). Prepare it before it is compiled or used, or create it on "
            "accelerator.device, and its optimizer after that."
        ) from error
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
