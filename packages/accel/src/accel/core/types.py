"""Data classes that strategies, sharded checkpoints and the checkpointer share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from accel_checkpoint.parts import Part


@dataclass(frozen=True)
class Layout:
    """How the tensors of a model are distributed over the ranks."""

    model: nn.Module  # the prepared model
    # its weights and buffers by name: DTensors, or plain tensors where every rank has the full tensor
    tensors: Mapping[str, torch.Tensor]
    ties: Sequence[Sequence[str]] = ()  # groups of names that refer to the same parameter
    # the saved shapes of the parameters that are held in another shape; see :mod:`accel.core.fused_dtensor`
    packed: Mapping[str, torch.Size] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()  # names in the full model that only other pipeline stages have
    # with pipeline stages, the local name of each parameter by its name in the full model
    local_names: Mapping[str, str] = field(default_factory=dict)

    def shape(self, name: str) -> torch.Size:
        """Return the shape in which a tensor is saved."""
        return self.packed.get(name, self.tensors[name].shape)


@dataclass(frozen=True)
class Gathered:
    """Models and optimizers that a strategy has prepared for writing in files of its own format."""

    parts: list[Part] = field(default_factory=list)  # the files that this rank writes
    # called on the main process with the checkpoint directory, after every rank has written its parts
    finalizers: list[Callable[[Path], None]] = field(default_factory=list)
