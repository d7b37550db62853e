"""Which replicas a machine starts with --ft, and with which variables and devices. Starts nothing. Torch-free."""

from __future__ import annotations

from accel_state.env import read_str
from accel_state.errors import ConfigurationError
from accel_state.options import FaultToleranceOptions
from accel_state.ports import LOOPBACK, get_free_port

from .accelerators.registry import VisibleDevices, find_visible
from .launch_plan import LaunchPlan
from .network.interfaces import own_address


def variables(plan: LaunchPlan, number: int, restarts: int) -> list[dict[str, str]]:
    """Return the variables of each process of a replica."""
    options = plan.settings.group(FaultToleranceOptions)
    common = {
        # torchft would write ten lines per step, and torch the C++ frames of each lost connection.
        "RUST_LOG": read_str("RUST_LOG", "error") or "",
        "TORCH_CPP_LOG_LEVEL": read_str("TORCH_CPP_LOG_LEVEL", "FATAL") or "",
        "ACCELERATE_FT_REPLICA": str(number),
        "ACCELERATE_FT_RESTARTS": str(restarts),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(get_free_port()),
    }
    if plan.num_machines > 1:
        common["ACCELERATE_FT_HOST"] = own_address(str(plan.rendezvous.main_process_ip))
    devices = visible_devices(plan, number)
    return [{**common, **ranks, **own} for ranks, own in zip(rank_variables(options), devices, strict=True)]


def numbers_here(plan: LaunchPlan) -> range:
    """Return the numbers of the replicas of this machine."""
    return numbers_of(plan, plan.rendezvous.machine_rank)


def numbers_of(plan: LaunchPlan, rank: int) -> range:
    """Return the numbers of the replicas of a machine; machines have equally many, or one more."""
    options, machines = plan.settings.group(FaultToleranceOptions), plan.num_machines
    count = options.num_replicas + options.num_spares
    if count < machines:
        raise ConfigurationError(
            f"{count} replicas (num_replicas and num_spares) on {plan.settings.where('num_machines')} leave machines "
            "without one. Give as many replicas as machines, or more."
        )
    return range(rank * count // machines, (rank + 1) * count // machines)


def rank_variables(options: FaultToleranceOptions) -> list[dict[str, str]]:
    """Return the variables of the ranks of a replica."""
    size = str(options.processes_per_replica)
    counts = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **counts} for rank in range(options.processes_per_replica)]


def visible_devices(plan: LaunchPlan, number: int) -> list[dict[str, str]]:
    """Return the variable that leaves a replica its own devices, for each of its processes; none on the CPU.

    Raises:
        ConfigurationError: there are fewer devices than processes.
    """
    options = plan.settings.group(FaultToleranceOptions)
    numbers = numbers_here(plan)
    size, count, index = options.processes_per_replica, len(numbers), numbers.index(number)
    environment = plan.full_environment()
    visible = VisibleDevices(0, None) if plan.settings["cpu"] else find_visible(environment)
    if visible.variable is None:
        return [{} for _ in range(size)]
    if visible.count < count * size:
        raise ConfigurationError(
            f"{count} replicas (num_replicas and num_spares) of {size} processes each need {count * size} "
            f"{visible.kind}s here, and {visible.count} are visible. Give a smaller --num_replicas, or --cpu."
        )
    listed = (environment.get(visible.variable) or "").split(",")
    names = listed if len(listed) >= visible.count and all(listed) else list(map(str, range(visible.count)))
    own = {visible.variable: ",".join(names[index * size : (index + 1) * size])}
    return [own for _ in range(size)]
