"""The configurations that ``accel plan --auto`` chooses from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.hardware import HardwareProfile

from .models import model_config
from .plan import PlanRequest

AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp", "pp")
NONE, SELECTIVE, FULL = "no", "selective", "full"
_SHORTEST_PART = 1024
"""Tokens of a sequence that a rank gets at least under cp and sp: shorter parts are all messages."""


@dataclass(frozen=True)
class Candidate:
    """A configuration.

    Attributes:
        axes: the size of each of :data:`AXES`.
        batch_size: of the loader, on each data rank.
        steps: of gradient accumulation.
        checkpointing: of activations: NONE, SELECTIVE or FULL.
        precision: a value of ``--mixed_precision``.
        micro_batches: of a pipeline.
        schedule: of a pipeline.
    """

    axes: Mapping[str, int]
    batch_size: int
    steps: int
    checkpointing: str
    precision: str
    micro_batches: int = 1
    schedule: str = ""

    @property
    def shards(self) -> int:
        """Number of ranks that FSDP shards parameters over."""
        return self.axes["dp_shard"] * self.sequence

    @property
    def sequence(self) -> int:
        """Number of ranks that each sequence is split over."""
        return self.axes["cp"] * self.axes["sp"]

    @property
    def split(self) -> int:
        """Number of ranks that the model is divided over besides."""
        return self.axes["tp"] * self.axes["pp"]

    @property
    def family(self) -> tuple[int, ...]:
        """What configurations have in common that differ in batches, sharding and checkpointing only."""
        return tuple(self.axes[axis] for axis in AXES[2:])

    def values(self) -> dict[str, Any]:
        """Values of the options of ``accel launch``."""
        hybrid = self.axes["dp_replicate"] > 1 and self.shards > 1
        meshed = hybrid or any(self.axes[axis] > 1 for axis in AXES[2:])
        values: dict[str, Any] = {
            "mixed_precision": self.precision,
            "gradient_accumulation_steps": self.steps,
            "use_fsdp": meshed or self.shards > 1,
            "use_parallelism_config": meshed,
        }
        if values["use_fsdp"]:
            values |= {
                "fsdp_version": 2,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_activation_checkpointing": self.checkpointing != NONE,
            }
            if self.checkpointing == SELECTIVE:
                values["fsdp_activation_checkpointing_mode"] = SELECTIVE
        if meshed:
            values |= {f"parallelism_config_{axis}_size": size for axis, size in self.axes.items()}
        return values

    def describe(self) -> str:
        """Return one line."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.axes.items() if size > 1) or "one process"
        batch = f"batch {self.batch_size}"
        if self.steps > 1:
            batch += f" x {self.steps} steps"
        if self.axes["pp"] > 1:
            batch += f" in {self.micro_batches} micro batches, {self.schedule}"
        return f"{axes}, {batch}, checkpointing {self.checkpointing}, precision {self.precision}"


@dataclass(frozen=True)
class Shape:
    """Sizes of a model that its meshes depend on."""

    blocks: int
    hidden: int
    heads: int
    key_heads: int
    head: int  # the width of one
    vocabulary: int


def shape_of(request: PlanRequest) -> Shape:
    """Of the model of a plan.

    Raises:
        ConfigurationError: its configuration does not say one.
    """
    whole = model_config(request.model, request.trust_remote_code)
    config = getattr(whole, "get_text_config", lambda: whole)()
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    numbers: list[int] = []
    for name in names:
        number = getattr(config, name, None)
        if not isinstance(number, int):
            raise ConfigurationError(
                f"--auto: the configuration of {request.model} has no {name}, on which the sizes of a mesh depend. "
                "Plan configurations one by one, without --auto."
            )
        numbers.append(number)
    blocks, hidden, heads, vocabulary = numbers
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return Shape(blocks, hidden, heads, key_heads, getattr(config, "head_dim", None) or hidden // heads, vocabulary)


def candidates(
    request: PlanRequest, shape: Shape, hardware: HardwareProfile, processes: int, samples: int, length: int
) -> Iterator[Candidate]:
    """Yield all configurations in which every size divides what it has to.

    Args:
        request: whose settings give the precision if it is set; otherwise it is the faster one.
        shape: of the model.
        hardware: of the devices: tensor parallelism stays in a node.
        processes: number of devices.
        samples: of an optimizer step of all ranks.
        length: tokens of a sample.
    """
    precision, node = _precision(request, hardware), hardware.devices_per_node
    tensor = [size for size in _powers(node) if shape.heads % size == shape.key_heads % size == 0]
    pipeline = [size for size in _powers(shape.blocks) if shape.blocks % size == 0]
    # A pipeline combines with tensor parallelism, and with replicas.
    splits = [
        (tp, cp, sp, 1) for tp in tensor for cp, sp in _sequence_sizes(shape.heads // tp, node // tp, processes, length)
    ]
    splits += [(tp, 1, 1, pp) for tp in tensor for pp in pipeline[1:]]
    for tp, cp, sp, pp in splits:
        data, rest = divmod(processes, tp * cp * sp * pp)
        if rest or not data or samples % data:
            continue
        for shard in _shard_sizes(data, node // (tp * cp * sp), pipeline=pp > 1):
            axes = dict(zip(AXES, (data // shard, shard, cp, sp, tp, pp), strict=True))
            yield from _batches(axes, samples // data, precision, shape)


def _sequence_sizes(heads: int, node: int, processes: int, length: int) -> Iterator[tuple[int, int]]:
    """Sizes of cp, which exchanges keys and values, and of sp, which divides the heads and stays in a node."""
    for size in _powers(processes):
        if size == 1:
            yield 1, 1
        elif length // size >= _SHORTEST_PART:
            if length % (2 * size) == 0:
                yield size, 1
            if length % size == heads % size == 0 and size <= node:
                yield 1, size


def _shard_sizes(data: int, in_node: int, pipeline: bool) -> list[int]:
    """No sharding, sharding in a node, and over all data ranks. A pipeline's memory is only followed without."""
    if pipeline:
        return [1]
    return [size for size in sorted({1, max(in_node, 1), data}) if data % size == 0]


def _precision(request: PlanRequest, hardware: HardwareProfile) -> str:
    """Return the one that was given, or else the faster one of the device."""
    settings = request.settings
    if settings.is_set("mixed_precision"):
        return str(settings["mixed_precision"])
    flops = hardware.flops
    return "bf16" if flops.get("bf16", 0) > flops.get("fp32", 0) else "no"


def _batches(axes: Mapping[str, int], samples: int, precision: str, shape: Shape) -> Iterator[Candidate]:
    """Micro batches and checkpointing for a mesh with so many samples on each data rank."""
    stages = axes["pp"]
    for checkpointing in (NONE, SELECTIVE, FULL) if any(axes[axis] > 1 for axis in AXES[1:]) else (NONE,):
        if stages == 1:
            for batch in _divisors(samples):
                yield Candidate(axes, batch, samples // batch, checkpointing, precision)
            continue
        # A pipeline accumulates gradients by itself, and its bubble shrinks with the number of micro batches.
        for count in (count for count in _divisors(samples) if count >= stages):
            yield Candidate(axes, samples, 1, checkpointing, precision, count, "1f1b")
            if count % stages == shape.blocks % (2 * stages) == 0:
                yield Candidate(axes, samples, 1, checkpointing, precision, count, "interleaved1f1b")


def _powers(limit: int) -> list[int]:
    """Powers of two up to a number."""
    return [1 << power for power in range(limit.bit_length())]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
