"""Which launcher the settings ask for."""

from __future__ import annotations

import enum
from typing import Any

from accel_state.options import Resolution

from .launch_context import LaunchContext, Role


class LaunchMode(enum.Enum):
    """A way of starting processes; the value is the name of its launcher."""

    LOCAL = "local"
    """The processes of this machine: the launcher becomes the only one, or supervises several."""
    RANK = "rank"
    SRUN = "srun"
    MPIRUN = "mpirun"
    DEEPSPEED = "deepspeed"
    TPU = "tpu"
    TPU_POD = "tpu_pod"
    SAGEMAKER = "sagemaker"

    @property
    def starts_every_machine(self) -> bool:
        """Whether one command starts the processes of all machines, so that no machine needs a rank."""
        return self not in (LaunchMode.LOCAL, LaunchMode.TPU)

    @property
    def counts_devices_remotely(self) -> bool:
        """Whether devices, and therefore processes, are counted on the target machines."""
        return self in (LaunchMode.TPU, LaunchMode.TPU_POD, LaunchMode.SAGEMAKER)


# The value of --deepspeed_multinode_launcher with which torch's agent, not DeepSpeed, starts the ranks.
STANDARD = "standard"


def choose_mode(settings: Resolution, context: LaunchContext) -> LaunchMode:
    """Choose the launcher; one that was itself started as a rank starts nothing."""
    if context.role is Role.RANK:
        return LaunchMode.RANK
    if option_value(settings, "compute_environment") == "AMAZON_SAGEMAKER":
        return LaunchMode.SAGEMAKER
    if option_value(settings, "tpu"):
        return LaunchMode.TPU_POD if option_value(settings, "tpu_cluster") else LaunchMode.TPU
    if context.role is not Role.NODE:
        if _deepspeed_starts(settings):
            return LaunchMode.DEEPSPEED
        if option_value(settings, "mpirun_hostfile"):
            return LaunchMode.MPIRUN
    return LaunchMode.SRUN if context.role is Role.BATCH else LaunchMode.LOCAL


def option_value(settings: Resolution, name: str) -> Any:
    """The value of an option; None if no installed option group declares it."""
    return settings[name] if name in settings.settings else None


def _deepspeed_starts(settings: Resolution) -> bool:
    if not option_value(settings, "use_deepspeed"):
        return False
    if option_value(settings, "deepspeed_hostfile"):
        return True
    return settings["num_machines"] > 1 and option_value(settings, "deepspeed_multinode_launcher") != STANDARD
