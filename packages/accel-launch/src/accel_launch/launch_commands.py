"""What the launcher would start, for programs that start it themselves: commands and environments from parsed
arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from accel_state.env import get_int_from_env, patch_environment, read_int, read_str
from accel_state.errors import ConfigurationError
from accel_state.options import load_groups

from .config.read import load_settings
from .launchers.registry import choose_launcher
from .plan import Plan, make_plan


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command that starts a script on one process, or under mpirun, and its whole environment.

    Args:
        args: options of ``accel launch`` by name, as far as they are given, with ``training_script`` and
            ``training_script_args``.

    Raises:
        ConfigurationError: a value is wrong, there is no script, or the options ask for several processes that this
            launcher starts itself.
    """
    plan = plan_of(args)
    start = choose_launcher(plan).starts(plan)[0]
    if start.ranks:
        raise ConfigurationError(
            f"num_processes={plan.num_processes} has no single command: the launcher starts and watches the "
            "processes. Use "
            "accel_launch.launch(script, num_processes=...), or prepare_multi_gpu_env for a launcher of your own."
        )
    return list(start.command), {**plan.full_environment(), **start.environment}


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """The environment that all processes of a launch have in common, on top of which each gets its rank.

    Args:
        args: as of :func:`prepare_simple_launcher_cmd_env`.

    Raises:
        ConfigurationError: a value is wrong, or asks for devices that this machine does not have.
    """
    return plan_of(args).full_environment()


def plan_of(args: argparse.Namespace) -> Plan:
    """What a launch with these options would start.

    Raises:
        ConfigurationError: a value is wrong, or there is no script.
    """
    given = {name: value for name, value in vars(args).items() if value is not None}
    script, words = given.get("training_script"), list(given.get("training_script_args", ()))
    if not script:
        raise ConfigurationError("args has no training_script. Set it to the path of the script.")
    declared = {opt.name for group in load_groups() for opt in group.options()}
    return make_plan(
        load_settings({name: value for name, value in given.items() if name in declared}), str(script), words
    )


class PrepareForLaunch:
    """Gives a process that somebody else has started its rank, and calls a function in it.

    Args:
        launcher: the function.
        distributed_type: what trains; with one of the kinds MULTI_... the process gets its rank, and others know it
            already.
        debug: meet through the file of ACCELERATE_DEBUG_RDV_FILE, with the world size of the variable WORLD_SIZE,
            before the call.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: Any = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = str(getattr(distributed_type, "value", distributed_type))
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Call the function as process ``index`` of this machine.

        Raises:
            ConfigurationError: debug is on, and a variable that says where to meet is missing.
        """
        if self.debug:
            self._meet(index)
        if self.distributed_type.startswith("MULTI_"):
            local = get_int_from_env(("LOCAL_WORLD_SIZE", "WORLD_SIZE"), 1)
            rank = (read_int("NODE_RANK") or 0) * local + index
            with patch_environment(LOCAL_RANK=index, RANK=rank, FORK_LAUNCHED=1):
                self.launcher(*args)
            return
        self.launcher(*args)

    def _meet(self, index: int) -> None:
        import torch.distributed as dist

        world, file = read_int("WORLD_SIZE"), read_str("ACCELERATE_DEBUG_RDV_FILE")
        if world is None or file is None:
            raise ConfigurationError(
                "PrepareForLaunch(debug=True) reads WORLD_SIZE and ACCELERATE_DEBUG_RDV_FILE. "
                f"Here they are {world} and {file}. Set both, or leave debug out."
            )
        store = dist.FileStore(file, world)
        dist.init_process_group("gloo", rank=index, store=store, world_size=world)


def test_launch() -> None:
    """Start the state of this process, which fails where a launcher has given it a wrong or incomplete place."""
    from accel_state import PartialState

    PartialState()


test_launch.__test__ = False  # type: ignore[attr-defined]
