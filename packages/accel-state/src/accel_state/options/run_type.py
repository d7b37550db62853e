"""Where a job runs, and the type of the distributed run."""

from __future__ import annotations

from dataclasses import dataclass

from ..enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from .declaration import OptionGroup, option

LOCAL_TYPES = tuple(DistributedType.list())
PARALLEL_TYPES = tuple(name for name in LOCAL_TYPES if name.startswith("MULTI_"))
ACCELERATED_TYPES = tuple(name for name in PARALLEL_TYPES if name != DistributedType.MULTI_CPU.value)
CLOUD_TYPES = tuple(SageMakerDistributedType.list())


@dataclass(frozen=True)
class RunOptions(OptionGroup):
    """The type of run."""

    title = "type of run"
    description = "Usually set by a configuration file. Left out, it is derived from the other options and the machine."

    compute_environment: str = option(
        ComputeEnvironment.LOCAL_MACHINE.value,
        choices=ComputeEnvironment.list(),
        # Numbers, as the first versions of this format wrote them.
        synonyms={"0": "LOCAL_MACHINE", "1": "AMAZON_SAGEMAKER"},
        help="LOCAL_MACHINE: this machine, or several of your own. AMAZON_SAGEMAKER: a SageMaker training job.",
        question="In which compute environment are you running?",
    )
    distributed_type: str | None = option(
        choices=(*LOCAL_TYPES, *(name for name in CLOUD_TYPES if name not in LOCAL_TYPES)),
        synonyms={"TPU": "XLA", "MPS": "NO"},
        metavar="TYPE",
        help="DEEPSPEED, FSDP, MEGATRON_LM, XLA and MULTI_CPU have the effect of --use_deepspeed, --use_fsdp, "
        "--use_megatron_lm, --tpu and --cpu. DATA_PARALLEL and MODEL_PARALLEL are for SageMaker. The other types "
        "follow from the device and the number of processes, and do not have to be set.",
        question="Which type of machine are you using?",
    )
