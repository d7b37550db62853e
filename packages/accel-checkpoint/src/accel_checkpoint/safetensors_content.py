"""What an object looks like in the safetensors format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_state.errors import ConfigurationError
from accel_state.tensor_storage import id_tensor_storage


def safetensors_content(obj: Any) -> dict[str, torch.Tensor]:
    """The tensors to write for an object in the safetensors format."""
    for value in obj.values() if isinstance(obj, Mapping) else [obj]:
        if not isinstance(value, torch.Tensor) or not isinstance(obj, Mapping):
            raise ConfigurationError(
                f"safe_serialization=True saves dictionaries of tensors only, not a {type(obj).__name__} with a "
                f"{type(value).__name__}. Save it with safe_serialization=False."
            )
    return clean_state_dict_for_safetensors(dict(obj))


def clean_state_dict_for_safetensors(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict that safetensors can hold: contiguous tensors, one name for each, and no shared memory."""
    names: dict[tuple[Any, ...], str] = {}
    owners: dict[tuple[torch.device, int, int], str] = {}
    cleaned: dict[str, torch.Tensor] = {}
    for name, tensor in state_dict.items():
        identity = (*id_tensor_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() and tensor.device.type != "meta" and names.setdefault(identity, name) != name:
            continue
        contiguous = tensor.detach().contiguous()
        # Different views of the same memory are copied: the format has no views.
        if contiguous.numel() and owners.setdefault(id_tensor_storage(contiguous), name) != name:
            contiguous = contiguous.clone()
        cleaned[name] = contiguous
    return cleaned
