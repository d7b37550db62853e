"""Runs micro-batches through the stages of a pipeline with the schedules of torch.distributed.pipelining."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from accel_state.errors import ConfigurationError
from accel_state.operations import TensorInformation, is_tensor_information, recursively_apply, send_to_device
from accel_state.operations.nested import is_container, leaves

from .._torch_compat import expect_no_gradients, leave_outputs_unchecked
from .broadcast import transport_device
from .recording import Value
from .split import PipelineSplit, structure_key
from .stage import Stage

_KINDS_REMEMBERED = 64


@dataclass
class _Kind:
    """Micro-batches of one structure: the outputs of every call of earlier stages, and the schedules that run them.

    Attributes:
        templates: for each stage of this rank, outputs of calls by number; None where these hold values other than
            tensors, which may differ between batches and travel as objects.
        schedules: by number of micro-batches and whether they are trained on.
    """

    templates: list[dict[int, Any]] | None
    schedules: dict[tuple[int, bool], Any] = field(default_factory=dict)


class PipelineRuntime:
    """The stages of one rank and the communication with the ranks before and after it.

    The first micro-batch of a structure that has not been seen travels as objects, which tell the next stage the shapes
    of all results. From then on a schedule of torch moves bare tensors.

    Args:
        stages: the stages of this rank, in order.
        split: how the model is split.
        schedule: name of the schedule in ``torch.distributed.pipelining``.
        group: the ranks of the pipeline; None for all.
        example_outputs: for the split's example, the outputs of all calls as ``split.outputs`` has them. None: learned
            from the first micro-batch, where the stages may compute in another dtype than the recorded model.
        stage_class: makes the stages of the schedule; None for ``torch.distributed.pipelining.PipelineStage``.
        places: the rank of every stage, as the schedule has it; None: stages are assigned to the ranks in turns.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        split: PipelineSplit,
        schedule: str = "ScheduleGPipe",
        group: dist.ProcessGroup | None = None,
        example_outputs: Sequence[Any] | None = None,
        stage_class: Callable[..., Any] | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        self.stages: Sequence[Stage] = stages
        self.split: PipelineSplit = split
        self.schedule: str = schedule
        self.group: dist.ProcessGroup | None = group
        self.stage_class = stage_class
        ranks = len(split) // len(stages)
        self.places: Sequence[int] = places or [number % ranks for number in range(len(split))]
        self._kinds: OrderedDict[Any, _Kind] = OrderedDict()
        for stage in stages:
            stage.intercept()
        if example_outputs is not None and not _constants(tuple(example_outputs)):
            templates = dict(enumerate(example_outputs))
            self._kinds[self._key(split.example)] = _Kind([templates] * len(stages))

    def run(self, batches: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Run micro-batches of equal shapes forward.

        Returns:
            The outputs on the rank of the last stage, nothing on the others.
        """
        with torch.no_grad():
            kind = self._kind(batches)
            if kind is None or kind.templates is None:
                return self._exchange(batches)
            self._step(kind, batches, None, {})
            return self._outputs()

    def train(
        self, batches: Sequence[tuple[Any, Any]], target: torch.Tensor, loss_fn: Callable[[Any, Any], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run micro-batches forward and backward.

        Args:
            batches: inputs of the model, of equal shapes.
            target: of the whole batch: the schedule splits it.
            loss_fn: the loss of a micro-batch, from the last stage's output and its part of ``target``.

        Returns:
            The losses on the rank of the last stage, nothing on the others.
        """
        kind = self._kind(batches)
        if kind is None:
            with torch.no_grad():
                self._exchange(batches[:1])
            kind = self._kind(batches)
        if kind is None or kind.templates is None:
            raise ConfigurationError(
                "the modules of this model return numbers or texts, which a pipeline cannot send while it trains. "
                "Return tensors only, or train with pp_size=1."
            )
        losses: list[torch.Tensor] = []
        self._step(kind, batches, loss_fn, {"target": target, "losses": losses})
        return losses

    def _key(self, structure: str) -> tuple[str, bool]:
        return structure, torch.is_autocast_enabled(self.stages[0].device.type)

    def _kind(self, batches: Sequence[tuple[Any, Any]]) -> _Kind | None:
        key = self._key(structure_key(*batches[0]))
        if key in self._kinds:
            self._kinds.move_to_end(key)
        return self._kinds.get(key)

    def _outputs(self) -> list[Any]:
        outputs, self.stages[-1].outputs = self.stages[-1].outputs, []
        return outputs

    def _exchange(self, batches: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Run micro-batches without a schedule, and remember the shapes of what travels."""
        device = transport_device(self.stages[0].device, self.group)
        seen: list[dict[int, Any]] = [{} for _ in self.stages]
        outputs: list[Any] = []
        handed: Any = None  # by the stage before, where that is on this rank
        own = {stage.index for stage in self.stages}
        for batch in batches:
            for place, stage in enumerate(self.stages):
                tensors: Sequence[torch.Tensor] = ()
                templates: dict[int, Any] = {}
                if stage.index - 1 in own:
                    tensors, templates = handed
                elif stage.index:
                    message: list[Any] = [None]
                    source = self.places[stage.index - 1]
                    dist.recv_object_list(message, group_src=source, group=self.group, device=device)
                    tensors, templates = send_to_device(message[0][0], stage.device), message[0][1]
                stage.begin([batch], templates, known=False)
                result = stage.submodule(*tensors)
                seen[place] = stage.templates
                if stage.is_last:
                    outputs += self._outputs()
                elif stage.index + 1 in own:
                    handed = list(result), stage.templates
                else:
                    sent = [(send_to_device(list(result), "cpu"), stage.templates)]
                    target = self.places[stage.index + 1]
                    dist.send_object_list(sent, group_dst=target, group=self.group, device=device)
        # Every rank must decide alike, and only the last stage but one has seen the outputs of all calls.
        plain: list[Any] = [not any(_constants(template) for template in seen[-1].values())]
        owner = self.places[-2]
        dist.broadcast_object_list(plain, group_src=owner, group=self.group, device=device)
        key = self._key(structure_key(*batches[0]))
        self._kinds[key] = _Kind(seen if plain[0] else None)
        if len(self._kinds) > _KINDS_REMEMBERED:
            self._kinds.popitem(last=False)
        return outputs

    def _step(self, kind: _Kind, batches: Sequence[tuple[Any, Any]], loss_fn: Any, options: dict[str, Any]) -> None:
        assert kind.templates is not None
        key = (len(batches), loss_fn is not None)
        if key not in kind.schedules:
            kind.schedules[key] = self._make_schedule(kind.templates, len(batches), loss_fn)
        for stage, templates in zip(self.stages, kind.templates, strict=True):
            stage.begin(batches, templates, known=True)
        step = kind.schedules[key].step
        if loss_fn is not None and "return_outputs" in inspect.signature(step).parameters:
            options["return_outputs"] = False
        try:
            step(**options)
        except RuntimeError as error:
            if isinstance(error.__cause__, ConfigurationError):  # PipelineStage wraps what a stage raises
                raise error.__cause__ from None
            raise

    def _make_schedule(self, templates: list[dict[int, Any]], count: int, loss_fn: Any) -> Any:
        from torch.distributed import pipelining  # takes a second to import

        if "scale_grads" not in inspect.signature(pipelining.ScheduleGPipe).parameters:
            raise ConfigurationError(f"a pipeline needs a newer torch than {torch.__version__}. Upgrade torch.")
        if not hasattr(pipelining, self.schedule):
            raise ConfigurationError(
                f"torch {torch.__version__} has no {self.schedule}. Upgrade torch, or choose another schedule."
            )

        stages = []
        for stage, known in zip(self.stages, templates, strict=True):
            received, sent = (
                tuple(_meta(known, value, loss_fn is not None) for value in values)
                for values in (stage.received, stage.sent)
            )
            stages.append(
                (self.stage_class or pipelining.PipelineStage)(
                    stage.submodule,
                    stage.index,
                    len(self.split),
                    stage.device,
                    input_args=received,
                    output_args=sent or (torch.empty(1, device="meta"),),
                    group=self.group,
                )
            )
            if not sent:
                leave_outputs_unchecked(stages[-1])
            if loss_fn is None:
                expect_no_gradients(stages[-1])
        make = getattr(pipelining, self.schedule)
        # Otherwise torch divides the gradients, also after an evaluation, which may be in an accumulation window.
        return make(stages if len(stages) > 1 else stages[0], n_microbatches=count, loss_fn=loss_fn, scale_grads=False)


def _meta(templates: dict[int, Any], value: Value, requires_grad: bool) -> torch.Tensor:
    infos: list[TensorInformation] = leaves(templates[value[0]], test_type=is_tensor_information)
    info = infos[value[1]]
    return torch.empty(
        info.shape, dtype=info.dtype, device="meta", requires_grad=requires_grad and info.dtype.is_floating_point
    )


def _constants(template: Any) -> list[Any]:
    """Numbers and texts among a unit's results: they may differ between batches."""
    rest = recursively_apply(lambda _: None, template, test_type=is_tensor_information)
    return leaves(rest, test_type=lambda item: not is_container(item) and item is not None)
