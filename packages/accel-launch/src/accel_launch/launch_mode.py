"""Which way of starting processes the settings ask for."""

from __future__ import annotations

import enum
from typing import Any

from accel_state.options import Resolution

from .launch_context import Place, Role


class Kind(enum.Enum):
    """A way of starting processes; the value is the name of its launcher."""

    LOCAL = "local"
    """This machine's processes: the launcher becomes a single one, or watches over several."""
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
        return self not in (Kind.LOCAL, Kind.TPU)

    @property
    def counts_devices_there(self) -> bool:
        """Whether the devices, and with them the processes, are counted where they are, not by this launcher."""
        return self in (Kind.TPU, Kind.TPU_POD, Kind.SAGEMAKER)


# Where DeepSpeed itself starts the ranks; "standard" is what everything else uses, one launcher on each machine.
STANDARD = "standard"


def choose_kind(settings: Resolution, place: Place) -> Kind:
    """The way that the settings ask for, the innermost starter first: a launcher that is already one of the ranks
    starts nothing more.
    """
    if place.role is Role.RANK:
        return Kind.RANK
    if ask(settings, "compute_environment") == "AMAZON_SAGEMAKER":
        return Kind.SAGEMAKER
    if ask(settings, "tpu"):
        return Kind.TPU_POD if ask(settings, "tpu_cluster") else Kind.TPU
    if _deepspeed_starts(settings, place):
        return Kind.DEEPSPEED
    if ask(settings, "mpirun_hostfile") and place.role is not Role.NODE:
        return Kind.MPIRUN
    return Kind.SRUN if place.role is Role.BATCH else Kind.LOCAL


def ask(settings: Resolution, name: str) -> Any:
    """The value of an option; None where nobody declares it."""
    return settings[name] if name in settings.settings else None


def _deepspeed_starts(settings: Resolution, place: Place) -> bool:
    if not ask(settings, "use_deepspeed") or place.role is Role.NODE:
        return False
    if ask(settings, "deepspeed_hostfile"):
        return True
    return settings["num_machines"] > 1 and (ask(settings, "deepspeed_multinode_launcher") or "pdsh") != STANDARD
