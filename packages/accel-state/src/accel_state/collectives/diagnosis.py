"""What to say when a collective does not complete.

A hang is hard to understand because each rank sees only itself. When a collective fails on a rank, the rank writes
where it waits into the store that all ranks share, and reads where the others wait. Nothing is written on the way of a
collective that works.
"""

from __future__ import annotations

import json
import sys
import time
from types import FrameType

import torch.distributed as dist

from ..errors import CollectiveTimeoutError

# When one rank gives up, its peers' connections break and they fail within milliseconds; this is how long to wait for
# the word of the slowest of them.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05


def caller_location() -> str:
    """``file:line in function`` of the innermost frame outside accel and torch."""
    frame: FrameType | None = sys._getframe(1)
    outermost = frame
    while frame is not None:
        if not _is_internal(frame):
            return _describe(frame)
        outermost, frame = frame, frame.f_back
    return _describe(outermost) if outermost is not None else "an unknown place"


def _is_internal(frame: FrameType) -> bool:
    # By the module's name, not its path: a user's project may well lie in a folder named accel.
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("accel", "torch", "contextlib", "functools") or package.startswith("accel_")


def _describe(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def explain(operation: str, rank: int, world_size: int, error: RuntimeError) -> CollectiveTimeoutError:
    """Build the error of a collective that did not complete, naming the ranks that arrived and where they wait."""
    location = caller_location()
    arrived = _exchange(operation, location, rank, world_size)
    arrived[rank] = f"{operation} at {location}"
    missing = [r for r in range(world_size) if r not in arrived]
    lines = [f"{operation} did not complete on rank {rank} of {world_size}: {error}"]
    lines += [f"  rank {r} waits in {arrived[r]}" for r in sorted(arrived)]
    lines += [f"  rank {r} did not arrive (still busy elsewhere, or ended)" for r in missing]
    lines.append(_advice(arrived, missing))
    return CollectiveTimeoutError("\n".join(lines))


def _advice(arrived: dict[int, str], missing: list[int]) -> str:
    if missing:
        ranks = ", ".join(str(r) for r in missing)
        return (
            f"Look for what keeps rank {ranks} from this line: an exception, an `if` that only some ranks enter, or "
            "longer work "
            "than the timeout (InitProcessGroupKwargs(timeout=...))."
        )
    if len(set(arrived.values())) > 1:
        return "The ranks wait at different lines: every rank must call the same collectives in the same order."
    return (
        "All ranks wait at the same line: check the network, and that shapes agree (run with --debug or "
        "ACCELERATE_DEBUG_MODE=1)."
    )


def _exchange(operation: str, location: str, rank: int, world_size: int) -> dict[int, str]:
    """Write this rank's place into the shared store and read the others'. Empty when the store is gone with its host."""
    found: dict[int, str] = {}
    try:
        store = dist.PrefixStore("accel/stuck", dist.distributed_c10d._get_default_store())
        store.set(str(rank), json.dumps(f"{operation} at {location}"))
        # Counted in looks: a machine that stood still for a while has not given the others that time.
        left = _GRACE_SECONDS
        while left > 0 and len(found) < world_size:
            for other in range(world_size):
                if other not in found and store.check([str(other)]):
                    found[other] = json.loads(store.get(str(other)))
            left -= _POLL_SECONDS
            time.sleep(_POLL_SECONDS)
    except (RuntimeError, ValueError) as error:
        # The host of the store is a rank too, and may have ended first. What was read so far is still worth reporting.
        found.setdefault(rank, f"{operation} at {location} (the other ranks cannot be asked: {error})")
    return found
