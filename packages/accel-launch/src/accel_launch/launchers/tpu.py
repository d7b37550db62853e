"""The chips of one TPU host: torch_xla starts a process for each, which calls a function of the script."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError

from ..entrypoint import Entrypoint, python_command
from ..launch_plan import LaunchPlan, plan_from_args
from ..tpu_function import processes_to_start, require_launcher
from .base import Launcher, MachineCommand


class TpuLauncher(Launcher):
    """Calls a function of the script on every chip of this host."""

    def run(self, plan: LaunchPlan) -> int:
        process, count = _core_process(plan), plan.settings["num_processes"]
        with patch_environment(**plan.environment, **tpu_variables(plan)):
            from accel_state import devices

            if (problem := devices.get("xla").problem()) is not None:
                raise ConfigurationError(problem)
            launcher = require_launcher()
            # Checked once here: every process would repeat the error.
            process.find_function()
            if plan.settings["use_parallelism_config"]:
                process(0)  # one process shards the model over all of its devices
                return 0
            if processes_to_start(count) is None and count is not None:
                print(
                    f"--num_processes {count}: torch_xla starts one process for each chip, or a single one "
                    "(--num_processes 1). TPU_VISIBLE_CHIPS limits the chips.",
                    file=sys.stderr,
                )
            # Forks would share this process's connection to the TPU.
            launcher.spawn(process, args=(), nprocs=processes_to_start(count), start_method="spawn")
        return 0

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """Return one command for all cores; torch_xla sets the core of each process."""
        one = plan.settings["num_processes"] == 1 or plan.settings["use_parallelism_config"]
        count = "one process" if one else "a process for each chip"
        function = _core_process(plan).function_name
        note = f"torch_xla starts {count}, which imports the script and calls its function {function}()"
        command = plan.entrypoint.command(python_command())
        return [MachineCommand("this machine", command, {**plan.environment, **tpu_variables(plan)}, notes=[note])]


def tpu_variables(plan: LaunchPlan) -> dict[str, str]:
    """Variables of torch_xla that follow from the settings."""
    variables = {"PJRT_DEVICE": "TPU"} if "PJRT_DEVICE" not in plan.full_environment() else {}
    if plan.settings["mixed_precision"] == "bf16":
        variables["XLA_DOWNCAST_BF16" if plan.settings["downcast_bf16"] else "XLA_USE_BF16"] = "1"
    return variables


def prepare_tpu(
    args: argparse.Namespace, current_env: Mapping[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Add the variables of a launch on a TPU to an environment.

    Args:
        args: options of ``accel launch`` by name, with ``training_script``; returned unchanged.
        current_env: the environment to add to; it is not modified.
        pod: whether the script is started on every host of a pod; the variables are the same.

    Raises:
        ConfigurationError: a value is not allowed.
    """
    plan = plan_from_args(argparse.Namespace(**{**vars(args), "tpu": True, "tpu_use_cluster": pod or None}))
    return args, {**current_env, **tpu_variables(plan)}


class CoreProcess:
    """What every process runs. Can be pickled."""

    def __init__(self, entrypoint: Entrypoint, function_name: str) -> None:
        self.entrypoint = entrypoint
        self.function_name = function_name

    def __call__(self, index: int) -> None:
        """Import the script, and call its function."""
        sys.argv = [self.entrypoint.name, *self.entrypoint.args]
        self.find_function()()

    def find_function(self) -> Callable[[], Any]:
        """Return the function of the script."""
        name = self.entrypoint.name
        module = importlib.import_module(name) if self.entrypoint.kind == "module" else _import_file(name)
        function: Callable[[], Any] | None = getattr(module, self.function_name, None)
        if not callable(function):
            raise ConfigurationError(
                f"{name} has no function {self.function_name!r} for the cores of the TPU to call. Define it, or name "
                "another one with --main_training_function."
            )
        return function


def _core_process(plan: LaunchPlan) -> CoreProcess:
    if plan.entrypoint.kind == "executable":
        raise ConfigurationError(
            "--no_python and --tpu contradict each other: on a TPU a function of a Python script is called. Give one "
            "of them."
        )
    return CoreProcess(plan.entrypoint, plan.settings["main_training_function"])


def _import_file(name: str) -> ModuleType:
    """Import a script under its own name: ``if __name__ == "__main__"`` does not run, and pickle finds its classes."""
    path = Path(name).resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{name} cannot be imported as a module, which --tpu requires. Give a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
