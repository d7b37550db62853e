"""Runs a function on the cores of a TPU, from a notebook of Colab or Kaggle, or of a TPU host."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accel_state.env import patch_environment, read_str
from accel_state.errors import require

_TPU_VARIABLES = ("TPU_NAME", "COLAB_TPU_ADDR", "TPU_ACCELERATOR_TYPE")


def is_on_tpu() -> bool:
    """Whether this session has a TPU, and torch_xla to use it with."""
    has_tpu = read_str("PJRT_DEVICE") == "TPU" or any(read_str(name) for name in _TPU_VARIABLES)
    return has_tpu and importlib.util.find_spec("torch_xla") is not None


def run_on_tpu(
    function: Callable[..., Any], args: Sequence[Any], num_processes: int | None, environment: Mapping[str, str]
) -> None:
    """Call the function on one core, or on all of them (``num_processes=None``), in forks of this process.

    Forks share memory with this process, so a model among ``args`` is in memory once.
    """
    launcher = require(
        "torch_xla.distributed.xla_multiprocessing", purpose="starting processes on a TPU", install="torch_xla[tpu]"
    )
    print(f"Launching training on {num_processes or 'all'} TPU cores.", flush=True)
    with patch_environment(**{"PJRT_DEVICE": "TPU", "FORK_LAUNCHED": "1", **environment}):
        launcher.spawn(_CoreFunction(function), args=tuple(args), nprocs=num_processes, start_method="fork")


class _CoreFunction:
    """Drops the core's number, which torch_xla passes as the first argument."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, index: int, *args: Any) -> None:
        self._function(*args)
