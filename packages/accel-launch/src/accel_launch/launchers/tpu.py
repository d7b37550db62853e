"""The cores of one TPU host: torch_xla starts a process for each, which calls a function of the script."""

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
from accel_state.errors import ConfigurationError, require

from ..entrypoint import Target
from ..interpreter import python_command
from ..launch_commands import plan_of
from ..launch_mode import Kind
from ..plan import Plan
from .base import Launcher, Start


class TpuLauncher(Launcher):
    """Calls a function of the script on every core of this host."""

    def accepts(self, plan: Plan) -> bool:
        """A TPU, not a pod of several hosts."""
        return plan.kind is Kind.TPU

    def run(self, plan: Plan) -> int:
        """Have torch_xla start the processes, and wait for them."""
        rank = _rank(plan)
        require("torch_xla", purpose="starting processes on a TPU", install="torch_xla[tpu]")
        launcher = require(
            "torch_xla.distributed.xla_multiprocessing", purpose="starting processes on a TPU", install="torch_xla[tpu]"
        )
        # Found before anything is started, and once: on every core the same message would come again.
        rank.find_function()
        with patch_environment(**plan.environment, **tpu_variables(plan)):
            # Forked processes would share the connection that this one may have made to the TPU.
            launcher.spawn(rank, args=(), nprocs=plan.asks("num_processes"), start_method="spawn")
        return 0

    def starts(self, plan: Plan) -> Sequence[Start]:
        """One process for each core; torch_xla tells it which one it is."""
        rank = _rank(plan)
        count = plan.asks("num_processes") or "as many processes as there are cores"
        command = plan.target.command(python_command())
        note = (
            f"torch_xla starts {count}, each of which imports the script and calls its function {rank.function_name}()"
        )
        return [Start("this machine", command, {**plan.environment, **tpu_variables(plan)}, notes=[note])]


def tpu_variables(plan: Plan) -> dict[str, str]:
    """What torch_xla reads, as far as the settings say."""
    variables = {"PJRT_DEVICE": "TPU"} if "PJRT_DEVICE" not in plan.full_environment() else {}
    if plan.settings["mixed_precision"] == "bf16":
        variables["XLA_DOWNCAST_BF16" if plan.asks("downcast_bf16") else "XLA_USE_BF16"] = "1"
    return variables


def prepare_tpu(
    args: argparse.Namespace, current_env: Mapping[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """What a launch on a TPU adds to an environment.

    Args:
        args: options of ``accel launch`` by name, with ``training_script``; returned as they are.
        current_env: the environment to add to; it is not changed.
        pod: whether the script is started on every host of a pod, which changes nothing of the variables.

    Raises:
        ConfigurationError: a value is wrong.
    """
    wanted = argparse.Namespace(**{**vars(args), "tpu": True, "tpu_use_cluster": pod or None})
    return args, {**current_env, **tpu_variables(plan_of(wanted))}


class TpuRank:
    """What every process runs; it can be pickled.

    Args:
        target: the script or module.
        function_name: the function that it calls.
    """

    def __init__(self, target: Target, function_name: str) -> None:
        self.target = target
        self.function_name = function_name

    def __call__(self, index: int) -> None:
        """Import the script, and call its function."""
        sys.argv = [self.target.name, *self.target.args]
        self.find_function()()

    def find_function(self) -> Callable[[], Any]:
        """The function of the script.

        Raises:
            ConfigurationError: the script has none of this name.
        """
        module = (
            importlib.import_module(self.target.name)
            if self.target.kind == "module"
            else _import_file(self.target.name)
        )
        function = getattr(module, self.function_name, None)
        if not callable(function):
            raise ConfigurationError(
                f"{self.target.name} has no function {self.function_name!r}, which every core of the TPU would call. "
                "Define it, or name "
                "another "
                "one with --main_training_function."
            )
        found: Callable[[], Any] = function
        return found


def _rank(plan: Plan) -> TpuRank:
    if plan.target.kind == "executable":
        raise ConfigurationError(
            "--no_python and --tpu contradict each other: on a TPU a function of a Python script is called. Give one "
            "of them."
        )
    return TpuRank(plan.target, plan.settings["main_training_function"])


def _import_file(name: str) -> ModuleType:
    """Import a script under its own name: what stands under ``if __name__ == "__main__"`` does not run, and pickle
    finds the rest.
    """
    path = Path(name).resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{name} cannot be imported as a module, which --tpu does. Give a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
