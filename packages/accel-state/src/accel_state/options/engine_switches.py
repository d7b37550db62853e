"""Which engine shards or splits the model."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .declaration import OptionGroup, option
from .run_type import PARALLEL_TYPES

_switch = functools.partial(option, exported=True)


@dataclass(frozen=True)
class ParadigmOptions(OptionGroup):
    """At most one engine; FSDP can be combined with a device mesh."""

    title = "training engine"
    description = (
        "At most one of DeepSpeed, FSDP and Megatron-LM. Left out, every process holds a full copy of the model."
    )

    use_deepspeed: bool = _switch(
        False,
        implied_by=("distributed_type", ("DEEPSPEED",)),
        help="Train with DeepSpeed.",
        question="Do you want to use DeepSpeed?",
        asked_when={"distributed_type": ("NO", *PARALLEL_TYPES)},
    )
    use_fsdp: bool = _switch(
        False,
        implied_by=("distributed_type", ("FSDP",)),
        help="Train with PyTorch FullyShardedDataParallel.",
        question="Do you want to use FullyShardedDataParallel?",
        asked_when={"distributed_type": PARALLEL_TYPES, "use_deepspeed": (False,)},
    )
    use_megatron_lm: bool = _switch(
        False,
        implied_by=("distributed_type", ("MEGATRON_LM",)),
        help="Train with Megatron-LM.",
        question="Do you want to use Megatron-LM?",
        asked_when={"distributed_type": PARALLEL_TYPES, "use_deepspeed": (False,), "use_fsdp": (False,)},
    )
    use_parallelism_config: bool = _switch(
        False,
        implied_by=("parallelism_config", ()),
        help="Arrange the processes as a device mesh of the sizes below; implied by a parallelism_config in a file.",
        question="Do you want to combine several kinds of parallelism (a device mesh)?",
        asked_when={"use_fsdp": (True,)},
    )
