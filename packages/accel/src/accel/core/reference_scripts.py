"""Modules that were written for Accelerate, for which ``load_state``, and ``gather`` on a mesh, keep their meaning.

The package ``accelerate`` of accel-compat adds the modules that take ``Accelerator`` from it.
"""

from __future__ import annotations

from typing import Any

from accel_state.errors import ConfigurationError

_known: set[str] = set()


def add(module: str) -> None:
    """Note that a module takes its names from ``accelerate``."""
    _known.add(module)


def are_written_in(module: str) -> bool:
    """Whether a module takes its names from ``accelerate``."""
    return module in _known


def check_trainer(module: str, strategy: Any) -> None:
    """Refuse sequences split by heads in Transformers' Trainer, whose loss of them needs DeepSpeed's groups.

    It also counts the steps of DeepSpeed's loaders, which have a batch for each rank of the axis.

    Args:
        module: the name of the module that creates an Accelerator.
        strategy: the Accelerator's.
    """
    mesh = strategy.active_plugins.get("mesh")
    if module == "transformers.trainer" and not strategy.uses_engine and mesh is not None and mesh.size("sp") > 1:
        raise ConfigurationError(
            f"sp_size={mesh.size('sp')}: Transformers' Trainer computes the loss of sequences that are "
            "split by heads with DeepSpeed's process groups only. Set cp_size instead, or use DeepSpeed "
            "(TrainingArguments(deepspeed=...))."
        )
