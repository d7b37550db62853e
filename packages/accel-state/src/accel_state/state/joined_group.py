"""The ranks of a process group that exists already, by whatever its processes were started.

Lightning's launcher, ``mp.spawn``, Ray and MPI programs create a group without setting torchrun's variables, or with
only some of them. Rank and size then come from the group. The ranks of a node are those with the same host name, which
the processes exchange through the group's store.
"""

from __future__ import annotations

import json
import logging
import socket
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .._torch_compat import default_store
from ..environments.base import Environment, Variables
from ..environments.registry import detect
from ..errors import CollectiveTimeoutError, ConfigurationError

_logger = logging.getLogger(__name__)

_NOTICE_AFTER = timedelta(seconds=30)  # then a log message names the ranks that are missing
_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class GroupEnvironment(Environment):
    """The ranks of a process group, grouped into nodes by host name."""

    name = "process group"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        """None: a group is not described by variables."""
        return None


@dataclass(frozen=True)
class _Place:
    """What a rank tells the others of itself."""

    host: str
    """Names the machine or container."""
    local_rank: int | None
    """The local rank that variables give it."""


def environment_of_group() -> Environment:
    """Return where the processes of the default group are. Every rank must call it.

    The launcher's variables are used if they are complete and agree with the group. Otherwise the ranks exchange their
    host names. Ranks on a host are numbered in the order of their ranks, unless each of them has a LOCAL_RANK.

    Warns:
        RuntimeWarning: variables contradict the group, which is used.

    Raises:
        CollectiveTimeoutError: a rank that is needed did not call this.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if dist.get_backend() == "fake":
        return detect()  # a simulation: the other ranks do not exist
    variables = Variables()
    launched = _launched(variables, rank, world_size)
    own = _Place(_host(), _local_rank(variables, launched, rank))
    store = default_store()  # None with the backend mpi
    if store is not None:
        store = dist.PrefixStore("accel/place", store)
        # Also if this rank needs no answer: others may.
        store.set(str(rank), json.dumps([own.host, own.local_rank]))
    if launched is not None and local_rank_is_known(launched, variables):
        return launched
    environment = _locate(_exchange(own, store, world_size), rank, _address(variables))
    if own.local_rank not in (None, environment.local_rank):
        _report(
            f"the variables of the launcher give this process the local rank {own.local_rank}, but it is number "
            f"{environment.local_rank} of the ranks on its host, {own.host.split('/')[0]}"
        )
    return environment


def local_rank_is_known(environment: Environment, variables: Variables | None = None) -> bool:
    """Return True if the launcher's variables say where all processes are, instead of only their ranks."""
    variables = variables or Variables()
    # LOCAL_SIZE is that of DeepSpeed's launcher, whose nodes may be on one host.
    sized = "LOCAL_WORLD_SIZE" in variables or "LOCAL_SIZE" in variables
    return environment.name != "torchrun" or ("LOCAL_RANK" in variables and sized)


def _launched(variables: Variables, rank: int, world_size: int) -> Environment | None:
    """Return what the launcher's variables say, if it agrees with the group."""
    try:
        environment = detect()
    except ConfigurationError as error:
        # Lightning's launcher sets LOCAL_RANK alone, which contradicts nothing.
        if "RANK" in variables or "LOCAL_RANK" not in variables:
            _report(str(error).rstrip("."))
        return None
    if (environment.rank, environment.world_size) == (rank, world_size):
        return None if environment.name == "single" and world_size > 1 else environment
    # An outer launcher, such as srun, may have started the one process that started these.
    if environment.world_size > 1:
        _report(
            f"the variables of {environment.name} say rank {environment.rank} of {environment.world_size}, but the "
            f"process group says rank {rank} of {world_size}"
        )
    return None


def _report(contradiction: str) -> None:
    warnings.warn(
        f"{contradiction}. The process group is used, since it is what communicates. Unset the variables, or create "
        "the group from them.",
        RuntimeWarning,
        stacklevel=2,
    )


def _local_rank(variables: Variables, launched: Environment | None, rank: int) -> int | None:
    if launched is not None and local_rank_is_known(launched, variables):
        return launched.local_rank
    try:
        # Lightning's launcher sets it without RANK. With the RANK of another group it is of no use.
        other = variables.integer("RANK") not in (None, rank)
        local_rank = variables.integer("LOCAL_RANK", minimum=-1)
    except ConfigurationError:
        return None
    return None if other or local_rank == -1 else local_rank


def _host() -> str:
    """Return the host name, and the boot id: clones of a machine may have the same name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    try:
        boot = boot_id.read_text().strip()
    except OSError:  # not Linux
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def _exchange(own: _Place, store: Any, world_size: int) -> list[_Place]:
    if store is None:
        places: list[Any] = [None] * world_size
        dist.all_gather_object(places, own)
        return places
    keys = [str(rank) for rank in range(world_size)]
    _wait(store, keys)
    return [_Place(*json.loads(store.get(key))) for key in keys]


def _wait(store: Any, keys: list[str]) -> None:
    deadline = time.monotonic() + _TIMEOUT.total_seconds()
    try:
        store.wait(keys, _NOTICE_AFTER)
        return
    except RuntimeError:
        missing = _missing(store, keys)
        _logger.warning(
            "Waiting for rank %s to create its PartialState, which every rank must do in a process group without the "
            "launcher's LOCAL_RANK",
            missing,
        )
    try:
        store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 1.0)))
    except RuntimeError as error:
        raise CollectiveTimeoutError(
            f"rank {_missing(store, keys)} did not say on which host it is within {_TIMEOUT.total_seconds():.0f} s. "
            "Create PartialState() on every rank, or set LOCAL_RANK, LOCAL_WORLD_SIZE, RANK and WORLD_SIZE."
        ) from error


def _missing(store: Any, keys: list[str]) -> str:
    return ", ".join(key for key in keys if not store.check([key]))


def _address(variables: Variables) -> tuple[str | None, int | None]:
    try:
        return variables.text("MASTER_ADDR"), variables.integer("MASTER_PORT", minimum=1)
    except ConfigurationError:
        return None, None


def _locate(places: list[_Place], rank: int, address: tuple[str | None, int | None]) -> Environment:
    """Return the environment of a rank, given the place of each."""
    hosts = list(dict.fromkeys(place.host for place in places))
    host = places[rank].host
    here = [other for other, place in enumerate(places) if place.host == host]
    claimed = [places[other].local_rank for other in here]
    local_rank = here.index(rank)
    if None not in claimed and set(claimed) == set(range(len(here))):
        local_rank = int(claimed[local_rank] or 0)
    return GroupEnvironment(
        rank, len(places), local_rank, len(here), hosts.index(host), len(hosts), address[0], address[1]
    )
