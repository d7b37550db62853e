"""Letting every rank know when something failed on one of them, instead of waiting for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from accel_state.collectives.single import Collectives
from accel_state.errors import AccelError, ConfigurationError

from .names import CheckpointError

_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.1
# How long to wait for a rank that writes slower than the others, or is gone; and, at the end, for ranks to read the
# verdict.
PATIENCE_SECONDS = 1800.0
_FAREWELL_SECONDS = 60.0


class Agreement(Protocol):
    """A way for all ranks to learn how something went on each of them."""

    def outcomes(self, own: str | None) -> Sequence[str | None]:
        """The outcomes of all ranks by rank: None where it went well. Every rank must ask, in the same order."""


class CollectiveAgreement:
    """Over the collectives of the training loop: for its own thread."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def outcomes(self, own: str | None) -> Sequence[str | None]:
        return self._collectives.all_gather_object(own)


class StoreAgreement:
    """Over the key-value store through which the ranks have found each other: for a thread beside the training loop.

    The loop's collectives are no way for it: a process group matches calls by their order alone, so a call from another
    thread would be taken for one of the loop's. A process group of its own would do, at the price of connections and
    threads for all ranks; a common file would not, because nodes may share no file system, or see each other's files
    late. The store is there for as long as the run, needs no order, and takes a few small messages a save. It is asked
    in short calls only, never to wait: a call that waits would keep the loop's thread from the store.

    Args:
        store: the store.
        rank: this process.
        world_size: how many there are.
        patience: seconds to wait for the others.
    """

    def __init__(self, store: Any, rank: int, world_size: int, patience: float = PATIENCE_SECONDS) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._patience = patience
        self._round = 0

    def outcomes(self, own: str | None) -> Sequence[str | None]:
        self._round += 1
        try:
            self._store.set(self._key(self._rank), json.dumps(own))
            if self._rank == 0:
                keys = self._keys()
                self._wait(keys)
                self._store.set(self._key("all"), json.dumps([json.loads(self._store.get(key)) for key in keys]))
            self._wait([self._key("all")])
            outcomes: list[str | None] = json.loads(self._store.get(self._key("all")))
        except RuntimeError as error:
            if isinstance(error, AccelError):
                raise
            raise CheckpointError(f"rank {self._rank} cannot ask the others how the save went: {error}") from error
        return outcomes

    def leave(self) -> None:
        """End the agreement: rank 0, whose process may be the store's, stays until all have read its last word, and
        clears up.
        """
        # There is nobody left to tell if a rank, or the store, is gone.
        with suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "")
            if self._rank == 0:
                left = [f"left/{rank}" for rank in range(self._world_size)]
                self._wait(left, _FAREWELL_SECONDS)
                for key in [
                    *left,
                    *(key for _ in self._rounds_backwards() for key in (*self._keys(), self._key("all"))),
                ]:
                    self._store.delete_key(key)

    def _rounds_backwards(self) -> Iterator[int]:
        while self._round:
            yield self._round
            self._round -= 1

    def _keys(self) -> list[str]:
        return [self._key(rank) for rank in range(self._world_size)]

    def _key(self, name: int | str) -> str:
        return f"{self._round}/{name}"

    def _wait(self, keys: list[str], patience: float | None = None) -> None:
        pause, deadline = _FIRST_PAUSE_SECONDS, time.monotonic() + (self._patience if patience is None else patience)
        while True:
            # Read before the store is: this process may have stood still, and the others answered meanwhile.
            is_late = time.monotonic() > deadline
            if self._store.check(keys):
                return
            if is_late and (missing := [key for key in keys if not self._store.check([key])]):
                raise CheckpointError(
                    f"no word from {', '.join(missing)} (round/rank) of the save after {self._patience:g} s."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class Alone:
    """One process has nobody to ask."""

    def outcomes(self, own: str | None) -> Sequence[str | None]:
        return [own]

    def leave(self) -> None:
        """Nobody waits."""


def background_agreement(collectives: Collectives, token: str) -> StoreAgreement | Alone:
    """What a thread beside the training loop agrees over.

    Args:
        collectives: of all ranks.
        token: the same on all ranks, and another one for each save.

    Raises:
        ConfigurationError: the processes have no store in common.
    """
    if collectives.world_size == 1:
        return Alone()
    import torch.distributed as dist

    from .._torch_compat import default_store

    if not dist.is_available() or not dist.is_initialized():
        raise ConfigurationError(
            "blocking=False needs torch.distributed with more than one process. Save with blocking=True."
        )
    store = dist.PrefixStore(f"accel/save/{token}", default_store())
    return StoreAgreement(store, collectives.rank, collectives.world_size)


def agree(agreement: Agreement, what: str, action: Callable[[], Any]) -> None:
    """Do something on this rank, and learn whether it went well on all of them.

    Args:
        agreement: of all ranks.
        what: for messages.
        action: what to do.

    Raises:
        CheckpointError: it failed on some rank; that rank's own error, if it is one of accel's.
    """
    error: Exception | None = None
    try:
        action()
    except Exception as raised:
        error = raised
    outcomes = agreement.outcomes(None if error is None else f"{type(error).__name__}: {error}")
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
    if isinstance(error, AccelError):
        raise error
    if failed:
        report = "; ".join(f"rank {rank}: {outcome}" for rank, outcome in failed.items())
        raise CheckpointError(f"{what} failed on {len(failed)} of {len(outcomes)} ranks. {report}") from error


def on_all_ranks(collectives: Collectives, what: str, action: Callable[[], Any]) -> None:
    """:func:`agree` over the collectives of the training loop."""
    agree(CollectiveAgreement(collectives), what, action)
