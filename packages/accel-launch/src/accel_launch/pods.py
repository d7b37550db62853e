"""Launchers that a cluster starts on each node without telling them their rank as an option: Kubernetes, SkyPilot.

Their variables describe nodes and not processes, so they say where a launcher runs; a script that is started without
one does not read them. Torch-free.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from accel_state.environments.base import Environment, Variables

INDEX = "JOB_COMPLETION_INDEX"
"""Set by the controller of indexed Jobs, and so in JobSets and TrainJobs."""


@dataclass(frozen=True)
class PodEnvironment(Environment):
    """A pod of an indexed Job, of which JobSets consist: JOB_COMPLETION_INDEX, and the pod's DNS name.

    The pods of a Job are called NAME-INDEX, in the subdomain of a headless service. No controller tells a pod how many
    there are: that is the number of machines that the launch was asked for.
    """

    name = "kubernetes"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        """See the base class; None with a single pod."""
        index, pods = variables.integer(INDEX), variables.integer("ACCELERATE_NUM_MACHINES", minimum=1)
        if index is None or pods is None or pods == 1:
            return None
        return cls(index, pods, 0, 1, index, pods, _first_pod(index), None)


@dataclass(frozen=True)
class SkyEnvironment(Environment):
    """A node of a SkyPilot task: SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS, one address in each line."""

    name = "skypilot"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        """See the base class."""
        addresses = (variables.text("SKYPILOT_NODE_IPS") or "").split()
        if not addresses:
            return None
        rank = variables.required("SKYPILOT_NODE_RANK", because="SKYPILOT_NODE_IPS")
        return cls(rank, len(addresses), 0, 1, rank, len(addresses), addresses[0], None)


def _first_pod(index: int) -> str | None:
    """Return the DNS name of the pod with index 0, from that of this pod.

    None if this is not NAME-INDEX in a subdomain.
    """
    host, _, domain = socket.getfqdn(socket.gethostname()).partition(".")
    stem, _, number = host.rpartition("-")
    return f"{stem}-0.{domain}" if domain and number == str(index) else None


def in_pod() -> bool:
    """Return True if this is a pod of an indexed Job."""
    return INDEX in Variables()
