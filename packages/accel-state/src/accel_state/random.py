"""Seeding every random number generator, and making the generators of all processes equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np
import torch

from . import devices
from .enums import RNGType
from .errors import ConfigurationError
from .state import PartialState

_MAX_SEED = 2**32 - 1  # numpy's limit; torch would take more


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of python, numpy and torch, on the CPU and on the device that this process computes on.

    Args:
        seed: 0 to 2**32 - 1.
        device_specific: add the rank, so that processes draw different numbers.
        deterministic: let torch run deterministic kernels only; it raises where an operation has none.

    Raises:
        ConfigurationError: the seed, or the seed plus the rank, is outside the range.
    """
    rank = PartialState().process_index if device_specific else 0
    if not 0 <= seed + rank <= _MAX_SEED or seed < 0:
        with_rank = f" plus the rank {rank}" if rank else ""
        raise ConfigurationError(
            f"seed={seed}{with_rank} is not between 0 and 2**32 - 1 = {_MAX_SEED}, the range that numpy takes"
        )
    seed += rank
    random.seed(seed)
    np.random.seed(seed)
    # Reaches the CPU and every device that torch itself knows; the next line those of plug-ins that it does not.
    torch.manual_seed(seed)
    device = devices.detect()
    device.manual_seed_all(seed)
    if deterministic:
        device.set_deterministic()


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Give all processes the state that one generator has on rank 0. Every rank must call it.

    Args:
        rng_type: which generator: "torch" (the CPU's), "cuda", "xla" and the other devices, "numpy", "python", or
            "generator", the one given as ``generator``. None means "generator".
        generator: for "generator".

    Raises:
        ConfigurationError: no such type, its device is not available here, or no generator was given for "generator".
    """
    kind = RNGType(rng_type) if rng_type is not None else RNGType.GENERATOR
    if kind is RNGType.GENERATOR:
        if generator is None:
            raise ConfigurationError(
                "rng_type 'generator' needs the generator: synchronize_rng_state('generator', generator=...)"
            )
        generator.set_state(_of_rank_zero(generator.get_state()))
    else:
        _SYNCHRONIZE.get(kind, lambda: _synchronize_device(kind))()


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Call :func:`synchronize_rng_state` for each type, in the order given. Every rank must call it, with the same
    types.

    Args:
        rng_types: see :func:`synchronize_rng_state`.
        generator: for the type "generator".

    Raises:
        ConfigurationError: see :func:`synchronize_rng_state`.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def _of_rank_zero(state: torch.Tensor) -> torch.Tensor:
    return PartialState().collectives.broadcast(state.clone())


def _synchronize_torch() -> None:
    torch.set_rng_state(_of_rank_zero(torch.get_rng_state()))


def _synchronize_numpy() -> None:
    np.random.set_state(PartialState().collectives.broadcast_object(np.random.get_state()))


def _synchronize_python() -> None:
    random.setstate(PartialState().collectives.broadcast_object(random.getstate()))


def _synchronize_device(kind: RNGType) -> None:
    device = devices.get(str(kind))
    if not device.is_available():
        raise ConfigurationError(
            f"the generator {kind.value!r} cannot be synchronised: this machine has no {kind.value} device. "
            f"It has: {', '.join(found.name for found in devices.available())}."
        )
    device.set_rng_state(_of_rank_zero(device.get_rng_state()))


_SYNCHRONIZE: dict[RNGType, Callable[[], None]] = {
    RNGType.TORCH: _synchronize_torch,
    RNGType.NUMPY: _synchronize_numpy,
    RNGType.PYTHON: _synchronize_python,
}
