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

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from accel_state.errors import ConfigurationError

from ..core.unwrap import clean_name
from .universal import set_shard

_PARTS = {
    "DeepSpeedZeroOptimizer": "single_partition_of_fp32_groups",
    "DeepSpeedZeroOptimizer_Stage3": "fp32_partitioned_groups_flat",
}


def updates_parameters(engine: Any) -> bool:
    """Return True if the optimizer updates the parameters of the model themselves (stage 0)."""
    return isinstance(engine.optimizer, Optimizer)


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
