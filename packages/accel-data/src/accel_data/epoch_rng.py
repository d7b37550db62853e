"""The generators that the order of an epoch is drawn from: equal on every rank, and restorable after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_state.state import PartialState

from .rng_state import capture_rng, from_plain, preserve_rng, restore_rng, to_plain
from .samplers import SeedableRandomSampler, inner_sampler, is_plain_batch_sampler

# Samplers of torch that draw from the process's global generator unless they have their own.
_TORCH_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def broadcast_generator(generator: torch.Generator) -> None:
    """Copy the state of rank 0's generator to every rank."""
    collectives = PartialState().collectives
    if collectives.world_size > 1:
        generator.set_state(collectives.broadcast(generator.get_state()))


class EpochGenerator(torch.Generator):
    """The generator of one epoch's order, for a sampler of torch that has none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _generator_with_state, (self.get_state(),)


def _generator_with_state(state: torch.Tensor) -> EpochGenerator:
    generator = EpochGenerator()
    generator.set_state(state)
    return generator


class SamplerRng:
    """The randomness from which a sampler draws the order of each epoch.

    A sampler draws from the ``generator`` attribute of itself or of a sampler that it wraps. A RandomSampler without a
    generator gets a new one in each epoch, seeded with the number that the sampler itself would have drawn, so that in
    one process every epoch has the order of plain PyTorch; with several processes the other random samplers of torch
    do too. Any other sampler may draw from the global generators, whose state is then saved to restore an epoch's
    order.
    """

    def __init__(self, sampler: Any, synchronize: bool = True) -> None:
        self.synchronize = synchronize
        self.communicates = True  # ranks copy some generator when an epoch begins, so they are in the same place
        self.owner: Any = _find_generator_owner(sampler)
        inner = sampler.sampler if is_plain_batch_sampler(sampler) else sampler
        # Whether the order depends only on the sampler's settings and its epoch.
        self.is_deterministic: bool = type(inner) is SequentialSampler or isinstance(
            inner, DistributedSampler | SeedableRandomSampler
        )
        self._is_direct = self.owner is inner

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that the order is drawn from, or None."""
        return None if self.owner is None else self.owner.generator

    @property
    def may_differ(self) -> bool:
        """True if the order may differ between ranks.

        It may be drawn from generators that are not copied, also by a subclass of a sampler that has one, or from
        indices or weights that differ.
        """
        copied = self.synchronize and self._draws_from_generator_only
        return not self.is_deterministic and not copied

    @property
    def _draws_from_generator_only(self) -> bool:
        return type(self.owner) is RandomSampler and self._is_direct

    @property
    def lasting_generator(self) -> torch.Generator | None:
        """The generator that the orders of all epochs are drawn from; None if each epoch has its own."""
        return None if isinstance(self.generator, EpochGenerator) else self.generator

    def capture(self) -> dict[str, Any]:
        """Return the state from which an epoch that begins now draws its order: tensors, numbers and tuples only."""
        if self.generator is not None:
            return {"generator": self.generator.get_state()}
        if self.is_deterministic:
            return {}
        return {"global": to_plain(capture_rng())}

    @contextmanager
    def draw_order(self, origin: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Draw an epoch's order in this block, which gets its origin; an earlier ``origin`` repeats that order."""
        if not origin:
            self._prepare_generator()
            yield self.capture()
            return
        with preserve_rng() if "global" in origin else nullcontext():
            self.restore(origin)
            yield origin

    def restore(self, origin: dict[str, Any]) -> None:
        """Set the generators to the state that :meth:`capture` returned."""
        if "generator" in origin and self.owner is not None:
            if self.owner.generator is None:
                self.owner.generator = EpochGenerator()
            self.owner.generator.set_state(origin["generator"])
        elif "global" in origin:
            restore_rng(from_plain(origin["global"]))

    def _prepare_generator(self) -> None:
        if self.owner is None:
            return
        if self.lasting_generator is None:
            self.owner.generator = None
            if not isinstance(self.owner, RandomSampler) and PartialState().collectives.world_size == 1:
                # It draws from the global generator, as in plain PyTorch.
                return
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            self.owner.generator = EpochGenerator()
            self.owner.generator.manual_seed(seed)
        if self.synchronize:
            broadcast_generator(self.owner.generator)


def _find_generator_owner(sampler: Any) -> Any:
    """Return the object in a chain of samplers whose ``generator`` the order is drawn from, or None."""
    while sampler is not None and not isinstance(sampler, SeedableRandomSampler):
        generator = getattr(sampler, "generator", None)
        if isinstance(sampler, _TORCH_RANDOM_SAMPLERS) or isinstance(generator, torch.Generator):
            return sampler
        sampler = inner_sampler(sampler)
    return None
