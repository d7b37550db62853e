"""Seeds every random number generator, and synchronizes generators across processes."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable

import torch

from . import devices
from .enums import RNGType
from .errors import ArgumentTypeError, ConfigurationError, require
from .imports import numpy_if_installed
from .options.core import CoreOptions
from .state import PartialState, is_initialized

_MAX_SEED = 2**32 - 1  # numpy's limit


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of python, torch (on the CPU and the device of this process) and, if installed, numpy.

    By default every process draws the same numbers, so that all create the same weights. Dropout and augmentation, such
    as noise that a data set adds to its samples, then repeat on each process, too. Pass ``device_specific=True`` for
    different numbers, after the model was created or before a ``prepare`` that copies the weights of rank 0.

    Args:
        seed: 0 to 2**32 - 1.
        device_specific: add the rank, so that processes draw different numbers; False gives each the same.
        deterministic: use only deterministic kernels in torch, which raises if an operation has none.

    Raises:
        ConfigurationError: the seed, or the seed plus the rank, is out of range.

    Examples:
        >>> set_seed(0)
        >>> torch.rand(1)
        tensor([0.4963])
    """
    if not hasattr(seed, "__index__"):
        raise ArgumentTypeError(f"seed={seed!r} is a {type(seed).__name__}. Pass an integer: set_seed(42).")
    seed = operator.index(seed)  # Python's generator takes no integers of numpy
    rank = PartialState().process_index if device_specific else 0
    if not 0 <= seed + rank <= _MAX_SEED or seed < 0:
        with_rank = f" plus the rank {rank}" if rank else ""
        raise ConfigurationError(
            f"seed={seed}{with_rank} is not between 0 and 2**32 - 1 = {_MAX_SEED}, the range that numpy accepts"
        )
    seed += rank
    random.seed(seed)
    if (numpy := numpy_if_installed()) is not None:
        numpy.random.seed(seed)
    torch.manual_seed(seed)  # the CPU and the device types that torch knows
    # Those of vendor plug-ins. A run on the CPU leaves accelerators alone, so that they stay free for others.
    device = PartialState().device_backend if is_initialized() else devices.detect(cpu=CoreOptions.read("cpu"))
    device.manual_seed_all(seed)
    if deterministic:
        device.set_deterministic()


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Copy the state of a generator from rank 0 to all processes. Every rank must call it.

    Args:
        rng_type: "torch" (the CPU's generator), a device ("cuda", "xla", ...), "numpy", "python", or "generator" for
            the one passed as ``generator``. None means "generator".
        generator: for "generator".

    Raises:
        ConfigurationError: the type is unknown, its device is not available, or ``generator`` is missing.
    """
    kind = rng_kind(rng_type) if rng_type is not None else RNGType.GENERATOR
    collectives = PartialState().collectives
    if kind is RNGType.GENERATOR:
        if generator is None:
            raise ConfigurationError(
                "rng_type 'generator' needs the generator: synchronize_rng_state('generator', generator=...)"
            )
        generator.set_state(collectives.broadcast(generator.get_state().clone()))
    elif kind is RNGType.TORCH:
        torch.set_rng_state(collectives.broadcast(torch.get_rng_state().clone()))
    elif kind is RNGType.NUMPY:
        generators = require("numpy", purpose="synchronize_rng_state('numpy')", install="numpy").random
        generators.set_state(collectives.broadcast_object(generators.get_state()))
    elif kind is RNGType.PYTHON:
        random.setstate(collectives.broadcast_object(random.getstate()))
    else:
        device = devices.get(str(kind))
        if not device.is_available():
            raise ConfigurationError(
                f"the generator {str(kind)!r} cannot be synchronized: this machine has no {kind} device. "
                f"It has: {', '.join(other.name for other in devices.available())}."
            )
        device.set_rng_state(collectives.broadcast(device.get_rng_state().clone()))


def rng_kind(value: RNGType | str) -> RNGType | str:
    """Return a kind of generator: an :class:`RNGType`, or the name of a device that another package adds.

    Raises:
        ConfigurationError: there is none of this name.
    """
    name = str(value)
    if name not in RNGType.list() and name in devices.DEVICES:
        return name
    return RNGType(name)


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Call :func:`synchronize_rng_state` for each type. Every rank must pass the same types in the same order."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)
