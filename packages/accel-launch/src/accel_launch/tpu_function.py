"""Runs a function on the chips of a TPU, from a notebook of Colab or Kaggle, or of a TPU host."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from accel_state.env import patch_environment, read_str
from accel_state.errors import ConfigurationError, require

from .errors import LaunchError

_TPU_VARIABLES = ("PJRT_DEVICE", "TPU_NAME", "COLAB_TPU_ADDR", "TPU_ACCELERATOR_TYPE")

_call: tuple[Callable[..., Any], Sequence[Any]] | None = None
"""The function to run and its arguments, which forks inherit: pickled, a model would be in memory once for each."""


def is_on_tpu() -> bool:
    """Return True if this session has a TPU, or another XLA device, and torch_xla to use it with."""
    return any(read_str(name) for name in _TPU_VARIABLES) and importlib.util.find_spec("torch_xla") is not None


def run_on_tpu(
    function: Callable[..., Any], args: Sequence[Any], num_processes: int | None, environment: Mapping[str, str]
) -> None:
    """Call the function on one chip, or on all of them (``num_processes=None``), in forks of this process.

    Forks share memory with this process, so a model among ``args`` is in memory once.

    Raises:
        ConfigurationError: an XLA device is in use in this process already.
        LaunchError: a process died.
    """
    global _call
    count = processes_to_start(num_processes)
    launcher = require_launcher()
    from accel_state._torch_compat import xla_has_started

    if count is None and xla_has_started():
        raise ConfigurationError(
            "this process already uses an XLA device, so the launcher's processes could not. "
            "Restart the notebook, and use XLA devices within the function only."
        )
    print(f"Launching training on {'one TPU chip' if count == 1 else 'all TPU chips'}.", flush=True)
    default = {} if read_str("PJRT_DEVICE") else {"PJRT_DEVICE": "TPU"}
    _call = function, args
    try:
        with patch_environment(**{"FORK_LAUNCHED": "1", **default, **environment}):
            launcher.spawn(_run_call, nprocs=count, start_method="fork")
    except BrokenProcessPool as error:
        raise LaunchError(
            "a process on the TPU died, usually because memory ran out. Create the model outside of "
            "the function and pass it as an argument, so that it is in memory once: notebook_launcher(train, (model,))."
        ) from error
    finally:
        _call = None


def processes_to_start(num_processes: int | None) -> int | None:
    """Return what torch_xla's launcher takes: 1, or None for a process on each chip."""
    return 1 if num_processes == 1 else None


def require_launcher() -> Any:
    """Return the module of torch_xla that starts processes."""
    return require(
        "torch_xla.distributed.xla_multiprocessing",
        purpose="starting processes on a TPU",
        install="accel-state[xla]",
    )


def _run_call(index: int) -> None:
    """Drop the number of the process, which torch_xla passes as the first argument."""
    assert _call is not None
    function, args = _call
    function(*args)
