"""Every launcher; other packages add theirs through the entry point group ``accel.launchers``."""

from __future__ import annotations

from accel_state.registry import Registry

from ..launch_context import LaunchMode
from ..launch_plan import LaunchPlan
from .base import Launcher

_BUILT_IN = {
    "rank": "accel_launch.launchers.rank:RankLauncher",
    "srun": "accel_launch.launchers.srun:SrunLauncher",
    "mpirun": "accel_launch.launchers.mpirun:MpirunLauncher",
    "deepspeed": "accel_launch.launchers.deepspeed:DeepSpeedLauncher",
    "tpu": "accel_launch.launchers.tpu:TpuLauncher",
    "tpu_pod": "accel_launch.launchers.tpu_pod:TpuPodLauncher",
    "sagemaker": "accel_launch.launchers.sagemaker:SageMakerLauncher",
    "ft": "accel_launch.launchers.ft:FaultTolerantLauncher",
    "single": "accel_launch.launchers.single:SingleLauncher",
    "elastic": "accel_launch.launchers.elastic:ElasticLauncher",
}

LAUNCHERS: Registry[type[Launcher]] = Registry("launcher", _BUILT_IN, "accel.launchers")


def choose_launcher(plan: LaunchPlan) -> Launcher:
    """Return the first launcher of another package that accepts the plan; without one, that of its mode."""
    built_in = plan.mode.value
    if plan.mode is LaunchMode.LOCAL:
        built_in = "ft" if plan.settings["ft"] else "elastic" if plan.needs_agent else "single"
    for name in LAUNCHERS:
        if name not in _BUILT_IN and (other := LAUNCHERS.load(name)()).accepts(plan):
            return other
    return LAUNCHERS.load(built_in)()
