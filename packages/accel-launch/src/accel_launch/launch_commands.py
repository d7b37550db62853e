"""Commands and environments that the launcher would use, for programs that start processes themselves."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from accel_state.env import get_int_from_env, patch_environment, read_int, read_str
from accel_state.errors import ConfigurationError

from .launch_plan import plan_from_args
from .launchers.registry import choose_launcher
from .launchers.single import SingleLauncher, process_environment


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a script in one process, or under mpirun, and its complete environment.

    Args:
        args: options of ``accel launch`` by name, with ``training_script`` and ``training_script_args``.

    Raises:
        ConfigurationError: a value is not allowed, there is no script, or the options ask for several processes that
            this launcher starts itself.
    """
    plan = plan_from_args(args)
    launcher = choose_launcher(plan)
    start = launcher.commands(plan)[0]
    if isinstance(launcher, SingleLauncher):
        return list(start.command), process_environment(plan, start)
    if start.ranks:
        raise ConfigurationError(
            f"num_processes={plan.num_processes} has no single command: the launcher starts and supervises the "
            "processes. Use accel_launch.launch(script, num_processes=...), or start them with the environment of "
            "prepare_multi_gpu_env."
        )
    return list(start.command), {**plan.full_environment(), **start.environment}


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment that all processes of a launch have in common; each adds the variables of its rank.

    Args:
        args: as for :func:`prepare_simple_launcher_cmd_env`.

    Raises:
        ConfigurationError: a value is not allowed, or asks for devices that this machine does not have.
    """
    return plan_from_args(args).full_environment()


class PrepareForLaunch:
    """Sets the rank of a process that another program started, and calls a function in it.

    Args:
        launcher: the function.
        distributed_type: a value MULTI_... sets the rank; other values leave the environment unchanged.
        debug: before the call, initialise a process group over the file named by ACCELERATE_DEBUG_RDV_FILE, with the
            world size of WORLD_SIZE.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: Any = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type: str = str(getattr(distributed_type, "value", distributed_type))
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Call the function as process ``index`` of this machine.

        Raises:
            ConfigurationError: debug is on, and a variable of the rendezvous is missing.
        """
        if self.debug:
            self._init_process_group(index)
        if not self.distributed_type.startswith("MULTI_"):
            self.launcher(*args)
            return
        local = get_int_from_env(("LOCAL_WORLD_SIZE", "WORLD_SIZE"), 1)
        rank = (read_int("NODE_RANK") or 0) * local + index
        with patch_environment(LOCAL_RANK=index, RANK=rank, FORK_LAUNCHED=1):
            self.launcher(*args)

    def _init_process_group(self, index: int) -> None:
        import torch.distributed as dist

        world_size, file = read_int("WORLD_SIZE"), read_str("ACCELERATE_DEBUG_RDV_FILE")
        if world_size is None or file is None:
            raise ConfigurationError(
                "PrepareForLaunch(debug=True) needs WORLD_SIZE and ACCELERATE_DEBUG_RDV_FILE, which are "
                f"{world_size} and {file}. Set both, or leave debug out."
            )
        dist.init_process_group("gloo", rank=index, store=dist.FileStore(file, world_size), world_size=world_size)


def test_launch() -> None:
    """Create this process's state, which fails if the launcher set its rank wrongly or incompletely."""
    from accel_state import PartialState

    PartialState()


test_launch.__test__ = False  # type: ignore[attr-defined]
