"""How much memory a model may take of each device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from accel_state import convert_file_size_to_int, devices
from accel_state.errors import ConfigurationError

from ..sizes import Dtype, as_names, compute_module_sizes, layers

MaxMemory = Mapping[int | str, int | str]
HOST_AND_DISK = ("cpu", "disk")


def get_max_memory(max_memory: MaxMemory | None = None) -> dict[int | str, int]:
    """Bytes that weights may take of each device: accelerators by number, then "cpu", then "disk".

    Args:
        max_memory: limits to use, in bytes or as text ("10GB" is 10**10 bytes, "10GiB" is 10 * 2**30). None: what is
            free now.

    Raises:
        ConfigurationError: a device that this machine does not have, or a limit that is not a size.
    """
    if max_memory is None:
        return _free_memory()
    limits = {device: _bytes(device, limit) for device, limit in max_memory.items()}
    for device in limits:
        if not (isinstance(device, int) or device in HOST_AND_DISK):
            raise ConfigurationError(
                f"max_memory has a limit for {device!r}: name accelerators by their numbers, or 'cpu', or 'disk'"
            )
    ordered: list[int | str] = sorted(device for device in limits if isinstance(device, int))
    ordered += [device for device in HOST_AND_DISK if device in limits]
    return {device: limits[device] for device in ordered}


def _free_memory() -> dict[int | str, int]:
    device = devices.detect()
    free: dict[int | str, int] = {}
    if device.name != "cpu":
        free.update({index: device.memory_free(index) for index in range(device.device_count())})
    return {**free, "cpu": devices.get("cpu").memory_free()}


def _bytes(device: int | str, limit: int | str) -> int:
    try:
        size = convert_file_size_to_int(limit)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"max_memory[{device!r}]={limit!r}: {error}") from error
    if size < 0:
        raise ConfigurationError(f"max_memory[{device!r}]={limit!r} is negative: give the bytes that weights may take")
    return size


def get_balanced_memory(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Limits for :func:`infer_auto_device_map` under which the model spreads evenly over the accelerators.

    The share of each is the smallest with which the layers, which are not cut, fit on all of them. The last accelerator
    keeps its limit. Where the model does not fit on the accelerators, all limits stay as they are.

    Args:
        model: the model, on the meta device too.
        max_memory: as in :func:`get_max_memory`; the result is nowhere above it.
        no_split_module_classes: classes whose modules must stay whole.
        dtype: the type that weights are converted to.
        special_dtypes: types of single weights.
        low_zero: leave the first accelerator as empty as the others allow, for the work that ``generate`` does there.
    """
    limits = get_max_memory(max_memory)
    accelerators = [device for device, limit in limits.items() if device not in HOST_AND_DISK and limit > 0]
    if len(accelerators) < 2:
        return limits
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    pieces = [sizes.get(name, 0) for name, _ in layers([("", model)], as_names(no_split_module_classes))]
    own = [limits[device] for device in accelerators]
    first = _smallest(lambda room: _fits(pieces, [min(own[0], room), *own[1:]]), own[0]) if low_zero else own[0]
    if first is None or not _fits(pieces, own):
        return limits  # something is offloaded anyway: use all there is
    rest = own[1:] if low_zero else own
    reserved = [first] if low_zero else []
    share = _smallest(lambda room: _fits(pieces, [*reserved, *(min(limit, room) for limit in rest)]), max(own))
    assert share is not None
    for device in accelerators[:-1]:
        limits[device] = min(limits[device], share)
    if low_zero:
        limits[accelerators[0]] = first
    return limits


def _fits(pieces: Sequence[int], limits: Sequence[int]) -> bool:
    """Whether layers fit on devices that are filled one after the other."""
    remaining = list(reversed(limits))
    room = remaining.pop()
    for piece in pieces:
        while piece > room:
            if not remaining:
                return False
            room = remaining.pop()
        room -= piece
    return True


def _smallest(fits: Callable[[int], bool], largest: int) -> int | None:
    """The smallest number of bytes up to ``largest`` that is enough, or None."""
    if not fits(largest):
        return None
    low, high = 0, largest
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low
