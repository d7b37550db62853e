"""Engines in a checkpoint: weights and optimizer states under Transformers' names, for any parallel sizes.

``model.safetensors`` and ``optimizer.bin`` have the format of training in one process, so other strategies load them
too. ``megatron_rank<rank>.bin`` has the random number generators of tensor parallelism, and the loss scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from accel.core.types import Gathered
from accel.core.weights_io import MODEL_NAME, SAFE_MODEL_NAME
from accel_checkpoint.names import OPTIMIZER_NAME, CheckpointError, numbered, numbered_files
from accel_checkpoint.parts import Part, WeightsPart
from accel_checkpoint.safetensors_content import safetensors_content
from accel_state import PartialState
from accel_state.errors import ConfigurationError


def own_file(rank: int) -> str:
    """The file of a rank with what has no place in the files of one process."""
    return f"megatron_rank{rank}.bin"


def gather(engines: Sequence[Any], weights: Sequence[dict[str, Any]]) -> Gathered:
    """The files of all engines. A collective call."""
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
    """The loss scalers of dense and of expert parameters, which have the same state; none without fp16."""
    from ._megatron_compat import sub_optimizers

    scalers = [getattr(sub, "grad_scaler", None) for sub in sub_optimizers(engine.optimizer.core)]
    return [scaler for scaler in scalers if scaler is not None]


def _sizes(engine: Any) -> list[int]:
    """The parallel sizes, at which random number generators can be restored."""
    plugin = engine.plugin
    names = ("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size")
    return [PartialState().num_processes, *(getattr(plugin, name) for name in names)]


def plan(reader: Any, engines: Sequence[Any], options: dict[str, Any]) -> list[Callable[[], Any]]:
    """The calls that load the engines, for every rank in the same order."""
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
            from accel_checkpoint.safe_load import read_safetensors

            name = numbered(SAFE_MODEL_NAME, index, "safetensors")
            reader._read_names.add(name)
            weights = read_safetensors(reader.folder / name, "cpu")
        else:
            weights = reader._read(numbered(MODEL_NAME, index, "bin"), mapped=True)
        changes.append(partial(_load_weights, engine, weights, reader.folder))
        if engine.optimizer is not None:
            state = reader._read(numbered(OPTIMIZER_NAME, index, "bin"), mapped=True)
            changes.append(partial(engine.optimizer.load_state_dict, state))
    for own in (own_file(PartialState().process_index), own_file(0)):
        if own in reader.names:
            changes.append(partial(_load_own, engines, reader._read(own)))
            break
    return changes


def _load_weights(engine: Any, weights: dict[str, torch.Tensor], folder: Any) -> None:
    names = {name for pair in engine.table.weights for name in pair.names}
    aliases: dict[int, list[str]] = {}
    for name, parameter in engine.transformers_model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    found = dict(weights)
    for tied in aliases.values():
        known = [name for name in tied if name in weights]
        if known:
            found.update({name: weights[known[0]] for name in tied})
    missing = sorted(names - set(found))
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing[:5])} of {type(engine.transformers_model).__name__}. Load it into the "
            "model that was saved."
        )
    engine.zero_grad()
    engine.load_weights(lambda name: found[name])


def _load_own(engines: Sequence[Any], own: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    for engine in engines:
        if own.get("sizes") == _sizes(engine):
            get_cuda_rng_tracker().set_states(own["rng"])
        if engine.optimizer is not None and own.get("scaler") is not None:
            for scaler in _scalers(engine):
                scaler.load_state_dict(own["scaler"])
