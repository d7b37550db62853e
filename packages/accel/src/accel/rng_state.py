"""The random number generators of a process, as a checkpoint keeps them."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_state.devices.base import Device

from .checkpoint_files import CheckpointError

_HOST_KEYS = ("random_state", "numpy_random_seed", "torch_manual_seed")


def capture(device: Device) -> dict[str, Any]:
    """The state of python's, numpy's, torch's and the devices' generators: tensors and plain values only."""
    state: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": _plain(np.random.get_state()),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if device.name != "cpu":
        state[_device_key(device)] = device.get_rng_state_all()
        state["device_index"] = device.current().index or 0
    return state


def _plain(numpy_state: Any) -> Any:
    """The state of numpy's generator without arrays, which one version of numpy writes so that another cannot read them."""
    return tuple(part.tolist() if isinstance(part, np.ndarray) else part for part in numpy_state)


def _device_key(device: Device) -> str:
    return f"torch_{device.name}_manual_seed"


def restore(state: Any, device: Device, path: Path) -> None:
    """Put generators back to a state of :func:`capture`.

    Args:
        state: what was read from ``path``.
        device: the device that this process computes on.
        path: for messages.

    Raises:
        CheckpointError: this is not such a state; the message names the file.
    """
    missing = [key for key in _HOST_KEYS if not isinstance(state, dict) or key not in state]
    if missing:
        raise CheckpointError(f"{path} does not hold the state of random number generators: {', '.join(missing)} missing.")
    try:
        random.setstate(state["random_state"])
        np.random.set_state(state["numpy_random_seed"])
        torch.set_rng_state(state["torch_manual_seed"])
        if device.name != "cpu":
            _restore_device(state, device, path)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} holds a damaged state of random number generators: {error}") from error


def seed_new_rank(base: Any, rank: int, device: Device, path: Path) -> None:
    """Seed the generators of a rank that did not exist when the state was saved.

    Its seed is made of the first 8 bytes of SHA-256 over the state that torch's generator has in ``base``, followed by the rank as 8
    bytes (little endian): another one for every rank and every state, and the same whenever that state is loaded. python's and
    torch's generators, and those of the devices, are seeded with all of its 63 lower bits, numpy's with the lowest 32.

    Args:
        base: the state of the lowest rank that was saved.
        rank: this rank.
        device: the device that this process computes on.
        path: of ``base``, for messages.

    Raises:
        CheckpointError: ``base`` is not such a state.
    """
    state = base.get("torch_manual_seed") if isinstance(base, dict) else None
    if not isinstance(state, torch.Tensor):
        raise CheckpointError(f"{path} does not hold the state of random number generators: torch_manual_seed missing.")
    digest = hashlib.sha256(state.numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") & (2**63 - 1)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    device.manual_seed_all(seed)


def _restore_device(state: dict[str, Any], device: Device, path: Path) -> None:
    states = state.get(_device_key(device))
    if states is None:
        raise CheckpointError(
            f"{path} has no state of the generators of {device.name} devices: it was saved on another kind of device, so training cannot "
            "go on with the same random numbers. Load it there, or load the model alone."
        )
    if len(states) == device.device_count():
        device.set_rng_state_all(states)
    else:  # another number of devices is visible to this process; its own is what matters
        device.set_rng_state(states[state.get("device_index", 0)])
