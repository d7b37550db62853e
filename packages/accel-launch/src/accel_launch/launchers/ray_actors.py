"""What a launcher on Ray starts, and what it knows of each rank. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from accel_state.preemption import Note

from ..elastic.report import RankFailure
from ..entrypoint import Entrypoint
from .ray_cluster import Request
from .ray_rank import Answer, End, Place, RankActor

GIVE_UP_SECONDS = 60.0
"""How long the actors of a node that has died may take to be declared dead by Ray, whose default is 15 s."""
_METHODS_AT_ONCE = 4
_LOST_CODE = 1


@dataclass(frozen=True)
class RayJob:
    """What a run on Ray starts.

    Attributes:
        entrypoint: what each rank runs.
        directory: where; None for the directory that Ray has brought to the nodes.
        request: the resources of the ranks.
        inherited: variables of this process that ranks on other machines need.
        variables: those of all ranks.
        max_restarts: how often all ranks may be started again.
        grace_seconds: how long ranks may take to end after a signal.
        wait_seconds: how long to wait for resources.
        silence_seconds: when an actor without a launcher ends its rank; 0: never.
        port: of rank 0; None for a free one.
        role: name of the ranks.
        line_prefix: template of the prefix of each line; None for the rank.
        quiet: whether notes are left out.
        screen: where the output of the ranks goes: stdout and stderr.
    """

    entrypoint: Entrypoint
    directory: str | None
    request: Request
    inherited: Mapping[str, str]
    variables: Mapping[str, str]
    max_restarts: int
    grace_seconds: float
    wait_seconds: float
    silence_seconds: float
    port: int | None
    role: str
    line_prefix: str | None
    quiet: bool
    screen: tuple[TextIO, TextIO]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.request.bundles) * self.request.ranks_per_bundle


@dataclass
class Rank:
    """One rank, and what is known of it."""

    actor: Any  # Ray's handle
    place: Place
    variables: Mapping[str, str] = field(default_factory=dict)  # those of its rank
    prefix: bytes = b""  # of each line of its output
    pid: int = 0  # of the rank, once it has been started
    note: Note | None = None
    end: End | None = None
    lost: str = ""  # why the actor is lost, if it is
    heard: float = field(default_factory=time.monotonic)

    @property
    def has_ended(self) -> bool:
        """True if nothing more comes from it."""
        return self.end is not None or bool(self.lost)

    def take(self, answer: Answer, screen: tuple[TextIO, TextIO]) -> None:
        """Note what its actor has answered, and show its output."""
        self.heard, self.note, self.end = time.monotonic(), answer.note or self.note, answer.end
        for number, line in answer.output:
            stream = screen[number - 1]
            end = b"" if line.endswith((b"\n", b"\r")) else b"\n"
            # torch begins the lines of a traceback with the rank.
            prefix = b"" if line.startswith(self.prefix) else self.prefix
            stream.write((prefix + line + end).decode(errors="replace"))
            stream.flush()

    def failure(self) -> RankFailure | None:
        """Return how it failed; None if it did not, or the launcher ended it."""
        host = self.place.host
        if self.lost:
            rank, local = int(self.variables["RANK"]), int(self.variables["LOCAL_RANK"])
            return RankFailure(rank, local, self.pid, _LOST_CODE, host=host, hint=self.lost)
        failure = None if self.end is None else self.end.failure
        return None if failure is None else replace(failure, host=host)


def make_actor(kind: type[RankActor], job: RayJob, group: Any, bundle: int) -> Any:
    """Ray's handle of a new actor for a rank, in a bundle of a placement group; it may have to wait for its place."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    each = job.request.each
    others = {name: amount for name, amount in each.items() if name not in ("CPU", "GPU")}
    options = {"num_cpus": each.get("CPU", 0), "num_gpus": each.get("GPU", 0), "resources": others}
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    made = ray.remote(kind).options(**options, scheduling_strategy=strategy, max_concurrency=_METHODS_AT_ONCE)
    return made.remote(job.silence_seconds)


def reason(error: BaseException) -> str:
    """Return what happened, without the traceback, the ids and the guesses of Ray's message."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, OSError):
        return f"{cause}."
    lines = [line.strip().partition(" Some common causes")[0] for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("The actor ")]
    return (named or lines or [type(error).__name__])[-1]
