"""A run on Ray: starts the ranks as actors, follows them, and starts all again when one fails. Torch-free."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.ports import LOOPBACK
from accel_state.preemption import Note

from ..elastic.output import line_prefix
from ..elastic.preemption import report_saved
from ..elastic.report import RankFailure, announce, first_failure, signal_name, with_hint
from ..network.board import say
from ..supervisor import FORWARDED, STUCK_SECONDS, Interrupted, SignalWatch
from .ray_actors import GIVE_UP_SECONDS, Rank, RayJob, make_actor, reason
from .ray_cluster import Cluster
from .ray_places import check_versions, rank_order, rank_variables
from .ray_rank import LOST_GRACE_SECONDS, Answer, Place, RankActor

LINE_PREFIX = "[rank${rank}]: "
_LOOK_SECONDS = 0.1


class Attempt:
    """One start of all ranks; what its launcher supervises.

    Args:
        job: what to start.
        cluster: where.
        watch: signals to the launcher.
        number: how often the ranks were started before.
    """

    def __init__(self, job: RayJob, cluster: Cluster, watch: SignalWatch, number: int) -> None:
        self._job, self._cluster, self._watch, self._number = job, cluster, watch, number
        self._group: Any = None
        self._actors: list[Any] = []
        self._signals: list[int] = []  # to be forwarded
        self.ranks: list[Rank] = []
        """By rank."""
        watch.supervised = self

    # -- what a signal needs to know ---------------------------------------------------------------------------------

    def pids(self) -> Sequence[int]:
        """None: the ranks are on other machines."""
        return ()

    def grace_seconds(self, number: int) -> float:
        """Return how long ranks that save on a signal may take."""
        notes = [rank.note for rank in self.ranks if rank.note is not None and number in rank.note.signals]
        return max([self._job.grace_seconds, *(note.grace_seconds for note in notes)])

    def shutdown_seconds(self) -> float:
        """Return how long the ranks may take, of which this machine sees nothing."""
        longest = max((rank.note.grace_seconds for rank in self.ranks if rank.note is not None), default=0.0)
        return max(self._job.grace_seconds, longest) + STUCK_SECONDS

    # -- start -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Reserve resources, start the actors, and the ranks in them.

        Raises:
            ConfigurationError: there are too few resources, or the actors or the ranks cannot be started.
            Interrupted: a signal asked the launcher to end.
        """
        job, request = self._job, self._job.request
        for number in FORWARDED:
            signal.signal(number, lambda received, _: self._signals.append(received))
        self._group = self._cluster.reserve(request, job.wait_seconds, self._watch)
        for bundle, _ in itertools.product(range(len(request.bundles)), range(request.ranks_per_bundle)):
            self._actors.append(make_actor(RankActor, job, self._group, bundle))
        places: list[Place] = self._ask([actor.place.remote() for actor in self._actors], "the actors")
        check_versions(places)
        self.ranks = [Rank(self._actors[index], places[index]) for index in rank_order(places)]
        alone = len({place.address for place in places}) == 1
        first = self.ranks[0]
        port = job.port or self._ask([first.actor.port.remote()], "rank 0")[0]
        endpoint = {"MASTER_ADDR": LOOPBACK if alone else first.place.address, "MASTER_PORT": str(port)}
        for rank, variables in zip(self.ranks, rank_variables([rank.place for rank in self.ranks]), strict=True):
            rank.variables = {**job.inherited, **job.variables, **self._common(), **variables, **endpoint}
            rank.prefix = line_prefix(job.line_prefix or LINE_PREFIX, rank.variables).encode()
        if not job.quiet:
            say(self._description())
        starts = [rank.actor.start.remote(job.entrypoint, job.directory, rank.variables, alone) for rank in self.ranks]
        for rank, pid in zip(self.ranks, self._ask(starts, "the processes"), strict=True):
            rank.pid, rank.heard = pid, time.monotonic()

    def _common(self) -> dict[str, str]:
        return {
            "ROLE_NAME": self._job.role,
            "TORCHELASTIC_RESTART_COUNT": str(self._number),
            "TORCHELASTIC_MAX_RESTARTS": str(self._job.max_restarts),
        }

    def _description(self) -> str:
        nodes = []
        for _, ranks in itertools.groupby(self.ranks, key=lambda rank: rank.place.node):
            numbers = [rank.variables["RANK"] for rank in ranks]
            several = len(numbers) > 1
            host = self.ranks[int(numbers[0])].place.host
            nodes.append(f"{host} (rank{'s' if several else ''} {numbers[0]}{f' to {numbers[-1]}' if several else ''})")
        return f"the Ray cluster {self._cluster.address} runs the ranks on {', '.join(nodes)}"

    def _ask(self, answers: list[Any], who: str) -> list[Any]:
        """Wait for answers of actors that are being started."""
        import ray
        from ray.exceptions import RayError

        waiting = answers
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_LOOK_SECONDS)
            self._watch.check()
        try:
            return list(ray.get(answers))
        except (RayError, OSError) as error:
            raise ConfigurationError(f"{who} cannot be started on Ray: {reason(error)}") from error

    # -- the run -----------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Show the output of the ranks until all have ended, or one has failed.

        Raises:
            Interrupted: a signal asked the launcher to end.
        """
        for _ in self._answers():
            self._watch.check()
            if any(rank.failure() is not None for rank in self.ranks):
                return

    def end(self, number: int = signal.SIGTERM) -> None:
        """End the ranks with a signal, and show the rest of their output."""
        seconds, running = self.grace_seconds(number), [rank for rank in self.ranks if rank.pid and not rank.has_ended]
        for rank in running:
            rank.actor.stop.remote(number, seconds)
        deadline = time.monotonic() + seconds + GIVE_UP_SECONDS
        for _ in self._answers():
            if time.monotonic() > deadline:
                break

    def close(self) -> None:
        """End the actors, and give the resources back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)

    def end_lost(self) -> None:
        """Make sure that no rank runs whose actor is lost, before another one takes its place.

        Raises:
            Interrupted: a signal asked the launcher to end.
        """
        # What is on a node that is lost is ended by its actor, which does not hear from here either.
        limit = (self._job.silence_seconds or GIVE_UP_SECONDS) + LOST_GRACE_SECONDS + 1
        lost = [rank for rank in self.ranks if rank.lost]
        questions = [self._cluster.end_process(rank.place.node, rank.pid) for rank in lost]
        for rank, question in zip(lost, questions, strict=True):
            while not self._cluster.is_done(question, _LOOK_SECONDS) and time.monotonic() < rank.heard + limit:
                self._watch.check()

    def failures(self) -> list[RankFailure]:
        """Return the ranks that have failed."""
        return [failure for rank in self.ranks if (failure := rank.failure()) is not None]

    def saved(self) -> Note | None:
        """Return the note of a rank if all have saved on a signal, else None."""
        saved = [rank.note for rank in self.ranks if rank.note is not None and rank.note.saved is not None]
        return saved[0] if saved and len(saved) == len(self.ranks) else None

    # -- the end -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Start the ranks, wait until they have ended, and report how; returns the exit code.

        Raises:
            ConfigurationError: they cannot be started.
            Interrupted: a signal asked the launcher to end.
        """
        self.start()
        self.follow()
        first = self.outcome()
        if first is None:
            return 0
        self.end()
        self._watch.check()
        first, saved = self.outcome() or first, self.saved()
        again, limit = self._number + 1, self._job.max_restarts
        text = f"tarting all processes again (restart {again} of {limit})"
        if saved is not None:
            report_saved(saved, *([f"S{text}"] if self._may_restart() else []))
            return saved.exit_code
        announce(first, self._job.world_size)
        if self._may_restart():
            say(f"s{text}")
        return first.exit_code

    def _may_restart(self) -> bool:
        return self._number < self._job.max_restarts and not self.saved_for_later()

    def saved_for_later(self) -> bool:
        """Return True if the ranks have saved because the launcher was asked to make them, not a single rank."""
        return bool(self._watch.forwarded) and self.saved() is not None

    def report_interrupted(self, number: int) -> int:
        """Report that a signal to the launcher has ended the ranks; returns the exit code."""
        note = self.saved()
        if note is not None:
            report_saved(note)
            return note.exit_code
        if not self._job.quiet:
            say(f"ended by {signal_name(number)}")
        return 128 + number

    def outcome(self) -> RankFailure | None:
        """Return the failure that came first, with what may have caused it; None if no rank failed."""
        failures = self.failures()
        if not failures:
            return None
        completed = [number for number, rank in enumerate(self.ranks) if rank.end is not None and rank.end.completed]
        first = first_failure(failures)
        return first if first.hint else with_hint(first, completed, self._job.world_size)

    def _answers(self) -> Iterator[None]:
        """Ask the ranks what has happened, over and over, until all have ended."""
        import ray

        asked = {rank.actor.read.remote(): rank for rank in self.ranks if rank.pid and not rank.has_ended}
        while asked:
            ready, _ = ray.wait(list(asked), num_returns=1, timeout=_LOOK_SECONDS)
            if ready:  # and those that are ready too
                ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
            for question in ready:
                rank = asked.pop(question)
                self._hear(rank, question)
                if not rank.has_ended:
                    asked[rank.actor.read.remote()] = rank
            self._forward()
            yield

    def _hear(self, rank: Rank, question: Any) -> None:
        import ray
        from ray.exceptions import RayError

        try:
            answer: Answer = ray.get(question)
        except RayError as error:
            rank.lost = f"Its actor on Ray was lost: {reason(error)}"
            return
        rank.take(answer, self._job.screen)

    def _forward(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._watch.forwarded = number
            for rank in self.ranks:
                if not rank.has_ended:
                    rank.actor.send.remote(number)


def run_on_ray(job: RayJob, cluster: Cluster, watch: SignalWatch) -> int:
    """Start the ranks, again if they fail and a restart is left, and return the exit code as a shell shows it.

    Raises:
        ConfigurationError: they cannot be started.
    """
    code = 0
    for number in range(job.max_restarts + 1):
        attempt = Attempt(job, cluster, watch, number)
        try:
            code = attempt.run()
            if code == 0 or attempt.saved_for_later():
                break
            if number < job.max_restarts:
                attempt.end_lost()
        except Interrupted as error:
            attempt.end(error.number)
            return attempt.report_interrupted(error.number)
        except ConfigurationError as error:
            if not number:
                raise
            say(f"the processes cannot be started again: {error}")
            break
        finally:
            attempt.close()
    return code
