"""Every group of options, in the order of the help."""

from __future__ import annotations

from ..registry import Registry
from .option import OptionGroup

OPTION_GROUPS: Registry[type[OptionGroup]] = Registry(
    "option group",
    {
        "script": "accel_state.options.script:ScriptOptions",
        "kind_of_run": "accel_state.options.run_type:RunOptions",
        "hardware": "accel_state.options.hardware:HardwareOptions",
        "resources": "accel_state.options.resources:ResourceOptions",
        "core": "accel_state.options.core:CoreOptions",
        "dynamo": "accel_state.options.dynamo:DynamoOptions",
        "paradigm": "accel_state.options.engine_switches:ParadigmOptions",
        "rendezvous": "accel_state.options.rendezvous:RendezvousOptions",
        "mpi": "accel_state.options.mpi:MpiOptions",
        "deepspeed": "accel_state.options.deepspeed:DeepSpeedOptions",
        "fsdp": "accel_state.options.fsdp:FsdpOptions",
        "parallelism": "accel_state.options.parallelism:ParallelismOptions",
        "megatron": "accel_state.options.megatron:MegatronOptions",
        "fp8": "accel_state.options.fp8:FP8Options",
        "tpu": "accel_state.options.tpu:TpuOptions",
        "sagemaker": "accel_state.options.sagemaker:SageMakerOptions",
    },
)


def load_groups() -> tuple[type[OptionGroup], ...]:
    """All groups."""
    return tuple(OPTION_GROUPS.load(name) for name in OPTION_GROUPS)
