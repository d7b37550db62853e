"""Where the order of an epoch comes from, so that it is the same on every rank and can be had again after a restart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_state.state import PartialState

from .samplers import SeedableRandomSampler, is_plain_batch_sampler

# Samplers of torch that draw from the process's own generator unless they are given one.
_TORCH_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class GlobalRandomState:
    """The state of the process's own generators: torch (CPU), numpy and python."""

    __slots__ = ("numpy", "python", "torch")

    def __init__(self, torch_state: torch.Tensor, numpy_state: Any = None, python_state: Any = None) -> None:
        self.torch = torch_state
        self.numpy = numpy_state
        self.python = python_state

    @classmethod
    def capture(cls, *, torch_only: bool = False) -> GlobalRandomState:
        """Copy the current state; ``torch_only`` leaves out numpy and python, whose copies cost 40 microseconds."""
        if torch_only:
            return cls(torch.get_rng_state())
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())

    def restore(self) -> None:
        """Put the generators back to this state."""
        torch.set_rng_state(self.torch)
        if self.numpy is not None:
            np.random.set_state(self.numpy)
        if self.python is not None:
            random.setstate(self.python)

    def same_beyond_torch(self, other: GlobalRandomState) -> bool:
        """Whether numpy's and python's generators stand where they stand in ``other``."""
        same_keys = np.array_equal(self.numpy[1], other.numpy[1])
        return same_keys and self.numpy[2:] == other.numpy[2:] and self.python == other.python

    def to_plain(self) -> dict[str, Any]:
        """Tensors, numbers and tuples only, so that it can be saved and loaded without running code."""
        plain: dict[str, Any] = {"torch": self.torch}
        if self.numpy is not None:
            plain["numpy"] = _numpy_to_plain(self.numpy)
        if self.python is not None:
            plain["python"] = self.python
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> GlobalRandomState:
        """The inverse of :meth:`to_plain`."""
        numpy_state = plain.get("numpy")
        if numpy_state is not None:
            name, keys, *rest = numpy_state
            numpy_state = (name, np.asarray(keys, dtype=np.uint32), *rest)
        python_state = plain.get("python")
        if python_state is not None:
            version, words, gauss = python_state
            python_state = (version, tuple(words), gauss)
        return cls(plain["torch"], numpy_state, python_state)


def _numpy_to_plain(state: Any) -> Any:
    if state is None:
        return None
    name, keys, *rest = state
    return (name, keys.tolist(), *rest)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leave torch's (CPU), numpy's and python's generators after the block as they were before it."""
    before = GlobalRandomState.capture()
    try:
        yield
    finally:
        before.restore()


def broadcast_generator(generator: torch.Generator) -> None:
    """Give every rank's generator the state of rank 0's; nothing to do in a world of one."""
    collectives = PartialState().collectives
    if collectives.world_size > 1:
        generator.set_state(collectives.broadcast(generator.get_state()))


class EpochOrder:
    """The randomness behind one sampler, at the start of each epoch.

    A sampler draws its order from a ``generator`` attribute: its own, or that of a sampler inside of it. A random
    sampler of torch that has none is given one in the first epoch, seeded with what the sampler itself would have
    drawn, so that in one process the first epoch has the order that plain PyTorch gives it. A sampler of another kind
    may draw from the process's own generators; then these are what an epoch's order can be had again from.

    Args:
        sampler: sampler or batch sampler.
        synchronize: give every rank the generator state of rank 0 at the start of each epoch.
    """

    def __init__(self, sampler: Any, synchronize: bool = True) -> None:
        self.synchronize = synchronize
        self.owner = _find_generator_owner(sampler)
        self.is_deterministic = _is_deterministic(sampler)

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that the order is drawn from, if there is one."""
        return None if self.owner is None else self.owner.generator

    def capture(self) -> dict[str, Any]:
        """What the order of an epoch that began now could be had again from: tensors, numbers and tuples only."""
        if self.generator is not None:
            return {"generator": self.generator.get_state()}
        if self.owner is not None or self.is_deterministic:
            return {}
        return {"global": GlobalRandomState.capture().to_plain()}

    @contextmanager
    def beginning(self, origin: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Draw an epoch's order inside this block.

        Args:
            origin: what an earlier :meth:`capture` returned, to have that epoch's order again.

        Yields:
            The origin of the order that is drawn.
        """
        if not origin:
            self._share()
            yield self.capture()
            return
        with preserved_random_state() if "global" in origin else nullcontext():
            self.restore(origin)
            yield origin

    def restore(self, origin: dict[str, Any]) -> None:
        """Put the generators back to where :meth:`capture` found them."""
        if "generator" in origin and self.owner is not None:
            if self.owner.generator is None:
                self.owner.generator = torch.Generator()
            self.owner.generator.set_state(origin["generator"])
        elif "global" in origin:
            GlobalRandomState.from_plain(origin["global"]).restore()

    def _share(self) -> None:
        if self.owner is None:
            return
        if self.owner.generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            self.owner.generator = torch.Generator().manual_seed(seed)
        if self.synchronize:
            broadcast_generator(self.owner.generator)


def _find_generator_owner(sampler: Any) -> Any:
    """The object in a chain of samplers whose ``generator`` attribute the order is drawn from, or None."""
    while sampler is not None and not isinstance(sampler, SeedableRandomSampler):
        if isinstance(sampler, _TORCH_RANDOM_SAMPLERS) or isinstance(
            getattr(sampler, "generator", None), torch.Generator
        ):
            return sampler
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return None


def _is_deterministic(sampler: Any) -> bool:
    """Whether the order depends on nothing but the sampler's own settings and its epoch."""
    if is_plain_batch_sampler(sampler):
        sampler = sampler.sampler
    return type(sampler) is SequentialSampler or isinstance(sampler, DistributedSampler | SeedableRandomSampler)
