"""Engines in a checkpoint: weights and optimizer states under Transformers' names, for any parallel sizes.

``model.safetensors`` and ``optimizer.bin`` have the format of training in one process, so other strategies load them
too. ``megatron_rank<rank>.bin`` has the random number generators of tensor parallelism, and the loss scale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel.core.types import Gathered
from accel.core.weights_io import MODEL_NAME, SAFE_MODEL_NAME
from accel_checkpoint.names import OPTIMIZER_NAME, CheckpointError, numbered, numbered_files, require_number
from accel_checkpoint.parts import Part, WeightsPart
from accel_checkpoint.safe_load import read_safetensors
from accel_checkpoint.validation import is_number
from accel_state import PartialState
from accel_state.errors import ConfigurationError
from accel_state.safetensors_writer import safetensors_content

from .weights import aliases_of, check_parts


def own_file(rank: int) -> str:
    """Return the file of a rank with what has no place in the files of one process."""
    return f"megatron_rank{rank}.bin"


def gather(engines: Sequence[Any], weights: Sequence[dict[str, Any]]) -> Gathered:
    """Return the files of all engines. A collective call."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    gathered, rank = Gathered(), PartialState().process_index
    own: dict[str, Any] = {"rng": dict(get_cuda_rng_tracker().get_states())}
    for index, engine in enumerate(engines):
        if rank == 0:
            gathered.parts.append(
                WeightsPart(numbered(SAFE_MODEL_NAME, index, "safetensors"), safetensors_content(weights[index]))
            )
        if engine.optimizer is not None:
            state = engine.optimizer.state_dict()
            gathered.parts.append(Part(numbered(OPTIMIZER_NAME, index, "bin"), state, f"{OPTIMIZER_NAME} {index}"))
            own["optimizer_names"] = engine.optimizer.groups.names  # which `accel megatron convert` reads
            own["scaler"] = next((scaler.state_dict() for scaler in _scalers(engine)), None)
        own["sizes"] = _sizes(engine)
    gathered.parts.append(Part(own_file(rank), own, each_rank=True))
    return gathered


def _scalers(engine: Any) -> list[Any]:
    """Return the loss scalers of dense and of expert parameters, which have the same state; none without fp16."""
    from ._megatron_compat import sub_optimizers

    scalers = [getattr(sub, "grad_scaler", None) for sub in sub_optimizers(engine.optimizer.core)]
    return [scaler for scaler in scalers if scaler is not None]


def _sizes(engine: Any) -> list[int]:
    """Return the parallel sizes, at which random number generators can be restored."""
    plugin = engine.plugin
    names = ("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size")
    return [PartialState().num_processes, *(getattr(plugin, name) for name in names)]


def plan(reader: Any, engines: Sequence[Any], options: dict[str, Any]) -> list[Callable[[], Any]]:
    """Return the calls that load the engines, for every rank in the same order."""
    unknown = sorted(set(options) - {"strict"})
    if unknown:
        raise ConfigurationError(
            f"load_state got {', '.join(unknown)}, which Megatron-core does not support. It takes strict."
        )
    changes: list[Callable[[], Any]] = []
    safe = numbered_files(reader.names, SAFE_MODEL_NAME, "safetensors")
    saved = safe or numbered_files(reader.names, MODEL_NAME, "bin")
    if not saved and engines:
        raise CheckpointError(
            f"{reader.folder} has no {SAFE_MODEL_NAME}.safetensors: it was saved in shards by another strategy. Merge "
            "them (`accel merge-weights`), and load the weights into the model before prepare()."
        )
    reader.check_count("models", len(saved), len(engines))
    trained = [engine for engine in engines if engine.optimizer is not None]
    reader.check_count("optimizers", len(numbered_files(reader.names, OPTIMIZER_NAME, "bin")), len(trained))
    for index, engine in enumerate(engines):
        if safe:
            name = numbered(SAFE_MODEL_NAME, index, "safetensors")
            reader.read_names.add(name)
            weights = read_safetensors(reader.folder / name, "cpu")
        else:
            name = numbered(MODEL_NAME, index, "bin")
            weights = reader.read(name, mapped=True)
        path = reader.folder / name
        found = _complete(engine, weights, path)
        check_parts(engine.table, found.__getitem__, _shapes_of_model(engine), path)
        changes.append(partial(_load_weights, engine, found))
        if engine.optimizer is not None:
            name = numbered(OPTIMIZER_NAME, index, "bin")
            state = reader.read(name, mapped=True)
            engine.optimizer.check(state, _shapes_of_model(engine), reader.folder / name)
            changes.append(partial(engine.optimizer.load_state_dict, state))
    own = _read_own(reader, engines)
    if own is not None:
        changes.append(partial(_load_own, engines, own))
    return changes


def _read_own(reader: Any, engines: Sequence[Any]) -> dict[str, Any] | None:
    """Return what was saved of this rank; of rank 0 if there were fewer ranks; None if another strategy has saved."""
    names = own_file(PartialState().process_index), own_file(0)
    if not any(re.fullmatch(r"megatron_rank\d+\.bin", name) for name in reader.names):
        return None
    name = names[0] if names[0] in reader.names else names[1]
    own = reader.read(name)
    _check_own(engines, own, reader.folder / name)
    if name != names[0] and any(own["sizes"] == _sizes(engine) for engine in engines):
        raise CheckpointError(f"{reader.folder} lacks {names[0]}. Copy the files of all ranks, or choose another one.")
    return dict(own)


def _shapes_of_model(engine: Any) -> dict[str, torch.Size]:
    """Return the shapes of the model's parameters; empty for a model that the script provides."""
    if not engine.architecture.takes_weights:
        return {}
    model = engine.transformers_model
    return {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}


def _complete(engine: Any, weights: Any, path: Path) -> dict[str, torch.Tensor]:
    """Return saved weights under all names that tied ones have."""
    if not isinstance(weights, dict):
        raise CheckpointError(f"{path} holds a {type(weights).__name__} instead of the weights of a model.")
    names = {name for pair in engine.table.weights for name in pair.names}
    found = dict(weights)
    for tied in aliases_of(engine.transformers_model).values():
        known = [name for name in tied if name in weights]
        if known:
            found.update({name: weights[known[0]] for name in tied})
    missing = sorted(names - set(found))
    if missing:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing[:5])} of {type(engine.transformers_model).__name__}. Load it into the "
            "model that was saved."
        )
    return found


def _load_weights(engine: Any, found: dict[str, torch.Tensor]) -> None:
    engine.zero_grad()
    engine.load_weights(lambda name: found[name])


def _check_own(engines: Sequence[Any], own: Any, path: Path) -> None:
    """Raise CheckpointError if something is not what :func:`gather` saves of a rank."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    def require(holds: bool, problem: str) -> None:
        if not holds:
            raise CheckpointError(f"{path} {problem}. Choose another checkpoint.")

    require(isinstance(own, dict), "is not a dictionary")
    sizes = own.get("sizes")
    require(isinstance(sizes, list) and all(type(size) is int for size in sizes), f"has parallel sizes {sizes!r}")
    for engine in engines:
        if own.get("sizes") == _sizes(engine):
            saved, present = own.get("rng"), get_cuda_rng_tracker().get_states()
            require(isinstance(saved, dict) and saved.keys() == present.keys(), "has other random number generators")
            for name, state in present.items():
                same = isinstance(saved[name], torch.Tensor) and saved[name].shape == state.shape
                require(same and saved[name].dtype == state.dtype, f"has a damaged state of the generator {name}")
        scaler = own.get("scaler")
        for held in _scalers(engine) if engine.optimizer is not None and scaler is not None else ():
            known = held.state_dict()
            require(isinstance(scaler, dict) and known.keys() <= scaler.keys(), "has no state of the loss scale")
            if "scale" in known:
                scale = scaler["scale"]
                fits = isinstance(scale, torch.Tensor) and scale.shape == known["scale"].shape and is_number(scale)
                require(fits and float(scale) > 0, f"has the loss scale {scale!r}")
            for name in known.keys() - {"scale"}:
                require_number(scaler[name], f"{path}: {name}")


def _load_own(engines: Sequence[Any], own: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    for engine in engines:
        if own.get("sizes") == _sizes(engine):
            get_cuda_rng_tracker().set_states(own["rng"])
        if engine.optimizer is not None and own.get("scaler") is not None:
            for scaler in _scalers(engine):
                scaler.load_state_dict(own["scaler"])
