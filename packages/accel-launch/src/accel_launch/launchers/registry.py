"""Every launcher; other packages add theirs through the entry point group ``accel.launchers``, and are asked before
ours.
"""

from __future__ import annotations

from accel_state.errors import ConfigurationError
from accel_state.registry import Registry

from ..launch_mode import Kind
from ..plan import Plan
from .base import Launcher

_BUILT_IN = {
    "rank": "accel_launch.launchers.rank:RankLauncher",
    "srun": "accel_launch.launchers.srun:SrunLauncher",
    "mpirun": "accel_launch.launchers.mpirun:MpirunLauncher",
    "deepspeed": "accel_launch.launchers.deepspeed:DeepSpeedLauncher",
    "tpu": "accel_launch.launchers.tpu:TpuLauncher",
    "tpu_pod": "accel_launch.launchers.tpu_pod:TpuPodLauncher",
    "sagemaker": "accel_launch.launchers.sagemaker:SageMakerLauncher",
    "single": "accel_launch.launchers.single:SingleLauncher",
    "elastic": "accel_launch.launchers.elastic:ElasticLauncher",
}

LAUNCHERS: Registry[type[Launcher]] = Registry(
    "launcher",
    _BUILT_IN,
    "accel.launchers",
)


def choose_launcher(plan: Plan) -> Launcher:
    """The first launcher that accepts the plan.

    Raises:
        ConfigurationError: there is none.
    """
    # Between them, ours take every plan: what somebody installed beside them is meant to come first.
    names = [name for name in LAUNCHERS if name not in _BUILT_IN]
    # Only the module of the one that is needed is imported.
    ours = plan.kind.value if plan.kind is not Kind.LOCAL else "elastic" if plan.is_watched else "single"
    for name in [*names, ours]:
        launcher = LAUNCHERS.load(name)()
        if launcher.accepts(plan):
            return launcher
    raise ConfigurationError(
        f"no launcher takes {plan.num_processes} processes on {plan.num_machines} machines. Known: "
        f"{', '.join(LAUNCHERS)}."
    )
