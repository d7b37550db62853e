"""What the Accelerator reads back in every launched process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .option import OptionGroup, option

PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class CoreOptions(OptionGroup):
    """Precision, accumulation, and whether to stay on the CPU and to check collectives."""

    title: ClassVar[str] = "training"
    description: ClassVar[str] = (
        "Handed to every process in its environment; a mixed_precision in the script wins over it."
    )

    mixed_precision: str | None = option(
        None,
        kind=str,
        choices=PRECISIONS,
        env="ACCELERATE_MIXED_PRECISION",
        exported=True,
        help="Mixed precision of the training. Left out, the script decides, and full precision is what it gets by "
        "default.",
        question="Do you wish to use mixed precision?",
        asked_when={"deepspeed_config_file": (None,)},
        suggested="no",
    )
    gradient_accumulation_steps: int | None = option(
        None,
        kind=int,
        minimum=1,
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        exported=True,
        other_keys=("deepspeed_config.gradient_accumulation_steps",),
        metavar="K",
        help="Batches whose gradients are summed before an optimizer step.",
        question="Over how many batches should gradients be accumulated?",
        asked_when={"use_deepspeed": (True,), "deepspeed_config_file": (None,)},
        suggested=1,
    )
    cpu: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_USE_CPU",
        key="use_cpu",
        exported=True,
        implied_by=("distributed_type", ("MULTI_CPU",)),
        help="Train on the CPU even where there is an accelerator.",
        question="Do you want to train on the CPU only, even if there is a GPU?",
        asked_when={"distributed_type": ("NO",)},
    )
    debug: bool = option(
        False,
        kind=bool,
        env="ACCELERATE_DEBUG_MODE",
        exported=True,
        help="Check shapes, dtypes and structure in every collective (slow), and show the log of torch's elastic "
        "agent.",
        question="Should distributed operations be checked while running for errors? This can avoid time-outs but is "
        "slower.",
    )
