"""Explains why a collective did not complete.

When a collective fails on a rank, the rank publishes its source line through the store that all ranks share, and
collects the lines of the others. A collective that succeeds writes nothing.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from types import FrameType
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from .._torch_compat import default_store
from ..errors import CollectiveTimeoutError

T = TypeVar("T")

logger: Final = logging.getLogger(__name__)

# When one rank gives up, the connections of its peers break and they fail within milliseconds.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
# What backends say when another rank did not answer. torch gives some of these errors a type of their own.
_LOST = re.compile(
    r"gloo|time[d-]? ?out|connection|peer|socket|network|broken pipe|abort|remote|unreachable|closed",
    re.IGNORECASE,
)


def caller_location() -> str:
    """``file:line in function`` of the innermost frame outside accel and torch."""
    frame: FrameType | None = sys._getframe(1)
    outermost = frame
    while frame is not None:
        if not is_internal(frame):
            return describe_frame(frame)
        outermost, frame = frame, frame.f_back
    return describe_frame(outermost) if outermost is not None else "an unknown location"


def is_internal(frame: FrameType) -> bool:
    """Return True if a frame is of accel or torch, or of what they wrap functions with."""
    # By module name, not path: a user's project may be in a directory named accel.
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("accel", "torch", "contextlib", "functools") or package.startswith("accel_")


def describe_frame(frame: FrameType) -> str:
    """Return ``file:line in function``."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def is_lost(error: RuntimeError) -> bool:
    """Return True if a collective's error is about other ranks: no answer, or a broken connection."""
    typed = tuple(getattr(dist, name) for name in ("DistError", "DistBackendError") if hasattr(dist, name))
    return isinstance(error, typed) or (
        not isinstance(error, torch.OutOfMemoryError) and _LOST.search(str(error)) is not None
    )


def explain(operation: str, rank: int, world_size: int, error: RuntimeError) -> CollectiveTimeoutError:
    """Build the error of a collective that did not complete, with the ranks that arrived and where they wait."""
    here = f"{operation} at {caller_location()}"
    arrived = exchange(here, rank, world_size, "stuck")
    missing = [r for r in range(world_size) if r not in arrived]
    lines = [f"{operation} did not complete on rank {rank} of {world_size}: {error}"]
    lines += [f"  rank {r} waits in {arrived[r]}" for r in sorted(arrived)]
    lines += [f"  rank {r} did not arrive (busy elsewhere, or exited)" for r in missing]
    lines.append(_advice(arrived, missing))
    return CollectiveTimeoutError("\n".join(lines))


def _advice(arrived: dict[int, str], missing: list[int]) -> str:
    if missing:
        ranks = ", ".join(str(r) for r in missing)
        return (
            f"Find out why rank {ranks} did not reach this line: an exception, a loop that it left early, a branch "
            "that only some ranks take, or work that takes longer than the timeout "
            "(InitProcessGroupKwargs(timeout=...))."
        )
    if len(set(arrived.values())) > 1:
        return "The ranks wait at different lines: every rank must call the same collectives in the same order."
    return (
        "All ranks wait at the same line: check the network, and that shapes agree (run with --debug or "
        "ACCELERATE_DEBUG_MODE=1)."
    )


def exchange(own: T, rank: int, world_size: int, topic: str) -> dict[int, T]:
    """Publish what this rank says about a topic through the shared store, and collect the same from all others.

    It waits 5 s at most for ranks that have not said anything. Each rank can say one thing about a topic.
    """
    said = {rank: own}
    try:
        store = dist.PrefixStore(f"accel/{topic}", default_store())
        store.set(str(rank), json.dumps(own))
        # Counted in polls, not by the clock: a machine that was suspended has not given the other ranks that time.
        for _ in range(round(_GRACE_SECONDS / _POLL_SECONDS)):
            for other in range(world_size):
                if other not in said and store.check([str(other)]):
                    said[other] = json.loads(store.get(str(other)))
            time.sleep(_POLL_SECONDS)
            if len(said) == world_size:
                break
    except (RuntimeError, ValueError) as error:
        # The rank that hosts the store may have exited first. Report what was collected until then.
        logger.warning("the store of the process group is unreachable: %s", error)
    return said
