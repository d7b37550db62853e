"""What an object looks like in the safetensors format, and writing it, aligned for mapping."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from .errors import ConfigurationError
from .tensor_storage import id_tensor_storage, memory_of

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The data section begins at a multiple of this many bytes, so mapped tensors begin at cache lines.
_ALIGNMENT = 64


def safetensors_content(obj: Any) -> dict[str, torch.Tensor]:
    """Return the tensors to write for an object in the safetensors format."""
    for value in obj.values() if isinstance(obj, Mapping) else [obj]:
        if not isinstance(value, torch.Tensor) or not isinstance(obj, Mapping):
            raise ConfigurationError(
                f"safe_serialization=True saves dictionaries of tensors only, not a {type(obj).__name__} with a "
                f"{type(value).__name__}. Save it with safe_serialization=False."
            )
    return clean_state_dict_for_safetensors(dict(obj))


def clean_state_dict_for_safetensors(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict that safetensors can hold: contiguous tensors, one name for each, and no shared memory."""
    names: dict[tuple[Any, ...], str] = {}
    owners: dict[tuple[torch.device, int, int], str] = {}
    cleaned: dict[str, torch.Tensor] = {}
    for name, tensor in state_dict.items():
        memory = id_tensor_storage(tensor)
        identity = (*memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() and tensor.device.type != "meta" and names.setdefault(identity, name) != name:
            continue
        contiguous = tensor.detach().contiguous()
        # Different views of the same memory are copied: the format has no views.
        if contiguous.numel() and tensor.is_contiguous() and owners.setdefault(memory, name) != name:
            contiguous = contiguous.clone()
        cleaned[name] = contiguous
    return cleaned


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return what is in front of the tensors in a file, and where after it each begins, in the order of writing.

    Tensors whose size is a multiple of 64 bytes come first and begin at multiples of 64 bytes, as nearly all weights
    do; of the others those with wide elements come first, so each is aligned to its own element size.

    Args:
        tensors: with their dtypes and shapes; the meta device will do.

    Raises:
        ConfigurationError: the format does not have a dtype.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, begins = 0, {}
    keys = []
    for name, tensor in tensors.items():
        keys.append((tensor.nbytes % _ALIGNMENT != 0, -tensor.element_size(), name))
    for _, _, name in sorted(keys):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise ConfigurationError(
                f"{name} has dtype {tensor.dtype}, which the safetensors format does not have. Save it with "
                "safe_serialization=False."
            )
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        begins[name] = offset
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, begins


def write_safetensors(tensors: Mapping[str, torch.Tensor], target: Any) -> None:
    """Write tensors, one after another, to an object with ``write``; see :func:`layout` for their order."""
    head, begins = layout(tensors)
    target.write(head)
    for name in begins:
        elements = tensors[name].detach().cpu().contiguous().reshape(-1)
        if elements.numel():
            target.write(memory_of(elements))
