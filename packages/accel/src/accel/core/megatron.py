"""Names of accel-megatron (the extra ``megatron``), imported when first used."""

from __future__ import annotations

from typing import Any

from accel_state.errors import require

_NAMES = (
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMPlugin",
    "T5TrainStep",
    "avg_losses_across_data_parallel_group",
    "gather_across_data_parallel_groups",
)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(require("accel_megatron", purpose=f"accel.utils.{name}", install="accel[megatron]"), name)
