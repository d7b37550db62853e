"""The parts of a run that time is divided into. Torch-free."""

from __future__ import annotations

from enum import IntEnum


class Part(IntEnum):
    """What a rank is doing. Every moment of a process belongs to exactly one part."""

    STARTUP = 0
    """From the start of the process to the first batch."""
    DATA = 1
    """Waiting for a batch of a training loader."""
    FORWARD = 2
    """Forward pass, and with an Accelerator the loss."""
    BACKWARD = 3
    """Backward pass up to the last gradient of this rank; without an Accelerator also the loss."""
    WAITING = 4
    """Waiting for other ranks, and communication that computation does not hide."""
    OPTIMIZER = 5
    """The optimizer's step."""
    SAVING = 6
    """Saving a state."""
    LOADING = 7
    """Loading a state."""
    EVALUATION = 8
    """Evaluation: forward passes without gradients, and waiting for their batches."""
    COMPILING = 9
    """torch.compile."""
    OTHER = 10
    """Everything else in the loop: schedulers, logging, metrics."""


NAMES = [part.name.lower() for part in Part]
STEP_PARTS = (Part.DATA, Part.FORWARD, Part.BACKWARD, Part.WAITING, Part.OPTIMIZER, Part.OTHER)
"""The parts of a training step."""
