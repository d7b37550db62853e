"""A sum over logical shards whose order of additions depends on their number only."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any

# (level, class, first, length): at level 0 a run of shards of a class, above it a node of the tree.
Key = tuple[int, int, int, int]

# The largest number of classes. A process that computes all shards holds at most this many vectors at a time.
_CLASSES = 8


class TreeSum:
    """Adds one vector per logical shard, in any order of arrival and with the same roundings.

    Of ``count`` shards, shard s belongs to class ``s % c`` with ``c = gcd(count, 8)``. The vectors of a class are added
    one after another, in the order of shards; the sums of the classes are added in a tree: class k and k + c/2, then
    the results k and k + c/4, and so on. Ranks that compute every W-th shard can add up their own part of the tree.
    """

    def __init__(self, count: int) -> None:
        self.classes: int = gcd(count, _CLASSES)
        self.length: int = count // self.classes  # shards of a class
        self._runs: dict[int, tuple[int, Any]] = {}  # by class: number and sum of its shards, from the first on
        self._loose: dict[tuple[int, int], Any] = {}  # shards whose predecessor is missing
        self._nodes: dict[tuple[int, int], Any] = {}  # sums of whole classes, by level and class

    def add(self, shard: int, vector: Any) -> None:
        """Add the vector of a shard, which may be changed in place."""
        self._add_run(shard % self.classes, shard // self.classes, 1, vector)

    def items(self) -> list[tuple[Key, Any]]:
        """Return the partial sums held, for :meth:`insert` in another tree."""
        runs = [((0, kind, 0, length), total) for kind, (length, total) in self._runs.items()]
        loose = [((0, kind, first, 1), vector) for (kind, first), vector in self._loose.items()]
        nodes = [((level + 1, kind, 0, 0), total) for (level, kind), total in self._nodes.items()]
        return sorted([*runs, *loose, *nodes], key=lambda item: item[0])

    def insert(self, key: Key, vector: Any) -> None:
        """Add a partial sum of another tree."""
        level, kind, first, length = key
        if level == 0:
            self._add_run(kind, first, length, vector)
        else:
            self._lift(level - 1, kind, vector)

    def total(self) -> Any:
        """Return the sum of all shards, when they were added."""
        ((_, total),) = self._nodes.items()
        return total

    def _add_run(self, kind: int, first: int, length: int, vector: Any) -> None:
        done, total = self._runs.get(kind, (0, None))
        if first != done:
            self._loose[kind, first] = vector
            return
        total = vector if total is None else total.add_(vector)
        done += length
        while (kind, done) in self._loose:
            total.add_(self._loose.pop((kind, done)))
            done += 1
        if done < self.length:
            self._runs[kind] = done, total
            return
        self._runs.pop(kind, None)
        self._lift(0, kind, total)

    def _lift(self, level: int, kind: int, total: Any) -> None:
        """Add the sum of a node to that of its sibling, if that is known, and so on upwards."""
        half = (self.classes >> level) // 2
        while half:
            sibling = kind + half if kind < half else kind - half
            if (level, sibling) not in self._nodes:
                break
            total = total.add_(self._nodes.pop((level, sibling)))
            kind, level, half = min(kind, sibling), level + 1, half // 2
        self._nodes[level, kind] = total


class _Symbol:
    """Stands for a vector where only the keys are of interest."""

    def add_(self, other: _Symbol) -> _Symbol:
        return self


@lru_cache(maxsize=1024)
def keys_of_rank(count: int, num_processes: int, rank: int) -> tuple[Key, ...]:
    """Return the keys of a rank's partial sums after adding its shards: every ``num_processes``-th one."""
    tree = TreeSum(count)
    for shard in range(rank, count, num_processes):
        tree.add(shard, _Symbol())
    return tuple(key for key, _ in tree.items())
