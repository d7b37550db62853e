"""Fault-tolerant replicas on Ray: the actors of a replica that dies are started again, while the others continue.

The lighthouse is on the machine of the launcher, and listens on its loopback address. Torch-free.
"""

from __future__ import annotations

import itertools
import secrets
import signal
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_state import run_token
from accel_state.errors import ConfigurationError
from accel_state.options import FaultToleranceOptions
from accel_state.ports import LOOPBACK

from ..elastic.report import signal_name
from ..launch_plan import LaunchPlan
from ..lighthouse import Lighthouse
from ..replica_plan import replica_variables
from ..supervisor import FORWARDED, GRACE_SECONDS, STUCK_SECONDS, Interrupted, SignalWatch
from .ray_actors import GIVE_UP_SECONDS, Rank, RayJob, make_actor, reason
from .ray_cluster import Cluster
from .ray_places import check_versions, rank_order, rank_variables
from .ray_rank import LOST_GRACE_SECONDS
from .ray_replica_rank import ReplicaActor, ReplicaAnswer
from .replicas import Replica, Supervision

_ANSWER_SECONDS = 0.2
_STOP_SECONDS = 0.05
# What is left of a dead actor is killed, and the replica placed again, by a generator that yields while it waits.
_Steps = Generator[None, None, Any]


@dataclass
class _ReplicaRank(Rank):
    """A process of a replica, and its last answer."""

    files: Sequence[Path] = ()  # that it leaves if its actor is killed
    question: Any = None  # Ray's reference to the next answer
    asked: float = 0.0  # when the next answer was asked for
    known: float = 0.0  # when the last answer was asked for
    report: str = ""
    reported: int = 0
    is_stopped: bool = False

    def code(self) -> int | None:
        """Return how it ended, -N after signal N; None while it runs."""
        failure = self.failure()
        if self.lost:
            return -signal.SIGKILL
        if failure is None:
            return None if self.end is None else 0
        return -signal.Signals[failure.signal] if failure.signal else failure.exit_code


@dataclass
class _RayReplica(Replica):
    """A replica on Ray."""

    actors: list[Any] = field(default_factory=list)  # Ray's handles
    ranks: list[_ReplicaRank] = field(default_factory=list)  # by rank; empty while it does not run
    starting: _Steps | None = None
    leftovers: list[_ReplicaRank] = field(default_factory=list)  # what may still run of former starts

    @property
    def runs(self) -> bool:
        return bool(self.ranks)

    @property
    def is_starting(self) -> bool:
        return self.starting is not None

    def codes(self) -> Sequence[int | None]:
        return [rank.code() for rank in self.ranks]

    def report(self) -> tuple[str, int]:
        return self.ranks[0].report, self.ranks[0].reported

    def is_current(self, moment: float) -> bool:
        return not self.ranks or self.ranks[0].known > moment or self.ranks[0].has_ended

    def is_stopped(self) -> bool:
        return any(rank.is_stopped for rank in self.ranks)

    def kill_processes(self) -> None:
        for rank in self.ranks:
            rank.actor.send.remote(signal.SIGKILL)

    def discard(self) -> None:
        import ray

        self.starting = None
        for actor in self.actors:
            ray.kill(actor)
        self.leftovers += [rank for rank in self.ranks if rank.end is None]
        self.actors, self.ranks = [], []


@dataclass
class RayReplicas(Supervision):
    """The replicas of a run on Ray; what its launcher supervises."""

    job: RayJob = field(kw_only=True)
    cluster: Cluster = field(kw_only=True)
    _group: Any = None
    _name: str = field(default_factory=lambda: f"accel_ft_{secrets.token_hex(8)}")
    _versions: Any = None  # the place of the first actor, whose packages all others must have
    _signals: list[int] = field(default_factory=list)  # to be forwarded
    _failed: int | None = None

    # -- what a signal needs to know ---------------------------------------------------------------------------------

    def pids(self) -> Sequence[int]:
        """None: the replicas are on other machines."""
        return ()

    def grace_seconds(self, number: int) -> float:
        return self.job.grace_seconds

    def shutdown_seconds(self) -> float:
        """Return how long the replicas may take, of which this machine sees nothing."""
        return self.job.grace_seconds + STUCK_SECONDS

    # -- start -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Reserve resources, start the lighthouse, and all replicas.

        Raises:
            ConfigurationError: there are too few resources, or a replica cannot be started.
            Interrupted: a signal asked the launcher to end.
        """
        for number in FORWARDED:
            signal.signal(number, lambda received, _: self._signals.append(received))
        self._group = self.cluster.reserve(self.job.request, self.job.wait_seconds, self.watch)
        node, address = self.cluster.here()
        # A bundle moves when its node has died only, and this node dies with this launcher.
        alone = self.cluster.nodes_of(self._group) == {node}
        host = LOOPBACK if alone else address
        self.lighthouse = Lighthouse(self.options, self.token, self.plan.debug, self.say, host, opens=not alone)
        self.replicas += [_RayReplica(number) for number in range(self.options.num_replicas + self.options.num_spares)]
        for replica in self.replicas:
            self.start(replica)
        while any(replica.is_starting for replica in self.replicas):
            self._advance()
            with self.watch.interruptible():
                time.sleep(_STOP_SECONDS)
        if not self.plan.quiet:
            self.say(self._description())

    def start(self, replica: Replica) -> None:
        assert isinstance(replica, _RayReplica)
        replica.begin()
        replica.starting = self._steps(replica)

    def _steps(self, replica: _RayReplica) -> _Steps:
        """Start the actors of a replica, and its processes in them."""
        assert self.lighthouse is not None
        yield from self._clear(replica)
        job, number = self.job, replica.number
        each_bundle = job.request.ranks_per_bundle // self.options.processes_per_replica
        for _ in range(self.options.processes_per_replica):
            replica.actors.append(make_actor(ReplicaActor, job, self._group, number // each_bundle))
        places = yield from _answers([actor.place.remote() for actor in replica.actors])
        self._versions = self._versions or places[0]
        check_versions([self._versions, *places])
        order = rank_order(places)
        ranks = [_ReplicaRank(replica.actors[index], places[index]) for index in order]
        (port,) = yield from _answers([ranks[0].actor.port.remote()])
        common = {
            **job.inherited,
            **job.variables,
            **replica_variables(number, replica.restarts),
            **{"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)},
            "TORCHFT_LIGHTHOUSE": self.lighthouse.address,
            run_token.VARIABLE: self.token,
        }
        # The replicas of a node share the directory. One that has died and returned has another id.
        name = f"{self._name}_{places[0].node[:8]}"
        starts = []
        for rank, own in zip(ranks, rank_variables([rank.place for rank in ranks]), strict=True):
            rank.variables = {**common, **own}
            process = f" rank{own['RANK']}" if len(ranks) > 1 else ""
            rank.prefix = f"[replica{number}{process}]: ".encode()
            arguments = job.entrypoint, job.directory, rank.variables, name, self.lighthouse.entrance
            starts.append(rank.actor.start_replica.remote(*arguments, self._elsewhere(places[0].node)))
        for rank, (pid, files) in zip(ranks, (yield from _answers(starts)), strict=True):
            rank.pid, rank.files, rank.heard = pid, files, time.monotonic()
        replica.ranks = ranks

    def _clear(self, replica: _RayReplica) -> _Steps:
        """Make sure that nothing of the former start runs.

        What is on a node that is lost is ended by its actor, which does not hear from here either.
        """
        limit = (self.job.silence_seconds or GIVE_UP_SECONDS) + LOST_GRACE_SECONDS + 1
        for rank in replica.leftovers:
            question = self.cluster.end_process(rank.place.node, rank.pid, rank.files)
            while time.monotonic() < rank.heard + limit and not self.cluster.is_done(question, 0):
                yield
        replica.leftovers.clear()

    def _advance(self) -> None:
        """Continue to start the replicas that are being started."""
        from ray.exceptions import RayActorError, RayError

        for replica in self.replicas:
            assert isinstance(replica, _RayReplica)
            if replica.starting is None:
                continue
            try:
                next(replica.starting)
            except StopIteration:
                replica.starting = None
                if replica.restarts:
                    self.say(f"replica {replica.number} runs on {replica.ranks[0].place.host}")
            except (RayError, OSError, ConfigurationError) as error:
                why = f"replica {replica.number} cannot be started on Ray: {reason(error)}"
                if not replica.restarts:
                    raise ConfigurationError(why) from error
                self.say(why)
                code = -signal.SIGKILL if isinstance(error, RayActorError) else 1
                if failure := self._ended(replica, code):
                    self.failed(failure, 1)
                    self._failed = 1

    def _description(self) -> str:
        nodes = []
        placed = [
            (replica.ranks[0].place, replica.number) for replica in self.replicas if isinstance(replica, _RayReplica)
        ]
        placed.sort(key=lambda each: (each[0].host, each[0].node, each[1]))
        for _, here in itertools.groupby(placed, key=lambda each: each[0].node):
            places, numbers = zip(*here, strict=True)
            text = f"replica{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
            nodes.append(f"{places[0].host} ({text})")
        return f"the Ray cluster {self.cluster.address} runs the replicas on {', '.join(nodes)}"

    # -- the run -----------------------------------------------------------------------------------------------------

    def look(self, seconds: float) -> int | None:
        self._hear()
        self._advance()
        while self._signals:
            number = self._signals.pop(0)
            for rank in self._running():
                rank.actor.send.remote(number)
        return super().look(seconds) if self._failed is None else self._failed

    def _running(self) -> list[_ReplicaRank]:
        ranks = [rank for replica in self.replicas if isinstance(replica, _RayReplica) for rank in replica.ranks]
        return [rank for rank in ranks if not rank.has_ended]

    def _elsewhere(self, node: str) -> dict[str, str]:
        """Return the reports of the replicas that run on other nodes, by name of their files."""
        running = [replica for replica in self.replicas if isinstance(replica, _RayReplica) and replica.runs]
        return {
            f"replica_{replica.number}": replica.report()[0]
            for replica in running
            if replica.ranks[0].place.node != node and replica.state
        }

    def _hear(self) -> None:
        """Take the answers that have come, and ask again."""
        import ray
        from ray.exceptions import RayError

        asked = {}
        for rank in self._running():
            if rank.question is None:
                rank.asked = time.monotonic()
                rank.question = rank.actor.look.remote(_ANSWER_SECONDS, self._elsewhere(rank.place.node))
            asked[rank.question] = rank
        if not asked:
            return
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for question in ready:
            rank = asked[question]
            rank.question, rank.known = None, rank.asked
            try:
                found: ReplicaAnswer = ray.get(question)
            except RayError as error:
                rank.lost = f"its actor on Ray was lost: {reason(error)}"
                self.say(f"replica {rank.variables['ACCELERATE_FT_REPLICA']}: {rank.lost}")
                continue
            rank.take(found.answer, self.job.screen)
            rank.report, rank.reported, rank.is_stopped = found.report, found.reported, found.is_stopped

    def stop(self, seconds: float) -> None:
        """End everything that is still running within some seconds, and give the resources back."""
        from ray.util.placement_group import remove_placement_group

        for rank in self._running():
            rank.actor.stop.remote(signal.SIGTERM, seconds)
        deadline = time.monotonic() + seconds + STUCK_SECONDS
        while self._running() and time.monotonic() < deadline:
            self._hear()
            time.sleep(_STOP_SECONDS)
        for replica in self.replicas:
            replica.discard()
        if self._group is not None:
            remove_placement_group(self._group)
        if self.lighthouse is not None:
            self.lighthouse.close()


def _answers(questions: list[Any]) -> _Steps:
    """Return what actors that are being started answer."""
    import ray

    while ray.wait(questions, num_returns=len(questions), timeout=0)[1]:
        yield
    return ray.get(questions)


def run_replicas(plan: LaunchPlan, job: RayJob, cluster: Cluster, watch: SignalWatch) -> int:
    """Start the replicas, restart those that die, and return the exit code as a shell shows it.

    Raises:
        ConfigurationError: they cannot be started.
    """
    run = RayReplicas(
        plan, plan.settings.group(FaultToleranceOptions), run_token.make_token(), watch=watch, job=job, cluster=cluster
    )
    watch.supervised = run
    try:
        run.begin()
        return run.supervise()
    except Interrupted as error:
        run.say(f"ended by {signal_name(error.number)}")
        return 128 + error.number
    finally:
        run.stop(GRACE_SECONDS if watch.received else 1.0)
