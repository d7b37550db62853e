"""All option groups, in the order of the help text."""

from __future__ import annotations

import functools

from ..registry import Registry
from .declaration import OptionGroup

_CLASSES = {
    "script": "launch:ScriptOptions",
    "kind_of_run": "launch:RunOptions",
    "hardware": "launch:HardwareOptions",
    "resources": "resources:ResourceOptions",
    "core": "core:CoreOptions",
    "dynamo": "core:DynamoOptions",
    "paradigm": "launch:ParadigmOptions",
    "rendezvous": "rendezvous:RendezvousOptions",
    "torchrun": "torchrun:TorchrunOptions",
    "fault_tolerance": "fault_tolerance:FaultToleranceOptions",
    "mpi": "rendezvous:MpiOptions",
    "deepspeed": "deepspeed:DeepSpeedOptions",
    "checkpointing": "core:CheckpointingOptions",
    "fsdp": "fsdp:FsdpOptions",
    "parallelism": "parallelism:ParallelismOptions",
    "megatron": "parallelism:MegatronOptions",
    "fp8": "fp8:FP8Options",
    "tpu": "cloud:TpuOptions",
    "sagemaker": "cloud:SageMakerOptions",
}
OPTION_GROUPS: Registry[type[OptionGroup]] = Registry(
    "option group", {name: f"accel_state.options.{target}" for name, target in _CLASSES.items()}
)


@functools.cache
def load_groups() -> tuple[type[OptionGroup], ...]:
    """Return all groups."""
    return tuple(map(OPTION_GROUPS.load, OPTION_GROUPS))
