"""The fp32 master weights of an engine, which its optimizer updates and of which ZeRO gives each rank a part.

The parameters of the model are copies of them, in the precision that the model computes in.

====== =====================================================================================================
stage  master weights
====== =====================================================================================================
0      the parameters themselves
1, 2   this rank's part of each parameter group, flat, in ``single_partition_of_fp32_groups``
3      this rank's part of each subgroup of parameters, flat, in ``fp32_partitioned_groups_flat``
====== =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from accel_state.errors import ConfigurationError

from ..core.checksum import sum_of_bits
from ..core.unwrap import clean_name
from .universal import set_shard

_PARTS = {
    "DeepSpeedZeroOptimizer": "single_partition_of_fp32_groups",
    "DeepSpeedZeroOptimizer_Stage3": "fp32_partitioned_groups_flat",
}
_CHUNK = 1 << 22  # values that are cast and compared at a time


def updates_parameters(engine: Any) -> bool:
    """Return True if the optimizer updates the parameters of the model themselves (stage 0)."""
    return isinstance(engine.optimizer, Optimizer)


def shards_gradients(engine: Any) -> bool:
    """Return True if the engine's optimizer is one of ZeRO, which keeps gradients itself."""
    return type(engine.optimizer).__name__ in _PARTS


def master_parts(engine: Any) -> dict[str, torch.Tensor]:
    """Return this rank's parts of the master weights, in their memory, by name.

    Raises:
        ConfigurationError: moving averages have not been compared with one process for this engine.
    """
    if engine.basic_optimizer is None:
        raise ConfigurationError(
            f"the {type(engine.module).__name__} was prepared without an optimizer, so that DeepSpeed has no weights "
            "to average. Pass model and optimizer to one call of prepare()."
        )
    if updates_parameters(engine):
        return {clean_name(name): parameter for name, parameter in engine.module.named_parameters()}
    kind = type(engine.optimizer).__name__
    on_drive = [name for name in ("optimizer", "param") if _device(engine, name) == "nvme"]
    if kind not in _PARTS or on_drive:
        what = f"offload_{on_drive[0]} to NVMe" if on_drive else f"DeepSpeed's {kind}"
        raise ConfigurationError(
            f"moving averages of weights have not been compared with one process for {what}. Use ZeRO stage 1, 2 or 3 "
            "with states in memory, or stage 0 in fp32."
        )
    parts = getattr(engine.optimizer, _PARTS[kind])
    return {f"flat partition {number}": part for number, part in enumerate(parts)}


def _device(engine: Any, what: str) -> str:
    settings = getattr(engine._config.zero_config, f"offload_{what}", None)
    return "" if settings is None else str(getattr(settings.device, "value", settings.device))


def checksums(engine: Any) -> list[int]:
    """Return sums of the bits of this rank's parts of the weights, which change when a script writes into them.

    Versions of parameters do not tell: ``parameter.data.clamp_()`` keeps them.
    """
    if type(engine.optimizer).__name__ not in _PARTS:
        return []
    sums = [sum_of_bits(copy) for copy, _ in _flat_pairs(engine.optimizer)]
    found: list[int] = torch.stack(sums).tolist() if sums else []
    return found


def check_unchanged(engine: Any, expected: Sequence[int] | None) -> None:
    """Refuse a step that would overwrite weights that the script has changed with the master weights.

    Args:
        engine: of DeepSpeed.
        expected: the :func:`checksums` after the last step; None before the first one. Only where others are found are
            the weights compared with the master weights: these may be on the host, and loading a checkpoint changes
            both.

    Raises:
        ConfigurationError: a weight of this rank differs from its master weight.
    """
    optimizer, kind = engine.optimizer, type(engine.optimizer).__name__
    if kind not in _PARTS:
        return
    replaced = _replaced(optimizer)
    if not replaced and (checksums(engine) == expected or all(_equal(*pair) for pair in _flat_pairs(optimizer))):
        return
    for name, parameter in engine.module.named_parameters():
        # NaN is unequal to itself, so that a model with a NaN gets here without a change.
        if id(parameter) in replaced or not all(
            torch.allclose(copy, master.to(copy), rtol=0, atol=0, equal_nan=True)
            for copy, master in _pairs(optimizer, parameter)
        ):
            raise ConfigurationError(
                f"{clean_name(name)} was changed outside of the optimizer. DeepSpeed at ZeRO stage "
                f"{int(engine.zero_optimization_stage())} would lose the change: a step updates fp32 master weights, "
                "and copies them into the parameters. Initialise weights before prepare(), and set weight_decay of "
                "the optimizer for a decay. To change weights between steps, use DDP or FSDP 2."
            )


def _replaced(optimizer: Any) -> set[int]:
    """Return the ids of parameters of stages 1 and 2 that a script has moved out of DeepSpeed's memory."""
    if not hasattr(optimizer, "bit16_groups_flat"):
        return set()
    found: set[int] = set()
    for flat, parameters in zip(optimizer.bit16_groups_flat, optimizer.bit16_groups, strict=True):
        begin = flat.data_ptr()
        end = begin + flat.nbytes
        found.update(id(item) for item in parameters if item.numel() and not begin <= item.data_ptr() < end)
    return found


def _equal(copy: torch.Tensor, master: torch.Tensor) -> bool:
    """Return True if a part equals its master weights. Takes chunks, as a cast part would double the memory."""
    chunks = zip(copy.split(_CHUNK), master.detach().split(_CHUNK), strict=True)
    return all(torch.equal(values, masters.to(values)) for values, masters in chunks)


def _flat_pairs(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's parts of the weights that the model computes with, and what a step makes them of."""
    if hasattr(optimizer, "parallel_partitioned_bit16_groups"):  # stages 1 and 2
        for number, master in enumerate(optimizer.single_partition_of_fp32_groups):
            rank = torch.distributed.get_rank(optimizer.real_dp_process_group[number])
            yield optimizer.parallel_partitioned_bit16_groups[number][rank], master
        return
    for copy, master in zip(
        optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
    ):
        if copy is not None and copy.numel() == master.numel():  # otherwise one of them is on a drive
            yield copy, master
    # Small parameters stay gathered, in memory of their own.
    gathered = [item for item in optimizer.persistent_parameters if item.ds_status.name == "AVAILABLE"]
    if gathered:
        parts = [_own_part(parameter) for parameter in gathered]
        shards = [item.ds_tensor[: part.numel()] for item, part in zip(gathered, parts, strict=True)]
        yield torch.cat(parts), torch.cat(shards)


def _own_part(parameter: Any) -> torch.Tensor:
    """Return the values of a gathered parameter that this rank keeps in its shard."""
    size = parameter.ds_tensor.ds_numel
    flat: torch.Tensor = parameter.data.flatten()
    return flat[size * torch.distributed.get_rank(parameter.ds_process_group) :][:size]


def _pairs(optimizer: Any, parameter: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's values of one parameter, and what a step makes them of."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:
        start, size = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
        yield parameter.data.flatten()[start : start + size], mapping.get_hp_fragment().detach().flatten()
    if hasattr(parameter, "ds_tensor"):
        shard = parameter.ds_tensor.detach().flatten()
        if parameter.requires_grad:
            master, _ = optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)
            size = min(shard.numel(), master.numel())
            yield shard[:size], master.detach().flatten()[:size]
        if parameter.ds_status.name == "AVAILABLE":
            part = _own_part(parameter)
            yield part, shard[: part.numel()]


def refresh_parameters(engine: Any) -> None:
    """Copy the master weights into the parameters, as a step does. Every rank must call it."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "update_lp_params"):  # stages 1 and 2
        optimizer.update_lp_params()
    elif not updates_parameters(engine):
        optimizer.checkpoint_event_prologue()  # frees gathered parameters
        for number in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer.checkpoint_event_epilogue()  # gathers those that stay so


def whole_weights(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole master weights with the names of their parameters. Every rank must read all of them."""
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and (whole := safe_get_full_fp32_param(parameter)) is not None:
            yield clean_name(name), whole


def set_whole_weights(engine: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Write this rank's parts of whole weights, given by the names of their parameters, into the master weights."""
    from deepspeed.utils import safe_set_full_fp32_param

    for name, parameter in engine.module.named_parameters():
        whole = weights.get(clean_name(name))
        if whole is None or not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):  # DeepSpeed's own function does not allow for padding
            part, _ = engine.optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)
            set_shard(part, whole.flatten())
        else:
            safe_set_full_fp32_param(parameter, whole)
