"""All option groups, in the order of the help text."""

from __future__ import annotations

from ..registry import Registry
from .declaration import OptionGroup

_CLASSES = {
    "script": "script:ScriptOptions",
    "kind_of_run": "run_type:RunOptions",
    "hardware": "hardware:HardwareOptions",
    "resources": "resources:ResourceOptions",
    "core": "core:CoreOptions",
    "dynamo": "dynamo:DynamoOptions",
    "paradigm": "engine_switches:ParadigmOptions",
    "rendezvous": "rendezvous:RendezvousOptions",
    "mpi": "mpi:MpiOptions",
    "deepspeed": "deepspeed:DeepSpeedOptions",
    "fsdp": "fsdp:FsdpOptions",
    "parallelism": "parallelism:ParallelismOptions",
    "megatron": "megatron:MegatronOptions",
    "fp8": "fp8:FP8Options",
    "tpu": "tpu:TpuOptions",
    "sagemaker": "sagemaker:SageMakerOptions",
}
OPTION_GROUPS: Registry[type[OptionGroup]] = Registry(
    "option group", {name: f"accel_state.options.{target}" for name, target in _CLASSES.items()}
)


def load_groups() -> tuple[type[OptionGroup], ...]:
    """All groups."""
    return tuple(OPTION_GROUPS.load(name) for name in OPTION_GROUPS)
