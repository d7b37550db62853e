"""The states of the random number generators of a rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_state.devices.base import Device

from .names import CheckpointError, require_number

_HOST_KEYS = ("random_state", "numpy_random_seed", "torch_manual_seed")


def capture_rng(device: Device) -> dict[str, Any]:
    """Return the state of the generators of python, numpy, torch and the device: tensors and plain values only."""
    version, words, gauss = random.getstate()
    kind, keys, *position = np.random.get_state()
    state: dict[str, Any] = {
        # As tensors: torch reads 1,249 numbers one by one in more than a millisecond, and an array that one version of
        # numpy writes, another may not read.
        "random_state": (version, torch.tensor(words), gauss),
        "numpy_random_seed": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *position),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if device.name != "cpu":
        state[f"torch_{device.name}_manual_seed"] = device.get_rng_state_all()
        state["device_index"] = device.current().index or 0
    return state


def restoring_rng(state: Any, device: Device, path: Path, new_rank: int | None = None) -> Callable[[], None]:
    """Return the call that restores the generators to a state of :func:`capture_rng`, which has been checked.

    Args:
        state: the state.
        device: of this process.
        path: its file, for messages.
        new_rank: the number of a rank that did not exist when the state was saved: it gets a seed of its own.

    Raises:
        CheckpointError: generators cannot be restored to this state.
    """
    if new_rank is not None:
        return _seeding_new_rank(state, new_rank, device, path)
    missing = set(_HOST_KEYS).difference(state if isinstance(state, dict) else ())
    if missing:
        names = ", ".join(key for key in _HOST_KEYS if key in missing)
        raise CheckpointError(f"{path} does not hold the state of random number generators: {names} missing.")
    try:
        # As numbers, whether they are a tensor or, in earlier checkpoints, numbers.
        (version, words, gauss), (kind, keys, *position) = state["random_state"], state["numpy_random_seed"]
        of_python = version, tuple(torch.as_tensor(words).tolist()), gauss
        of_numpy = kind, torch.as_tensor(keys).tolist(), *position
        random.Random().setstate(of_python)
        np.random.RandomState().set_state(of_numpy)
        torch.Generator().set_state(state["torch_manual_seed"])
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{path} holds a damaged state of random number generators: {error}") from error
    of_device = state.get(f"torch_{device.name}_manual_seed")
    if device.name != "cpu":
        if of_device is None:
            raise CheckpointError(
                f"{path} has no state of the generators of {device.name} devices: it was saved on another kind of "
                "device, so training cannot continue with the same random numbers. Load it on that kind, or load only "
                "the model."
            )
        index = require_number(state.get("device_index", 0), f"{path}: device_index")
        is_list = isinstance(of_device, (list, tuple))
        if not is_list or not (index < len(of_device) or len(of_device) == device.device_count()):
            raise CheckpointError(
                f"{path} holds a damaged state of the random number generators of {device.name} devices."
            )

    def restore() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(state["torch_manual_seed"])
        if device.name == "cpu":
            return
        try:
            if len(of_device) == device.device_count():
                device.set_rng_state_all(of_device)
            else:  # this process sees another number of devices than when it was saved, and uses its own
                device.set_rng_state(of_device[state.get("device_index", 0)])
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"{path} holds a damaged state of random number generators: {error}") from error

    return restore


def _seeding_new_rank(base: Any, rank: int, device: Device, path: Path) -> Callable[[], None]:
    state = base.get("torch_manual_seed") if isinstance(base, dict) else None
    if not isinstance(state, torch.Tensor):
        raise CheckpointError(f"{path} does not hold the state of random number generators: torch_manual_seed missing.")
    # Different for every rank and every state, the same whenever that state is loaded.
    digest = hashlib.sha256(state.numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") & (2**63 - 1)

    def set_seed() -> None:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.manual_seed(seed)
        device.manual_seed_all(seed)

    return set_seed
