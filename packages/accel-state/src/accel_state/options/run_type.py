"""Where a job runs, and which kind of distributed run it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from .option import OptionGroup, option

LOCAL_TYPES = tuple(DistributedType.list())
PARALLEL_TYPES = tuple(name for name in LOCAL_TYPES if name.startswith("MULTI_"))
ACCELERATED_TYPES = tuple(name for name in PARALLEL_TYPES if name != DistributedType.MULTI_CPU.value)
CLOUD_TYPES = tuple(SageMakerDistributedType.list())


@dataclass(frozen=True)
class RunOptions(OptionGroup):
    """The kind of run."""

    title: ClassVar[str] = "kind of run"
    description: ClassVar[str] = (
        "Mostly set by a configuration file; left out, it follows from the other options and from the machine."
    )

    compute_environment: str = option(
        ComputeEnvironment.LOCAL_MACHINE.value,
        kind=str,
        choices=ComputeEnvironment.list(),
        env="ACCELERATE_COMPUTE_ENVIRONMENT",
        # Numbers, as the first versions of this format wrote them.
        synonyms={"0": "LOCAL_MACHINE", "1": "AMAZON_SAGEMAKER"},
        help="LOCAL_MACHINE: this machine and those beside it. AMAZON_SAGEMAKER: a SageMaker training job.",
        question="In which compute environment are you running?",
    )
    distributed_type: str | None = option(
        None,
        kind=str,
        choices=(*LOCAL_TYPES, *(name for name in CLOUD_TYPES if name not in LOCAL_TYPES)),
        synonyms={"TPU": "XLA", "MPS": "NO"},
        env="ACCELERATE_DISTRIBUTED_TYPE",
        metavar="TYPE",
        help="DEEPSPEED, FSDP, MEGATRON_LM and XLA stand for --use_deepspeed, --use_fsdp, --use_megatron_lm and "
        "--tpu, MULTI_CPU for "
        "--cpu; DATA_PARALLEL and MODEL_PARALLEL are for SageMaker. The others say nothing that the number of "
        "processes does not say.",
        question="Which type of machine are you using?",
    )
