"""The names of a checkpoint's files. Torch-free, for the command line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from accel_state.errors import AccelError

OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
LOADER_NAME = "dl_state_dict"
CUSTOM_NAME = "custom_checkpoint"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
MANIFEST_NAME = "accel_manifest.json"

FSDP_MODEL_NAME = "pytorch_model_fsdp"
SHARD_TABLE_NAME = ".metadata"
SHARD_SUFFIX = ".distcp"

MODEL_FOLDER = "pytorch_model"
_OF_AN_ENGINE = re.compile(rf"({MODEL_FOLDER}(?:_[1-9]\d*)?)/[^/]+\.pt")

_OF_A_STATE = re.compile(
    r"(model(_\d+)?\.safetensors|(pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt"
    r"|(pytorch_model_fsdp|optimizer)(_\d+)?(_rank\d+)?\.bin|(pytorch_model_fsdp|optimizer)_\d+/(\.metadata|__\d+_\d+\.distcp)"
    r"|(random_states|custom_checkpoint)_\d+\.pkl|gradients_\d+\.bin|" + re.escape(MANIFEST_NAME) + r")"
)


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint that could not be written, or one that is not whole, is damaged, or does not fit what it is loaded
    into.
    """


def numbered(stem: str, index: int, suffix: str) -> str:
    """The file name of the object with this index: the first one has no number."""
    return f"{stem}.{suffix}" if index == 0 else f"{stem}_{index}.{suffix}"


def rng_file(rank: int) -> str:
    """The file name of a rank's random number generators."""
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def custom_file(index: int) -> str:
    """The file name of the registered object with this index."""
    return f"{CUSTOM_NAME}_{index}.pkl"


def is_file_of_a_state(name: str) -> bool:
    """Whether saving a state could have given a file this name."""
    return _OF_A_STATE.fullmatch(name) is not None


def numbered_files(names: Iterable[str], stem: str, suffix: str) -> list[str]:
    """Those of the names that :func:`numbered` could have given, in alphabetical order."""
    pattern = re.compile(rf"{re.escape(stem)}(_[1-9][0-9]*)?\.{re.escape(suffix)}")
    return sorted(filter(pattern.fullmatch, names))


def custom_files(names: Iterable[str]) -> list[str]:
    """Those of the names that :func:`custom_file` could have given."""
    return sorted(name for name in names if re.fullmatch(rf"{CUSTOM_NAME}_[0-9]+\.pkl", name))


def holds_shards(names: Iterable[str]) -> bool:
    """Whether any file of a checkpoint is of a strategy that divides models among ranks."""
    return any(name.startswith(FSDP_MODEL_NAME) or name.endswith((SHARD_TABLE_NAME, SHARD_SUFFIX)) for name in names)


def engine_folders(names: Iterable[str]) -> list[str]:
    """The folders that DeepSpeed's engines have saved their models to, by the models' index."""
    found = {match[1] for match in map(_OF_AN_ENGINE.fullmatch, names) if match}
    return sorted(found, key=lambda tag: int(tag.removeprefix(MODEL_FOLDER).removeprefix("_") or 0))


def holds_engines(names: Iterable[str]) -> bool:
    """Whether DeepSpeed has saved the models of a checkpoint."""
    return bool(engine_folders(names))


def require_files(folder: Path, names: Iterable[str], known: Collection[str] | None = None) -> None:
    """Raise CheckpointError, which lists them, if files are missing, or are not among those that are known to belong
    there.
    """
    missing = [name for name in names if not (folder / name).is_file() or (known is not None and name not in known)]
    if missing:
        raise CheckpointError(
            f"{folder} cannot be loaded: it has no {', '.join(missing)}. Prepare and register the same objects, on as "
            "many processes, as "
            "when it was saved, or choose another checkpoint."
        )
