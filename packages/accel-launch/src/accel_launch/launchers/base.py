"""The interface of a launcher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from accel_state.errors import ConfigurationError
from accel_state.options.resolution import Resolution, Setting, Source

from ..launch_plan import LaunchPlan


@dataclass(frozen=True)
class MachineCommand:
    """A command that runs on a machine.

    Attributes:
        machine: description of the machine.
        command: the command.
        environment: variables on top of those of the machine.
        ranks: further variables of each process; empty if the command itself starts the ranks.
        notes: further information for the user.
    """

    machine: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: Sequence[Mapping[str, str]] = ()
    notes: Sequence[str] = ()


class Launcher(ABC):
    """Starts the processes of a plan on this machine."""

    def accepts(self, plan: LaunchPlan) -> bool:
        """Return True if this launcher starts the plan.

        Only launchers of other packages are asked, before one of accel's is chosen.
        """
        return False

    @abstractmethod
    def run(self, plan: LaunchPlan) -> int:
        """Start the processes, wait for them, and return the exit code as a shell would show it.

        Raises:
            ConfigurationError: the processes cannot be started.
        """

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """Return the commands that :meth:`run` would run, by machine. Starts and writes nothing.

        Raises:
            ConfigurationError: as for :meth:`run`, or the launcher does not support --dry_run.
        """
        raise ConfigurationError(f"{type(self).__name__} does not support --dry_run. Leave the option out.")


# Options that concern this call only.
_NOT_FORWARDED = frozenset(("dry_run", "json"))


def launch_argv(plan: LaunchPlan, without: Collection[str] = (), **options: object) -> list[str]:
    """Return the arguments of ``accel``: those of this command line, without some options and with others."""
    left_out = _NOT_FORWARDED | set(without) | set(options)
    given = [
        _flag(setting)
        for name, setting in plan.settings.settings.items()
        if setting.source is Source.COMMAND_LINE and name not in left_out
    ]
    added = [f"--{name}={value}" for name, value in options.items()]
    return ["launch", *given, *added, plan.entrypoint.name, *plan.entrypoint.args]


CHOSEN_BY_CLUSTER = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend")
"""Options that the nodes of a cluster get from it."""

_FOR_THIS_MACHINE = frozenset(("config_file", "compute_environment", "same_network"))


def launch_flags(settings: Resolution, without: Collection[str]) -> list[str]:
    """Return the flags with which a launcher elsewhere has the settings of this one, whatever set them here.

    Args:
        settings: every option.
        without: options to leave out, besides those that concern this machine.
    """
    left_out = _NOT_FORWARDED | _FOR_THIS_MACHINE | set(without)
    flags = []
    # A group without effect, such as that of SageMaker, may be set by variables of this machine, with credentials.
    for group in filter(settings.is_enabled, settings.groups):
        for option in group.options():
            setting = settings.settings[option.name]
            unset = setting.source is Source.DEFAULT or setting.value in (None, option.default)
            # OMP_NUM_THREADS of a shell is for the cores of this machine.
            unset |= setting.source is Source.ENVIRONMENT and option.env == "OMP_NUM_THREADS"
            if not unset and not option.retired and option.name not in left_out:
                flags.append(_flag(setting))
    return flags


def _flag(setting: Setting) -> str:
    flag, text = setting.option.flags[0], setting.option.format(setting.value)
    return flag if setting.option.is_flag and text == "true" else f"{flag}={text}"
