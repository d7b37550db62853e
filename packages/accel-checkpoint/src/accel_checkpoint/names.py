"""Names of the files of a checkpoint, and settings of where checkpoints are saved. Torch-free, for the command line."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable
from pathlib import Path

from accel_state.errors import AccelError
from accel_state.paths import leads_outside

OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
LOADER_NAME = "dl_state_dict"
CUSTOM_NAME = "custom_checkpoint"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
RNG_PACK = f"{RNG_STATE_NAME}.zip"
GRADIENTS_NAME = "gradients"
MANIFEST_NAME = "accel_manifest.json"

FSDP_MODEL_NAME = "pytorch_model_fsdp"
AVERAGE_NAME = "moving_average"
SHARD_TABLE_NAME = ".metadata"
SHARD_SUFFIX = ".distcp"
SAFETENSORS_SUFFIX = ".safetensors"

# The directory that a DeepSpeed engine saves its model to.
MODEL_FOLDER = "pytorch_model"

# An automatically named checkpoint.
NUMBERED = re.compile(r"checkpoint_([0-9]+)")

# The file of a registered object, and that of a rank's open accumulation windows.
CUSTOM_FILE = re.compile(rf"{CUSTOM_NAME}_[0-9]+\.pkl")
GRADIENTS_FILE = re.compile(rf"{GRADIENTS_NAME}_[0-9]+\.bin")

# A file of a strategy that shards models.
SHARD_FILE = re.compile(rf"^{FSDP_MODEL_NAME}|({re.escape(SHARD_TABLE_NAME)}|{re.escape(SHARD_SUFFIX)})$")
_ENGINE_FILE = re.compile(rf"({MODEL_FOLDER}(?:_[1-9]\d*)?)/[^/]+\.pt")
_CHECKPOINT_FOLDER = re.compile(rf"({FSDP_MODEL_NAME}|{AVERAGE_NAME}|{OPTIMIZER_NAME})_\d+|{MODEL_FOLDER}(_[1-9]\d*)?")
_CHECKPOINT_FILE = re.compile(
    r"((model|moving_average)(_\d+)?\.safetensors|(pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt"
    r"|(pytorch_model_fsdp|moving_average|optimizer)(_\d+)?(_rank\d+)?\.bin"
    r"|(pytorch_model_fsdp|moving_average|optimizer)_\d+/(\.metadata|__\d+_\d+\.distcp)"
    r"|(random_states|custom_checkpoint)_\d+\.pkl|random_states\.zip|gradients_\d+\.bin|"
    + re.escape(MANIFEST_NAME)
    + r")"
)


# Counters up to here are the same in every reader of JSON, and no run reaches it.
_MAX_NUMBER = 2**53


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint cannot be written, or is incomplete, damaged, or does not fit the objects it is loaded into."""


def numbered(stem: str, index: int, suffix: str) -> str:
    """Return the file name of the object with this index; index 0 has no number."""
    return f"{stem}.{suffix}" if index == 0 else f"{stem}_{index}.{suffix}"


def numbered_files(names: Iterable[str], stem: str, suffix: str) -> list[str]:
    """Return the names that :func:`numbered` gives for a stem, in alphabetical order."""
    pattern = re.compile(rf"{re.escape(stem)}(_[1-9][0-9]*)?\.{re.escape(suffix)}")
    return sorted(filter(pattern.fullmatch, names))


def rng_file(rank: int) -> str:
    """Return the file name of a rank's random number generators."""
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def gradients_file(rank: int) -> str:
    """Return the file name of a rank's open accumulation windows."""
    return f"{GRADIENTS_NAME}_{rank}.bin"


def custom_file(index: int) -> str:
    """Return the file name of the registered object with this index."""
    return f"{CUSTOM_NAME}_{index}.pkl"


def is_checkpoint_file(name: str) -> bool:
    """Return True if ``save_state`` gives files this name."""
    return _CHECKPOINT_FILE.fullmatch(name) is not None


def files_without_manifest(directory: Path) -> list[str]:
    """Return the files of a checkpoint without a manifest, as relative POSIX paths.

    Raises:
        CheckpointError: one of them is a link that leads outside of the directory. Other such links are left out.
    """
    names = []
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() and leads_outside(directory, name):
            if any(pattern.fullmatch(name) for pattern in (_CHECKPOINT_FILE, _ENGINE_FILE, _CHECKPOINT_FOLDER)):
                raise CheckpointError(
                    f"{path} is a link that leads outside of the checkpoint. It is not loaded. Replace the link by the "
                    "file (`cp -rL` copies a directory this way)."
                )
        elif path.is_file():
            names.append(name)
    return names


def engine_folders(names: Iterable[str]) -> list[str]:
    """Return the directories that DeepSpeed engines have saved their models to, by model index."""
    tags = {match[1] for match in map(_ENGINE_FILE.fullmatch, names) if match}
    return sorted(tags, key=lambda tag: int(tag.removeprefix(MODEL_FOLDER).removeprefix("_") or 0))


def require_files(directory: Path, names: Iterable[str], known: Collection[str] | None = None) -> None:
    """Raise CheckpointError, which lists them, if files are missing, or not among the ``known`` ones."""
    missing = []
    for name in names:
        if not (directory / name).is_file() or (known is not None and name not in known):
            missing.append(name)
    if missing:
        raise CheckpointError(
            f"{directory} cannot be loaded: it has no {', '.join(missing)}. Prepare and register the same objects, on "
            "as many processes, as when it was saved, or choose another checkpoint."
        )


def require_number(value: object, what: str, minimum: int = 0) -> int:
    """Return a counter of a checkpoint, which must be a whole number within bounds; CheckpointError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_NUMBER:
        raise CheckpointError(
            f"{what} is {reprlib.repr(value)}, not a whole number from {minimum} to {_MAX_NUMBER}. Choose another "
            "checkpoint."
        )
    return value
