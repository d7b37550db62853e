"""Processes as actors of a Ray cluster."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from .declaration import GIVEN, MORE_THAN_ONE, OptionGroup, option

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%\w]+\]|[^\s:\[\]/]+):\d+")
_ray = functools.partial(option, section="ray_config", prefix="ray_", env_prefix="ACCELERATE_RAY_")
_ASKED = {"ray": (GIVEN,)}


def parse_address(text: str) -> str:
    """Check the address of a Ray cluster: ``auto``, or HOST:PORT of its head."""
    if text == "auto" or _ADDRESS.fullmatch(text):
        return text
    hint = ""
    if text.startswith("ray://"):
        hint = ". For a cluster elsewhere, run this command in it: ray job submit -- accel launch --ray ..."
    raise ValueError(f"{text!r} is neither auto nor HOST:PORT, such as 10.0.0.1:6379{hint}")


@dataclass(frozen=True)
class RayOptions(OptionGroup):
    """A run whose processes are actors of a Ray cluster."""

    title = "Ray"
    description = "Used with --ray."

    address: str | None = option(
        name="ray",
        key="ray_config.ray_address",
        env="ACCELERATE_RAY_ADDRESS",
        parser=parse_address,
        bare="auto",
        metavar="HOST:PORT",
        help="Start the processes as actors of the Ray cluster with this address; auto, or no address: that of "
        "RAY_ADDRESS, or the one of this machine.",
        question="Address of a Ray cluster whose actors the processes should be (auto: that of this machine; leave it "
        "empty not to use Ray)?",
        asked_when={"num_machines": (MORE_THAN_ONE,)},
    )
    resources: dict[str, Any] | None = _ray(  # noqa: RUF009
        metavar="JSON",
        help='Resources of each process, such as {"CPU": 4}. Those left out: one CPU, and one GPU if the cluster has '
        "any and --cpu is not given.",
    )
    runtime_env: dict[str, Any] | None = _ray(  # noqa: RUF009
        metavar="JSON",
        help='Ray\'s runtime environment, such as {"working_dir": ".", "pip": ["einops"]}: the directory and the '
        "packages that Ray brings to the nodes. Left out, they must be there.",
        question="Ray's runtime environment as JSON, which brings the directory and packages to the nodes, such as "
        '{"working_dir": "."} (leave it empty if they are there)?',
        asked_when=_ASKED,
    )
    timeout: float = _ray(
        30.0,
        minimum=0,
        metavar="SECONDS",
        help="How long to wait until the cluster has the resources free, in seconds.",
    )
