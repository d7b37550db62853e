"""What ``accel doctor`` says about a Ray cluster."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator

from accel_state.errors import ConfigurationError

from ..doctor.result import CheckResult, fail, ok
from .ray_cluster import amounts, connected


def check_ray(address: str) -> Iterator[CheckResult]:
    """Check that Ray is installed, and that its cluster can be used from this machine."""
    if importlib.util.find_spec("ray") is None:
        yield fail("ray", "not installed", "pip install 'ray[default]', on every node of the cluster")
        return
    version = importlib.metadata.version("ray")
    try:
        with connected(address, None, False) as cluster:
            hosts, free, total = cluster.hosts(), cluster.free(), cluster.resources()
    except ConfigurationError as error:
        text, _, advice = str(error).partition(". ")
        yield fail("ray", f"{version}; {text}", advice)
        return
    shown = {name: amount for name, amount in total.items() if name in ("CPU", "GPU")}
    free = {name: free.get(name, 0.0) for name in shown}
    where = f"cluster {cluster.address} of {', '.join(hosts)}"
    yield ok("ray", f"{version}, {where}: {amounts(free)} free, of {amounts(shown)}")
