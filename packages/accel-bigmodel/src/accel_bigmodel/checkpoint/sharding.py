"""Splitting a state dict into files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_state import convert_file_size_to_int

WEIGHTS_NAME = "pytorch_model.bin"


def shard_checkpoint(
    state_dict: Mapping[str, torch.Tensor], max_shard_size: int | str = "10GB", weights_name: str = WEIGHTS_NAME
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any] | None]:
    """Split a state dict into files, in order: a file is complete when the next tensor would exceed the limit.

    Weights of [6, 6, 2, 6, 2, 2] GB and a limit of 10 GB become [6], [6, 2] and [6, 2, 2]. A tensor above the limit
    gets its own file. Tensors that share memory stay together and count once.

    Args:
        state_dict: names and tensors.
        max_shard_size: bytes, or text such as "5GB".
        weights_name: the name of a single file; several are named ``pytorch_model-00001-of-00003.bin`` and so on.

    Returns:
        File names with their parts of the state dict; and the index, None for a single file.
    """
    limit = convert_file_size_to_int(max_shard_size)
    shards: list[dict[str, torch.Tensor]] = [{}]
    sizes = [0]
    shard_of: dict[tuple[torch.device, int], int] = {}
    for name, tensor in state_dict.items():
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        known = shard_of.get(storage) if tensor.device.type != "meta" and tensor.numel() else None
        if known is not None:
            shards[known][name] = tensor
            continue
        size = tensor.numel() * tensor.element_size()
        if sizes[-1] and sizes[-1] + size > limit:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor
        sizes[-1] += size
        shard_of[storage] = len(shards) - 1
    if len(shards) == 1:
        return {weights_name: shards[0]}, None
    stem, _, suffix = weights_name.rpartition(".")
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}" for number in range(1, len(shards) + 1)]
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    return dict(zip(names, shards, strict=True)), {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
