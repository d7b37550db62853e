"""Sending chunks through the stages: ``torch.distributed.pipelining`` does, once it can be told the shapes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from accel_state.errors import ConfigurationError
from accel_state.operations import get_data_structure, send_to_device
from accel_state.operations.nested import is_container, leaves

from .sharing import channel
from .stage import Stage

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

_SHAPES_REMEMBERED = 16


@dataclass
class _Known:
    """What a stage learned of one kind of chunk: a schedule for its shapes, or None where they say too little."""

    worker: _Worker | None
    schedules: dict[int, ScheduleGPipe]


class Schedule:
    """Runs the chunks of a batch through the pipeline.

    Chunks of shapes that this pipeline has not seen travel as objects, which tell the next stage their shapes; from the
    second batch on, ``ScheduleGPipe`` moves bare tensors.

    Args:
        stage: the stage of this rank; rank and index are the same.
        count: number of stages.
    """

    def __init__(self, stage: Stage, count: int) -> None:
        self._stage, self._count = stage, count
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def run(self, chunks: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Run chunks of equal shapes; the outputs of all of them on the last rank, nothing elsewhere."""
        key = repr(get_data_structure(chunks[0]))
        known = self._known.get(key)
        if known is None:
            return self._first_time(key, chunks)
        self._known.move_to_end(key)
        if known.worker is None:
            return self._as_objects(chunks)[0]
        return self._scheduled(known.worker, known.schedules, chunks)

    def _first_time(self, key: str, chunks: Sequence[tuple[Any, Any]]) -> list[Any]:
        outputs, received, sent = self._as_objects(chunks)
        plain = not any(_constants(template) for template in self._stage.templates.values())
        # Every rank must decide alike, and only the last but one has seen all templates.
        agreed: list[bool] = [plain]
        dist.broadcast_object_list(agreed, src=self._count - 2, device=channel(self._stage.device))
        self._known[key] = _Known(_Worker(self._stage, self._count, received, sent) if agreed[0] else None, {})
        if len(self._known) > _SHAPES_REMEMBERED:
            self._known.popitem(last=False)
        return outputs

    def _as_objects(
        self, chunks: Sequence[tuple[Any, Any]]
    ) -> tuple[list[Any], list[torch.Tensor], list[torch.Tensor]]:
        stage, outputs = self._stage, []
        tensors: list[torch.Tensor] = []
        sent: list[torch.Tensor] = []
        device = channel(stage.device)
        for args, kwargs in chunks:
            tensors, templates = [], {}
            if stage.index:
                message: list[Any] = [None]
                dist.recv_object_list(message, src=stage.index - 1, device=device)
                tensors, templates = message[0]
                tensors = send_to_device(tensors, stage.device)
            result = stage.run(args, kwargs, dict(zip(stage.received, tensors, strict=True)), templates)
            if stage.index == self._count - 1:
                outputs.append(result)
            else:
                sent = result
                dist.send_object_list(
                    [(send_to_device(sent, "cpu"), stage.templates)], dst=stage.index + 1, device=device
                )
        return outputs, tensors, sent

    def _scheduled(
        self, worker: _Worker, schedules: dict[int, ScheduleGPipe], chunks: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        from torch.distributed.pipelining import ScheduleGPipe  # takes a second to import

        count = len(chunks)
        if count not in schedules:
            schedules[count] = ScheduleGPipe(worker.pipeline_stage(), n_microbatches=count)
        worker.chunks, worker.outputs = chunks, []
        first = (torch.arange(count, device=self._stage.device),) if self._stage.index == 0 else ()
        try:
            schedules[count].step(*first, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, ConfigurationError):  # torch wraps what a stage raises
                raise error.__cause__ from None
            raise
        outputs, worker.outputs, worker.chunks = worker.outputs, [], ()
        return outputs


class _Worker(nn.Module):
    """A stage as ``PipelineStage`` wants it: tensors in, tensors out. The first one is the number of the chunk.

    Args:
        stage: the stage.
        count: number of stages.
        received: tensors of the shapes that come from the stage before.
        sent: tensors of the shapes that go to the next stage.
    """

    def __init__(
        self, stage: Stage, count: int, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self._stage, self._count = stage, count
        self._received, self._sent = get_data_structure(list(received)), get_data_structure(list(sent))
        self._templates = dict(stage.templates)
        self.chunks: Sequence[tuple[Any, Any]] = ()
        self.outputs: list[Any] = []

    def pipeline_stage(self) -> PipelineStage:
        """A new ``PipelineStage`` that runs this stage."""
        from torch.distributed.pipelining import PipelineStage

        number = torch.zeros(1, dtype=torch.int64, device="meta")
        shapes = [
            (number, *(torch.empty(info.shape, dtype=info.dtype, device="meta") for info in infos))
            for infos in (self._received, self._sent)
        ]
        device = self._stage.device
        return PipelineStage(self, self._stage.index, self._count, device, input_args=shapes[0], output_args=shapes[1])

    def forward(self, number: torch.Tensor, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the chunk of this number."""
        args, kwargs = self.chunks[int(number)]
        stage = self._stage
        result = stage.run(args, kwargs, dict(zip(stage.received, received, strict=True)), self._templates)
        if stage.index == self._count - 1:
            self.outputs.append(result)
            return (number,)
        if stage.templates != self._templates:
            raise ConfigurationError(
                f"stage {stage.index} of the pipeline: the shapes of its results depend on the values of the inputs, "
                "not only on their "
                "shapes. "
                "Such a model cannot be run in a pipeline; put the whole of what makes them into one module, and name "
                "its class in "
                "no_split_module_classes."
            )
        return (number, *result)


def _constants(template: Any) -> list[Any]:
    """Numbers and texts among a unit's results: they may differ from batch to batch, so they must travel each time."""

    def constant(item: Any) -> bool:
        return not is_container(item) and item is not None

    return leaves(template, test_type=constant)
