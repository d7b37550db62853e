"""Settings that the Accelerator reads in every launched process."""

from __future__ import annotations

from dataclasses import dataclass

from .declaration import OptionGroup, option

PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class CoreOptions(OptionGroup):
    """Precision, gradient accumulation, CPU-only runs and checks of collectives."""

    title = "training"
    description = "Passed to every process in its environment. A mixed_precision given in the script takes precedence."

    mixed_precision: str | None = option(
        choices=PRECISIONS,
        exported=True,
        help="Mixed precision of the training. Left out, the script decides; its default is full precision.",
        question="Do you wish to use mixed precision?",
        asked_when={"deepspeed_config_file": (None,)},
        suggested="no",
    )
    gradient_accumulation_steps: int | None = option(
        minimum=1,
        exported=True,
        other_keys=("deepspeed_config.gradient_accumulation_steps",),
        metavar="K",
        help="Number of batches whose gradients are accumulated before each optimizer step.",
        question="Over how many batches should gradients be accumulated?",
        asked_when={"use_deepspeed": (True,), "deepspeed_config_file": (None,)},
        suggested=1,
    )
    cpu: bool = option(
        False,
        env="ACCELERATE_USE_CPU",
        key="use_cpu",
        exported=True,
        implied_by=("distributed_type", ("MULTI_CPU",)),
        help="Train on the CPU even if an accelerator is available.",
        question="Do you want to train on the CPU only, even if a GPU is available?",
        asked_when={"distributed_type": ("NO",)},
    )
    debug: bool = option(
        False,
        env="ACCELERATE_DEBUG_MODE",
        exported=True,
        help="Check shapes, dtypes and structure before every collective (slow); show the log of the elastic agent.",
        question="Should distributed operations be checked while running for errors? This can avoid time-outs but is "
        "slower.",
    )
