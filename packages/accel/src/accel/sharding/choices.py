"""Settings given by name, by number, or as torch's own objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accel_state import devices
from accel_state.errors import ConfigurationError
from accel_state.options.fsdp import SHARDING_STRATEGIES


def sharding_strategy(value: Any) -> Any:
    """Torch's ``ShardingStrategy`` by name, number or itself.

    Raises:
        ConfigurationError: there is none such.
    """
    from torch.distributed.fsdp import ShardingStrategy

    if isinstance(value, ShardingStrategy):
        return value
    name = one_of("sharding_strategy", by_number(value, SHARDING_STRATEGIES), SHARDING_STRATEGIES)
    return ShardingStrategy._HYBRID_SHARD_ZERO2 if name == "HYBRID_SHARD_ZERO2" else ShardingStrategy[name]


def by_number(value: Any, names: Iterable[str]) -> str:
    """A name, from itself or from its place in the list, counted from 1."""
    numbered = dict(enumerate(names, start=1))
    text = str(getattr(value, "name", value)).strip().upper()
    return numbered.get(int(text), text) if text.isdigit() else text


def one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """The value as text.

    Raises:
        ConfigurationError: it is not one of those allowed; the message names the setting.
    """
    if str(value) not in set(allowed):
        raise ConfigurationError(f"{name}={value!r} is not one of {', '.join(allowed)}.")
    return str(value)


def offload_1(offloads: bool) -> Any:
    """Torch's settings of offloading for version 1."""
    from torch.distributed.fsdp import CPUOffload

    return CPUOffload(offload_params=offloads)


def offload_2(offloads: bool) -> Any:
    """Torch's settings of offloading for version 2."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    # Pinned memory belongs to an accelerator; without one there is none to be had.
    return CPUOffloadPolicy(pin_memory=devices.detect().name != "cpu") if offloads else OffloadPolicy()


def precision_class(version: int) -> Any:
    """Torch's settings of mixed precision."""
    from torch.distributed import fsdp

    return fsdp.MixedPrecision if version == 1 else fsdp.MixedPrecisionPolicy
