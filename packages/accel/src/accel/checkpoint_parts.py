"""What goes into a checkpoint: a list of files and their contents, gathered before the first is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from accel_data import SeedableRandomSampler, get_sampler
from accel_state import PartialState

from . import rng_state, saving
from .checkpoint_files import (
    LOADER_NAME,
    MANIFEST_MARK,
    OPTIMIZER_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    check_readable,
    custom_file,
    numbered,
    rng_file,
)


def get_pretty_name(obj: Any) -> str:
    """A name for an object in messages: its own, or that of its class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


@dataclass(frozen=True)
class Part:
    """One file.

    Attributes:
        name: of the file.
        value: what it will hold.
        what: whose state this is, for messages; with it, the file is read back once to see that loading it would run no code.
        weights: in the safetensors format.
        each_rank: every rank writes its own, rather than the main process one for all.
    """

    name: str
    value: Any
    what: str = ""
    weights: bool = False
    each_rank: bool = False

    def write(self, target: Any) -> None:
        """Write the contents; see :meth:`write_value`."""
        self.write_value(self.value, target)

    def write_value(self, value: Any, target: Any) -> None:
        """Write contents in this part's format.

        Args:
            value: the contents, or a copy of them.
            target: a path; or, but for weights in the safetensors format, an object with ``write``.
        """
        if self.weights:
            from safetensors.torch import save_file

            save_file(value, target, metadata={"format": "pt"})
        else:
            torch.save(value, target)

    def check(self, path: Any) -> None:
        """Raise CheckpointError if the file that was written could not be loaded again without running code."""
        if self.what:
            check_readable(path, self.what)


def weights_part(index: int, weights: dict[str, Any], safe_serialization: bool) -> Part:
    """The weights of a model.

    Raises:
        ConfigurationError: weights that safetensors cannot hold.
    """
    if not safe_serialization:
        return Part(numbered(saving.MODEL_NAME, index, "bin"), weights)
    return Part(numbered(saving.SAFE_MODEL_NAME, index, "safetensors"), saving.safetensors_content(weights), weights=True)


def custom_part(index: int, obj: Any) -> Part:
    """The state of a registered object."""
    return Part(custom_file(index), obj.state_dict(), f"the registered object {index} ({get_pretty_name(obj)})")


def collect(
    model_states: Sequence[dict[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: torch.amp.GradScaler | None,
    safe_serialization: bool,
    with_manifest: bool = False,
) -> list[Part]:
    """Everything but registered objects; see :func:`accel.checkpointing.save_accelerator_state`. Every rank must call it."""
    parts = [weights_part(index, weights, safe_serialization) for index, weights in enumerate(model_states)]
    for stem, objects in ((OPTIMIZER_NAME, optimizers), (SCHEDULER_NAME, schedulers)):
        parts += [Part(numbered(stem, index, "bin"), obj.state_dict(), f"{stem} {index}") for index, obj in enumerate(objects)]
    loader_parts, positions = _loader_parts(dataloaders)
    parts += loader_parts
    if scaler is not None:
        parts.append(Part(SCALER_NAME, scaler.state_dict()))
    # Beyond the position, a loader's state has generators, which are this rank's own; so each rank keeps all of it.
    own = {"step": step, **rng_state.capture(PartialState().device_backend), "dataloaders": positions}
    marked = {**own, MANIFEST_MARK: True} if with_manifest else own
    return [*parts, Part(rng_file(process_index), marked, each_rank=True)]


def _loader_parts(dataloaders: Sequence[Any]) -> tuple[list[Part], dict[int, dict[str, Any]]]:
    parts: list[Part] = []
    positions: dict[int, dict[str, Any]] = {}
    for index, loader in enumerate(dataloaders):
        sampler = get_sampler(loader)
        if isinstance(sampler, SeedableRandomSampler):
            parts.append(Part(numbered(SAMPLER_NAME, index, "bin"), {"initial_seed": sampler.initial_seed, "epoch": sampler.epoch}))
        if hasattr(loader, "state_dict"):
            positions[index] = loader.state_dict()
            parts.append(Part(numbered(LOADER_NAME, index, "bin"), positions[index], f"dataloader {index}"))
    return parts, positions


def of_this_rank(parts: Sequence[Part], is_writer: bool) -> list[Part]:
    """The parts that this rank writes.

    Args:
        parts: of :func:`collect`.
        is_writer: whether this process writes what is common to all.
    """
    return [part for part in parts if is_writer or part.each_rank]


def copied(parts: Sequence[Part], copy: Callable[[Any], Any]) -> list[Part]:
    """The parts with copies of their contents."""
    return [replace(part, value=copy(part.value)) for part in parts]
