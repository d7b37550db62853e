"""Settings that the Accelerator reads in every launched process: precision, accumulation, compilation."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..enums import DynamoBackend
from ..ports import parse_listening_address
from .declaration import OptionGroup, option
from .fsdp import CHECKPOINTING_MODES
from .launch import PARALLEL_TYPES

PRECISIONS = ("no", "fp16", "bf16", "fp8")


def parse_monitor_port(text: str) -> str:
    """Check ``PORT`` or ``ADDRESS:PORT``."""
    parse_listening_address(text)
    return text


@dataclass(frozen=True)
class CoreOptions(OptionGroup):
    """Precision, gradient accumulation, CPU-only runs and checks of collectives."""

    title = "training"
    description = (
        "Passed to every process in its environment. A mixed_precision given in the script takes precedence; its "
        "gradient_accumulation_steps do not."
    )

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
    hang_report_seconds: float = option(
        60.0,
        minimum=0,
        exported=True,
        metavar="SECONDS",
        help="Print what every rank is doing once a rank has been in one collective this long. 0: never.",
    )
    monitor: bool = option(
        False,
        exported=True,
        help="Measure what the time of every rank is spent on; `accel monitor` and `accel goodput` show it. Needs "
        "accel-monitor: pip install 'accel[monitor]'.",
    )
    monitor_port: str | None = option(
        parser=parse_monitor_port,
        exported=True,
        metavar="[ADDRESS:]PORT",
        help="Measure the run as with --monitor, and serve it on the machine of rank 0: metrics for Prometheus, and "
        "the page of `accel monitor HOST:PORT`. Listens on the loopback interface unless an address is given, and asks "
        "for the token in monitor/token of the project directory.",
    )


_UNSHARDED = {
    "distributed_type": ("NO", *PARALLEL_TYPES),
    **dict.fromkeys(("use_deepspeed", "use_fsdp", "use_megatron_lm"), (False,)),
}
_CHECKPOINTED = {"activation_checkpointing": (True,)}
_checkpointing = functools.partial(
    option,
    prefix="activation_checkpointing_",
    env_prefix="ACCELERATE_ACTIVATION_CHECKPOINTING_",
    exported=True,
)


@dataclass(frozen=True)
class CheckpointingOptions(OptionGroup):
    """Activation checkpointing where models are not sharded."""

    title = "activation checkpointing"
    description = "In one process and with DDP; FSDP and meshes have options of their own (--fsdp_activation_...)."

    activation_checkpointing: bool = option(
        False,
        exported=True,
        help="Recompute the activations of a model's blocks in the backward pass instead of storing them.",
        question="Should activations be recomputed in the backward pass (less memory, more time)?",
        asked_when=_UNSHARDED,
    )
    activation_checkpointing_blocks: str | None = _checkpointing(
        separated=True,
        metavar="NAMES",
        help="Class names of the blocks, separated by commas, such as BertLayer. Left out, the model's "
        "_no_split_modules.",
        question="What are the classes of the blocks, separated by commas (empty: the model's _no_split_modules)?",
        asked_when=_CHECKPOINTED,
    )
    activation_checkpointing_mode: str | None = _checkpointing(
        choices=CHECKPOINTING_MODES,
        help="What activation checkpointing recomputes: all of a block (full), or all except for matrix products, "
        "convolutions and attention (selective).",
        question="Should everything be recomputed (full), or all except for matrix products and attention (selective)?",
        asked_when=_CHECKPOINTED,
        suggested="full",
    )
    activation_checkpointing_every: int | None = _checkpointing(
        minimum=1,
        metavar="N",
        help="Checkpoint one of every N blocks, beginning with the first.",
        question="Of how many blocks should one be checkpointed (1 for all)?",
        asked_when=_CHECKPOINTED,
        suggested=1,
    )
    activation_checkpointing_offload: bool = _checkpointing(
        False,
        help="Keep the inputs of checkpointed blocks in host memory, copied while blocks compute.",
        question="Should the inputs of checkpointed blocks be kept in host memory?",
        asked_when={**_CHECKPOINTED, "activation_checkpointing_mode": ("full",)},
    )


_BACKENDS = tuple(DynamoBackend.__members__)  # the names are also the values
_COMPILED = {"dynamo_backend": _BACKENDS[1:]}  # all but NO
_dynamo_option = functools.partial(
    option, section="dynamo_config", prefix="dynamo_", env_prefix="ACCELERATE_DYNAMO_", exported=True
)
_compiled = functools.partial(_dynamo_option, asked_when=_COMPILED, suggested=False)


@dataclass(frozen=True)
class DynamoOptions(OptionGroup):
    """How models are compiled. A value of None means "not set"."""

    title = "compilation"
    description = "How torch.compile compiles the models that the script prepares."

    backend: str | None = _dynamo_option(
        choices=_BACKENDS,
        other_keys=("dynamo_backend",),
        synonyms={"torhchxla_trace_once": "TORCHXLA_TRACE_ONCE"},
        metavar="BACKEND",
        help="Backend of torch.compile. NO, the default, turns compilation off.",
        question="Which backend of torch.compile should be used (NO turns compilation off)?",
        suggested="NO",
    )
    mode: str | None = _dynamo_option(
        choices=("default", "reduce-overhead", "max-autotune"),
        help="Mode of torch.compile: what it optimizes for.",
        question="Which mode do you want to use?",
        asked_when=_COMPILED,
        suggested="default",
    )
    use_fullgraph: bool | None = _compiled(
        help="Raise an error if a model cannot be compiled as a single graph.",
        question="Must the whole model compile as a single graph?",
    )
    use_dynamic: bool | None = _compiled(
        help="Compile for dynamic shapes, which change from batch to batch.",
        question="Do shapes change from batch to batch?",
    )
    use_regional_compilation: bool | None = _compiled(
        help="Compile the repeated blocks of a model instead of the whole model, which shortens compilation.",
        question="Should only the repeated blocks of a model be compiled (starts much faster)?",
    )
