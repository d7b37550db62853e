"""A Ray cluster: connecting to it, what it has, and reserving resources for the ranks of a run. Torch-free."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_state.env import read_str
from accel_state.errors import ConfigurationError, require

from ..supervisor import FORWARDED, SIGNALS, SignalWatch
from .ray_rank import end_rank

_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_START = "Start one with `ray start --head`, or give the address of its head: --ray HOST:6379"


@dataclass(frozen=True)
class Request:
    """The resources of a run.

    Attributes:
        bundles: resources that are reserved together on one node.
        ranks_per_bundle: how many ranks share a bundle.
        strategy: Ray's placement strategy.
        each: resources of each rank.
    """

    bundles: Sequence[Mapping[str, float]]
    ranks_per_bundle: int
    strategy: str
    each: Mapping[str, float]

    @classmethod
    def of(cls, processes: int, machines: int | None, each: Mapping[str, float], together: int = 1) -> Request:
        """Return what to reserve for processes that are packed (``machines`` is None), or spread over so many machines.

        Args:
            processes: how many.
            machines: over how many nodes they are spread.
            each: resources of a process.
            together: how many successive ones must be on one node.
        """
        strategy = "PACK" if machines is None else "STRICT_SPREAD"
        share = together if machines is None else processes // machines
        bundle = {name: amount * share for name, amount in each.items()}
        return cls([bundle] * (processes // share), share, strategy, each)

    def describe(self) -> str:
        """In words."""
        ranks = len(self.bundles) * self.ranks_per_bundle
        where = f", {self.ranks_per_bundle} on each of {len(self.bundles)} nodes" if self.strategy != "PACK" else ""
        return f"{ranks} process{'es' if ranks > 1 else ''}{where}, with {amounts(self.each)} each"


def amounts(resources: Mapping[str, float]) -> str:
    """Resources as text: ``2 CPU, 1 GPU``."""
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "nothing"


class Cluster:
    """A cluster that this process is connected to.

    Args:
        address: of its head, for messages.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    def resources(self) -> dict[str, float]:
        """Return what all nodes have, in use or not."""
        import ray

        return dict(ray.cluster_resources())

    def free(self) -> dict[str, float]:
        """Return what is not in use."""
        import ray

        return dict(ray.available_resources())

    def hosts(self) -> list[str]:
        """Return the names of the nodes that live, sorted."""
        import ray

        return sorted(str(node["NodeManagerHostname"]) for node in ray.nodes() if node["Alive"])

    def runtime_env(self) -> dict[str, Any]:
        """Return what Ray brings to the nodes: for this run, or the job that it is part of."""
        import ray

        return dict(ray.get_runtime_context().runtime_env)

    def reserve(self, request: Request, seconds: float, watch: SignalWatch) -> Any:
        """Reserve resources, and return Ray's placement group.

        Raises:
            ConfigurationError: they were not free within so many seconds.
            Interrupted: a signal asked this process to end.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        group = placement_group([dict(bundle) for bundle in request.bundles], strategy=request.strategy)
        deadline = time.monotonic() + seconds
        try:
            while not group.wait(_LOOK_SECONDS):
                watch.check()
                if time.monotonic() > deadline:
                    raise ConfigurationError(self._too_few(request, seconds))
        except BaseException:
            remove_placement_group(group)
            raise
        return group

    def here(self) -> tuple[str, str]:
        """Return the id and the address of the node on which this process runs."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def nodes_of(self, group: Any) -> set[str]:
        """Return the ids of the nodes on which resources are reserved."""
        from ray.util.placement_group import placement_group_table

        return set(placement_group_table(group)["bundles_to_node_id"].values())

    def end_process(self, node: str, pid: int, files: Sequence[Path] = ()) -> Any:
        """Kill a rank on a node whose actor has not done so, and remove its files; Ray's reference to it."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(node, soft=False)
        return (
            ray.remote(end_rank).options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote(pid, list(files))
        )

    def is_done(self, question: Any, seconds: float) -> bool:
        """Return True if a question has been answered; waits up to so many seconds. False if it cannot be."""
        import ray
        from ray.exceptions import RayError

        ready, _ = ray.wait([question], timeout=seconds)
        try:
            return bool(ready) and ray.get(question) is None
        except RayError:
            time.sleep(seconds)
            return False

    def _too_few(self, request: Request, seconds: float) -> str:
        import ray

        names = set(request.each)
        free, total = ({name: found.get(name, 0.0) for name in names} for found in (self.free(), self.resources()))
        nodes = [node for node in ray.nodes() if node["Alive"]]
        nodes.sort(key=lambda node: node["NodeManagerHostname"])  # Ray's order is that of a hash table
        each = "; ".join(f"{node['NodeManagerHostname']}: {amounts(_only(node['Resources'], names))}" for node in nodes)
        return (
            f"the Ray cluster {self.address} had no room for {request.describe()}, within {seconds:g} s "
            f"(ray_timeout). Free: {amounts(free)}, of {amounts(total)}. Its nodes have: {each}. Give fewer "
            "--num_processes or --ray_resources, wait for longer with --ray_timeout, or add nodes."
        )


def _only(resources: Mapping[str, float], names: set[str]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in names}


@contextlib.contextmanager
def connected(address: str, runtime_env: Mapping[str, Any] | None, debug: bool) -> Iterator[Cluster]:
    """Connect to a cluster.

    Args:
        address: ``auto``, or HOST:PORT.
        runtime_env: Ray's runtime environment for the actors of this process.
        debug: whether Ray's own log is shown.

    Raises:
        ConfigurationError: there is no such cluster, this machine is not part of it, or it refuses the environment.
        MissingDependencyError: Ray is not installed.
    """
    require("ray", purpose="starting processes on Ray", install="ray[default]")
    import ray

    _check_address(address)
    # Ray replaces these, with handlers that end this process without its ranks.
    handlers = {number: signal.getsignal(number) for number in (*SIGNALS, *FORWARDED)}
    try:
        ray.init(
            address,
            runtime_env=dict(runtime_env) if runtime_env else None,
            log_to_driver=False,
            logging_level="INFO" if debug else "ERROR",
        )
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigurationError(
            f"--ray {address}: {reason}. Run this on a node of the cluster, or in it with `ray job submit`. {_START}."
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    # Ray prints messages to stdout, which is for the output of the ranks: that a node died, and its log.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stderr if debug else nowhere):
        try:
            yield Cluster(ray.get_runtime_context().gcs_address)
        finally:
            ray.shutdown()


def _check_address(address: str) -> None:
    """Check that something listens at an address, for which Ray would wait much longer."""
    shown = (read_str("RAY_ADDRESS") or address) if address == "auto" else address
    host, _, port = shown.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationError(f"no Ray cluster answers at {shown}: {reason}. {_START}.") from None
