"""Ranks of a run on Ray, given where its actors are and which devices Ray has given them. Torch-free."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from accel_state.errors import ConfigurationError

from .ray_rank import Place


def rank_order(places: Sequence[Place]) -> list[int]:
    """Return the actors in the order of their ranks: node by node, in the order of their devices."""
    counts = Counter(place.node for place in places)

    def order(index: int) -> tuple[Any, ...]:
        place = places[index]
        devices = [(len(ids), ids) for _, ids in sorted(place.devices.items())]  # device 10 comes after 9
        return -counts[place.node], place.address, place.node, devices, index

    return sorted(range(len(places)), key=order)


def rank_variables(places: Sequence[Place]) -> Iterator[dict[str, str]]:
    """Yield the variables of torchrun for each rank, and the devices of its node, given where the ranks are."""
    by_node = [list(places) for _, places in itertools.groupby(places, key=lambda place: place.node)]
    ranks, size = itertools.count(), str(len(places))
    for node, here in enumerate(by_node):
        # Each process sees all devices of the run on its node, of which it takes the one of its local rank.
        devices = _devices(here)
        for local in range(len(here)):
            rank = str(next(ranks))
            yield {
                **devices,
                **{"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": str(local), "GROUP_RANK": str(node)},
                **{"WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "GROUP_WORLD_SIZE": str(len(by_node))},
                "LOCAL_WORLD_SIZE": str(len(here)),
            }


def _devices(here: Sequence[Place]) -> dict[str, str]:
    """Return the variables with the devices of all ranks of a node, in their order."""
    found = {}
    for name in here[0].devices:
        ids = [place.devices.get(name, "") for place in here]
        # The same for several: not from Ray, which gives a device to one actor, but from what started Ray.
        if len(set(ids)) == len(ids):
            found[name] = ",".join(ids)
    return found


def check_versions(places: Sequence[Place]) -> None:
    """Check that all nodes have the same versions: with others they may compute something else, or hang.

    Raises:
        ConfigurationError: a node has others.
    """
    first = places[0]
    for place in places:
        names = [name for name, version in first.versions.items() if place.versions.get(name) != version]
        if names:
            found = ", ".join(f"{name} {place.versions.get(name) or 'none'}" for name in names)
            expected = ", ".join(f"{name} {first.versions[name] or 'none'}" for name in names)
            raise ConfigurationError(
                f"the nodes of the Ray cluster have other packages: {found} on {place.host}, {expected} on "
                f"{first.host}. Install the same on all, or bring them with --ray_runtime_env."
            )
