"""What ``accel doctor`` says about a Kubernetes cluster."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator

from accel_state.errors import ConfigurationError

from ..doctor.result import CheckResult, fail, ok, warn
from .kubernetes_submit import KINDS, Cluster

_CONTROLLERS = {
    "JobSet": "https://jobset.sigs.k8s.io/docs/installation",
    "TrainJob": "https://www.kubeflow.org/docs/components/trainer",
}


def check_kubernetes(context: str | None) -> Iterator[CheckResult]:
    """Check that ``accel k8s submit`` can be used from this machine, and with which kinds of job.

    Args:
        context: of kubectl's configuration; None for the current one.
    """
    if importlib.util.find_spec("kubernetes") is None:
        yield fail("kubernetes", "the official client is not installed", "pip install kubernetes")
        return
    version = importlib.metadata.version("kubernetes")
    try:
        cluster = Cluster(context)
        known = {name: cluster.knows(kind) for name, kind in KINDS.items()}
    except ConfigurationError as error:
        text, _, advice = str(error).partition(". ")
        yield fail("kubernetes", f"client {version}; {text}", advice)
        return
    names = ", ".join(name for name, is_known in known.items() if is_known)
    yield ok("kubernetes", f"client {version}, {cluster.address}, namespace {cluster.namespace}: {names}")
    for name, is_known in known.items():
        if not is_known:
            yield warn("kubernetes", f"no {name}: its controller is not installed", f"see {_CONTROLLERS[name]}")
