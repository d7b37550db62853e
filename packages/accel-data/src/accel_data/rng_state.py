"""States of the process's global random number generators: torch (CPU), numpy and python.

States are dictionaries by library, in a form that is quick to compare and send: bytes for torch, tuples for the others.
:func:`to_plain` makes them readable for ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RngStates = dict[str, Any]


def capture_rng() -> RngStates:
    """Copy the states of all libraries, which takes about 40 microseconds."""
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (name, keys.tobytes(), *rest),
        "python": random.getstate(),
    }


def restore_rng(states: RngStates) -> None:
    """Set the generators to these states; libraries not in ``states`` stay as they are."""
    if "torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if "numpy" in states:
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    if "python" in states:
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))


def to_plain(states: RngStates) -> dict[str, Any]:
    """Convert to tensors, numbers, lists and tuples."""
    plain = dict(states)
    if "torch" in plain:
        plain["torch"] = torch.frombuffer(bytearray(plain["torch"]), dtype=torch.uint8)
    if "numpy" in plain:
        name, keys, *rest = plain["numpy"]
        plain["numpy"] = (name, torch.from_numpy(np.frombuffer(keys, dtype=np.uint32).astype(np.int64)), *rest)
    if "python" in plain:  # as tensors, since torch reads hundreds of numbers one by one
        version, internal, gauss = plain["python"]
        plain["python"] = (version, torch.tensor(internal), gauss)
    return plain


def from_plain(plain: dict[str, Any]) -> RngStates:
    """Return the inverse of :func:`to_plain`, which wrote lists of numbers before it wrote tensors."""
    states = dict(plain)
    if "torch" in states:
        states["torch"] = states["torch"].numpy().tobytes()
    if "numpy" in states:
        name, keys, *rest = states["numpy"]
        states["numpy"] = (name, np.asarray(keys, dtype=np.uint32).tobytes(), *rest)
    if "python" in states:
        version, internal, gauss = states["python"]
        states["python"] = (
            version,
            tuple(internal.tolist() if isinstance(internal, torch.Tensor) else internal),
            gauss,
        )
    return states


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the generators after the block."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)
