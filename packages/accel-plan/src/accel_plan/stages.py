"""Pipeline stages in a plan: torch's own schedule runs this rank's stages, and received tensors have no values."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call

from accel.parallel.pipeline import TrainingPipeline
from accel_bigmodel.pipeline.recording import record
from accel_bigmodel.pipeline.split import PipelineSplit

from ._torch_compat import fsdp2_units, fsdp2_unsharded_tensors, local_pipeline_stage, local_tensor, storage_id
from .memory import BACKWARD, FORWARD, MemoryTracker
from .record import Recorder, module_storages


@dataclass(frozen=True)
class StageMemory:
    """The peak memory of one rank's stages while a schedule runs them, in bytes."""

    activations: tuple[int, ...]  # by the number of micro batches in flight, from 1
    gathered: int  # gathered parameters and their unsharded gradients


@dataclass
class SharedSplit:
    """What is the same on all ranks of a pipeline: only the first rank that is traced computes it."""

    split: PipelineSplit | None = None
    outputs: tuple[Any, ...] | None = None  # in the dtype that the stages compute in


@dataclass
class StageMonitor:
    """Measures the stages of one rank while a schedule runs them."""

    # Set during a pass:
    recorder: Recorder | None = None
    model: nn.Module | None = None
    in_flight: int = 0  # micro batches between their forward and their backward pass
    activations: dict[int, int] = field(default_factory=dict)  # peak bytes by in_flight
    gathered: int = 0
    shared: SharedSplit = field(default_factory=SharedSplit)
    pipeline: TrainingPipeline | None = None
    tracker: MemoryTracker | None = None

    def enter(self, phase: str) -> None:
        """Begin a forward or a backward pass of a micro batch."""
        if self.tracker is not None:
            self.tracker.enter(phase)

    def label(self, ops: list[dist.P2POp], kind: str) -> list[dist.P2POp]:
        """Record what is sent as messages of a kind."""
        for op in ops:
            if self.recorder is not None:
                self.recorder.label(op.tensor, kind)
        return ops

    def measure(self, before_backward: bool) -> None:
        """Measure the memory before or after a backward pass."""
        if self.recorder is None or self.model is None or self.pipeline is None:
            return
        # The prepared model lacks the outermost modules of the stages, on which fully_shard was called.
        gathered = gathered_storages(self.pipeline.parts.values())
        self.gathered = max(self.gathered, sum(gathered.values()))
        if before_backward:
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            excluded = {*module_storages(self.model), *gathered}
            excluded.update(storage_id(local_tensor(gradient)) for gradient in gradients)
            live = sum(size for key, size in self.recorder.live_storages().items() if key not in excluded)
            self.activations[self.in_flight] = max(self.activations.get(self.in_flight, 0), live)

    def result(self) -> StageMemory:
        """Return the peaks so far."""
        numbers = range(1, max(self.activations, default=0) + 1)
        return StageMemory(tuple(self.activations.get(number, 0) for number in numbers), self.gathered)


@contextmanager
def recording_pass(monitor: StageMonitor, model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Record one forward and backward pass of a pipeline."""
    monitor.recorder, monitor.model, monitor.in_flight = recorder, model, 0
    recorder.default_kind = "tied gradients"
    try:
        yield
    finally:
        monitor.recorder = monitor.model = None


class SimulatedPipeline(TrainingPipeline):
    """A pipeline that is monitored, and asks no other rank for what this one can tell.

    Args:
        monitor: measures its stages.
        args, settings: those of TrainingPipeline.
    """

    def __init__(self, monitor: StageMonitor, *args: Any, **settings: Any) -> None:
        monitor.pipeline = self
        self.monitor: StageMonitor = monitor
        self.stage_class: Callable[..., Any] = functools.partial(monitored_stage_class(), monitor)
        super().__init__(*args, **settings)

    def split_model(self, *args: Any) -> PipelineSplit:
        """Return the split of the first call, since the same model is split in the same way on every rank."""
        shared = self.monitor.shared
        if shared.split is None:
            shared.split = super().split_model(*args)
        return shared.split

    def outputs_of_example(self, model: nn.Module, forward: Any, example: tuple[Any, Any]) -> Sequence[Any]:
        """Return all calls' outputs in the stages' dtype, since no other rank can report them here."""
        if self.compute_dtype is None:
            return self.split.outputs
        shared = self.monitor.shared
        if shared.outputs is None:
            dtype, named = self.compute_dtype, dict(model.named_parameters())
            cast = {name: item.to(dtype) if item.is_floating_point() else item for name, item in named.items()}

            def cast_forward(*args: Any, **kwargs: Any) -> Any:
                return functional_call(model, cast, args, {**forward.keywords, **kwargs})

            units = {name: model.get_submodule(name) for name in self.split.units}
            shared.outputs = tuple(record(model, cast_forward, units, *example).outputs)
        return shared.outputs

    def share(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Broadcast the last rank's loss, assuming that it is a scalar rather than exchanging its shape."""
        loss = torch.zeros((), device=self.device) if tensor is None else tensor.contiguous()
        dist.broadcast(loss, group_src=self.size - 1, group=self.group)
        return loss


def monitored_stage_class() -> Any:
    """Return a PipelineStage that measures memory around its backward passes and labels its messages."""
    base: Any = local_pipeline_stage()

    class MonitoredStage(base):
        def __init__(self, monitor: StageMonitor, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.monitor = monitor

        def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            self.monitor.enter(FORWARD)
            output = super().forward_one_chunk(*args, **kwargs)
            self.monitor.in_flight += 1
            return output

        def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            self.monitor.enter(BACKWARD)
            self.monitor.measure(before_backward=True)
            result = super().backward_one_chunk(*args, **kwargs)
            self.monitor.in_flight -= 1
            self.monitor.measure(before_backward=False)
            return result

        def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
            return self.monitor.label(super().get_fwd_send_ops(fwd_chunk_id), "activations")

        def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
            return self.monitor.label(super().get_bwd_send_ops(bwd_chunk_id), "gradients")

    return MonitoredStage


def gathered_storages(parts: Iterable[nn.Module]) -> dict[int, int]:
    """Return bytes by storage id of the parameters that fully_shard has gathered, and of their unreduced gradients."""
    sizes: dict[int, int] = {}
    for part in parts:
        for module in part.modules():
            units = fsdp2_units(module) if isinstance(module, FSDPModule) else []
            for tensor in itertools.chain.from_iterable(map(fsdp2_unsharded_tensors, itertools.chain(*units))):
                local = local_tensor(tensor)
                sizes[storage_id(local)] = local.untyped_storage().nbytes()
    return sizes
