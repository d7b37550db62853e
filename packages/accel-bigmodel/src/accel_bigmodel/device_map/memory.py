"""Memory limits of devices, and their balanced shares of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence

import torch
from torch import nn

from accel_state import convert_file_size_to_int, devices
from accel_state.arguments import check_flag
from accel_state.errors import ConfigurationError, check_type

from ..sizes import Dtype, as_names, compute_module_sizes, named_layers

# A Mapping is invariant in its keys: a dictionary of text alone is no Mapping[int | str, ...] to a type checker.
MaxMemory = Mapping[int | str, float | str] | Mapping[str, float | str] | Mapping[int, float | str]
HOST_AND_DISK = ("cpu", "disk")


def get_max_memory(max_memory: MaxMemory | None = None) -> dict[int | str, int]:
    """Return bytes available for weights on each device: accelerators by index, then "cpu", then "disk".

    Args:
        max_memory: limits in bytes or as text ("10GB" is 10**10 bytes, "10GiB" is 10 * 2**30); the values of a
            dictionary are replaced by bytes. None: the memory that is free now.

    Raises:
        ConfigurationError: an unknown device, or an invalid size.
    """
    if max_memory is None:
        device_type = devices.detect()
        free: dict[int | str, int] = {}
        if device_type.name != "cpu":
            free.update({index: device_type.memory_free(index) for index in range(device_type.device_count())})
        return {**free, "cpu": devices.get("cpu").memory_free()}
    hint = "Pass a dictionary of devices to sizes, such as {0: '10GiB', 'cpu': '30GiB'}."
    check_type(max_memory, Mapping, "max_memory", hint)
    advice = "give the bytes available for weights"
    limits = {device: memory_bytes(limit, f"max_memory[{device!r}]", advice) for device, limit in max_memory.items()}
    for device in limits:
        if not (isinstance(device, int) or device in HOST_AND_DISK):
            raise ConfigurationError(
                f"max_memory has a limit for {device!r}: give indices of accelerators, 'cpu' or 'disk'"
            )
    if isinstance(max_memory, MutableMapping):
        max_memory.update(limits)
    ordered: list[int | str] = sorted(device for device in limits if isinstance(device, int))
    ordered += [device for device in HOST_AND_DISK if device in limits]
    return {device: limits[device] for device in ordered}


def memory_bytes(limit: float | str, name: str, advice: str) -> int:
    """Return a limit in bytes; raises ConfigurationError, with the name of the argument, if it is none."""
    try:
        size = convert_file_size_to_int(limit)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigurationError(f"{name}={limit!r}: {error}") from error
    if size < 0:
        raise ConfigurationError(f"{name}={limit!r} is negative: {advice}")
    return size


def get_balanced_memory(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Limits for :func:`infer_auto_device_map` that distribute the model evenly over the accelerators.

    The share of each is the smallest with which the unsplit layers fit on all of them. The last accelerator keeps its
    limit. If the model does not fit on the accelerators, all limits stay as they are.

    Args:
        max_memory: as in :func:`get_max_memory`; no result exceeds it.
        no_split_module_classes: classes whose modules are not split.
        dtype: the dtype that weights are converted to.
        special_dtypes: dtypes of single weights.
        low_zero: put as little as possible on the first accelerator, to leave room for the work of ``generate``.
    """
    check_type(model, nn.Module, "get_balanced_memory", "Pass a model.")
    check_flag("low_zero", low_zero)
    limits = get_max_memory(max_memory)
    accelerators = [device for device, limit in limits.items() if device not in HOST_AND_DISK and limit > 0]
    if len(accelerators) < 2:
        return limits
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    layer_sizes = [sizes.get(name, 0) for name, _ in named_layers([("", model)], as_names(no_split_module_classes))]
    available = [limits[device] for device in accelerators]
    if not _fits(layer_sizes, available):
        return limits  # something is offloaded anyway, so use all memory
    first: list[int] = []
    if low_zero:
        rest = available[1:]
        first = [_smallest(lambda size: _fits(layer_sizes, [size, *rest]), available[0])]
    others = available[len(first) :]
    share = _smallest(
        lambda size: _fits(layer_sizes, [*first, *(min(limit, size) for limit in others)]), max(available)
    )
    for device in accelerators[:-1]:
        limits[device] = min(limits[device], share)
    if low_zero:
        limits[accelerators[0]] = first[0]
    return limits


def _fits(layer_sizes: Sequence[int], limits: Sequence[int]) -> bool:
    """Return True if layers fit on devices that are filled one after the other."""
    remaining = list(reversed(limits))
    room = remaining.pop()
    for size in layer_sizes:
        while size > room:
            if not remaining:
                return False
            room = remaining.pop()
        room -= size
    return True


def _smallest(fits: Callable[[int], bool], largest: int) -> int:
    """Return the smallest number of bytes that fits, by bisection; ``largest`` does."""
    low, high = 0, largest
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low
