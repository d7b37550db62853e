"""All option groups, in the order of the help text."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from .cloud import SageMakerOptions, TpuOptions
from .core import CheckpointingOptions, CoreOptions, DynamoOptions
from .declaration import Option, OptionGroup
from .deepspeed import DeepSpeedOptions
from .fault_tolerance import FaultToleranceOptions
from .fp8 import FP8Options
from .fsdp import FsdpOptions
from .launch import HardwareOptions, ParadigmOptions, RunOptions, ScriptOptions
from .parallelism import MegatronOptions, ParallelismOptions
from .rendezvous import MpiOptions, RendezvousOptions
from .resources import ResourceOptions
from .torchrun import TorchrunOptions


def load_groups() -> tuple[type[OptionGroup], ...]:
    """Return all groups."""
    return (
        *(ScriptOptions, RunOptions, HardwareOptions, ResourceOptions, CoreOptions, DynamoOptions, ParadigmOptions),
        *(RendezvousOptions, TorchrunOptions, FaultToleranceOptions, MpiOptions, DeepSpeedOptions),
        *(CheckpointingOptions, FsdpOptions, ParallelismOptions, MegatronOptions, FP8Options),
        *(TpuOptions, SageMakerOptions),
    )


@functools.cache
def all_options() -> Mapping[str, Option]:
    """Return the options of all groups by their names."""
    return {opt.name: opt for group in load_groups() for opt in group.options()}
