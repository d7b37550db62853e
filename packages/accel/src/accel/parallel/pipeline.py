"""How a pipeline works. Nothing here imports torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accel_state.errors import ConfigurationError

from ..core.unwrap import clean_name
from ..fsdp.grad_norm import local
from .pipeline_split import Stages, plan_cut
from .sequence_inputs import IGNORED, shift_labels

SCHEDULES: Mapping[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved1f1b": "ScheduleInterleaved1F1B",
}
"""Schedules of torch.distributed.pipelining, by name. Those without bubbles are left out: with sharded parameters torch
computes wrong gradients in them, without an error."""


@dataclass
class PipelineParallelConfig:
    """How batches go through the stages of a pipeline.

    Args:
        schedule: the order of forward and backward passes: "1f1b" (as few micro batches in memory as there are stages),
            "gpipe" (all forward passes first), or "interleaved1f1b" (several stages on each rank, so that less time is
            spent waiting).
        num_microbatches: parts that each batch of a rank is divided into; None takes as many as there are ranks in the
            pipeline.
        stages_per_rank: stages on each rank; None takes 2 for "interleaved1f1b" and 1 otherwise.
        loss_fn: the loss of a micro batch, from outputs and labels, a mean; None takes that of Transformers' causal
            language models.
        example: a small batch, to compare the stages with the whole model: a tuple or a dict. Made up for models of
            Transformers.

    Raises:
        ConfigurationError: a value that is not known, or that contradicts another.
    """

    schedule: str = "1f1b"
    num_microbatches: int | None = None
    stages_per_rank: int | None = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    example: Mapping[str, Any] | Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigurationError(
                f"schedule={self.schedule!r} is not one of {', '.join(SCHEDULES)}. Set it in PipelineParallelConfig. "
                "(In torch's schedules "
                "without bubbles, gradients of sharded parameters are wrong.)"
            )
        interleaved = self.schedule == "interleaved1f1b"
        if self.stages_per_rank is None:
            self.stages_per_rank = 2 if interleaved else 1
        for name in ("num_microbatches", "stages_per_rank"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(
                    f"{name}={value!r} is no whole number from 1. Set it in PipelineParallelConfig."
                )
        if (self.stages_per_rank > 1) != interleaved:
            raise ConfigurationError(
                f"stages_per_rank={self.stages_per_rank} does not go with schedule={self.schedule!r}: several stages "
                "on a rank are "
                "interleaved. Use schedule='interleaved1f1b' with 2 or more, or another schedule with 1."
            )

    def check_batch(self, samples: int, ranks: int) -> int:
        """The number of micro batches of a batch.

        Raises:
            ConfigurationError: the batch cannot be divided so.
        """
        parts = self.num_microbatches or ranks
        if self.schedule == "1f1b" and parts < ranks:
            reason = f"1f1b needs at least as many as there are ranks in the pipeline ({ranks})"
        elif self.schedule == "interleaved1f1b" and parts % ranks:
            reason = f"interleaved1f1b needs a multiple of the {ranks} ranks of the pipeline"
        elif samples % parts:
            reason = (
                f"a batch of {samples} samples on a rank cannot be divided so (drop_last=True leaves a short "
                "last batch out)"
            )
        else:
            return parts
        raise ConfigurationError(
            f"num_microbatches={parts}: {reason}. Set it in PipelineParallelConfig, or change the batch size."
        )


_BATCH_ARGUMENTS = frozenset({"attention_mask", "position_ids", "token_type_ids"})
_ENDLESS = 64


@dataclass
class PipelineOutput:
    """What a prepared pipeline returns, on every rank.

    Attributes:
        loss: of the whole batch of this replica; None without labels.
        logits: of the whole batch, in evaluation; None in training, where they stay on the last rank.
    """

    loss: torch.Tensor | None
    logits: torch.Tensor | None

    def __getitem__(self, key: str) -> torch.Tensor | None:
        found: torch.Tensor | None = getattr(self, key)
        return found


class _Deferred(torch.autograd.Function):
    """A loss whose gradients have been computed already; its backward hands them over, multiplied by what the loss
    counts.
    """

    @staticmethod
    def forward(
        ctx: Any, trigger: torch.Tensor, value: torch.Tensor, hand_over: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.hand_over = hand_over
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.hand_over(gradients[0])
        return None, None, None


class Pipeline:
    """A model in stages, and the running of batches through them.

    Args:
        model: the whole model, not sharded yet.
        mesh: the pp axis.
        settings: how.
        device: of this rank.

    Attributes:
        parts: the stages of this rank, by number: to be sharded, in place.

    Raises:
        ConfigurationError: the model cannot be cut.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, settings: PipelineParallelConfig, device: torch.device
    ) -> None:
        if "group_dst" not in inspect.signature(dist.send).parameters:
            raise ConfigurationError(
                f"pipelines need torch 2.6 or newer, and this is {torch.__version__}. Upgrade torch, or set pp_size=1."
            )
        self.mesh, self.settings, self.device = mesh, settings, device
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.group = mesh.get_group()
        self.count = self.size * (settings.stages_per_rank or 1)
        self.stages = Stages(model, plan_cut(model, self.count))
        if settings.loss_fn is None and not hasattr(model, "loss_function"):
            raise ConfigurationError(
                f"{type(model).__name__} has no loss_function, so the last stage knows no loss. Give one: "
                "PipelineParallelConfig(loss_fn=...)."
            )
        self.stages.check(settings.example)
        self.order = [name for name, _ in model.named_parameters()]
        self.state_names = [clean_name(name) for name in model.state_dict()]
        self.numbers = list(range(self.rank, self.count, self.size))
        self.ties = self._ties(model)
        self.parts = {number: self.stages.stage(number) for number in self.numbers}
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self._schedules: dict[Any, Any] = {}
        self._items: torch.Tensor | float = 1.0
        self._loss_function: Any = getattr(model, "loss_function", None)
        self._words = getattr(getattr(model, "config", None), "vocab_size", None)

    def assemble(self) -> nn.Module:
        """The model to give to the user: of the user's class, with the modules of this rank, and a forward that runs
        the pipeline.
        """
        model = self.stages.part(self.numbers)
        model.__dict__.pop("_original_forward", None)
        model.forward = self._call_of(model)
        model.__dict__["_pipeline"] = self
        self._equalise_ties()
        del self.stages.model  # of which this rank keeps a part only
        return model

    # Ties of the first and the last stage

    def _ties(self, model: nn.Module) -> dict[str, str]:
        """Names of parameters of the first stage that are the same as one of the last stage, with the name there."""
        first = dict(self.stages.part([0]).named_parameters())
        last = {id(parameter): name for name, parameter in self.stages.part([self.count - 1]).named_parameters()}
        ties = {name: last[id(parameter)] for name, parameter in first.items() if id(parameter) in last}
        seen = {id(parameter) for name, parameter in first.items()} | set(last)
        for number in range(1, self.count - 1):
            for name, parameter in self.stages.part([number]).named_parameters():
                if id(parameter) in seen:
                    raise ConfigurationError(
                        f"{name} is shared by blocks of several stages. A pipeline can share the words of the first "
                        "stage with the head of "
                        "the last one only. Train this model with pp_size=1."
                    )
                seen.add(id(parameter))
        return ties

    def _tied(self) -> list[nn.Parameter]:
        """This rank's parameters that have a twin on the other end, in the same order there."""
        if self.rank == 0:
            return [self.parts[0].get_parameter(name) for name in self.ties]
        if self.rank == self.size - 1:
            return [self.parts[self.count - 1].get_parameter(name) for name in self.ties.values()]
        return []

    def name_in_whole(self, name: str) -> str:
        """What a parameter of this rank is called in the whole model, where a tied one has its first name only."""
        return next((first for first, last in self.ties.items() if last == name), name)

    def saved_names(self) -> dict[str, str]:
        """The parameters that this rank saves the optimizer's state of, each with its name in the whole model."""
        names = [name for part in self.parts.values() for name, _ in part.named_parameters()]
        twins = set(self.ties.values()) if self.rank == self.size - 1 else set()
        return {clean_name(name): clean_name(name) for name in names if name not in twins}

    def duplicates(self) -> list[nn.Parameter]:
        """Parameters that another rank has too, and counts: those of the last stage that are tied to the first."""
        return self._tied() if self.rank == self.size - 1 else []

    def _equalise_ties(self) -> None:
        for parameter in self._tied():
            values = local(parameter.data)
            if self.rank == 0:
                dist.send(values.contiguous(), group_dst=self.size - 1, group=self.group)
            else:
                received = torch.empty_like(values, memory_format=torch.contiguous_format)
                dist.recv(received, group_src=0, group=self.group)
                values.copy_(received)

    def _add_tied(self) -> None:
        """A tied parameter's gradient is the sum of those of its two uses."""
        other = self.size - 1 - self.rank
        for parameter in self._tied():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local(parameter.grad)
            sent, received = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
            ops = [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=other),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=other),
            ]
            for work in dist.batch_isend_irecv(ops if self.rank == 0 else ops[::-1]):
                work.wait()
            own.add_(received)

    # Running

    def _call_of(self, model: nn.Module) -> Callable[..., PipelineOutput]:
        def forward(*args: Any, labels: torch.Tensor | None = None, **batch: Any) -> PipelineOutput:
            if model.training and torch.is_grad_enabled():
                return self._train(model, args, batch, labels)
            return self._evaluate(args, batch, labels)

        return forward

    def _train(
        self, model: nn.Module, args: tuple[Any, ...], batch: dict[str, Any], labels: torch.Tensor | None
    ) -> PipelineOutput:
        if labels is None:
            raise ConfigurationError(
                "a pipeline computes forward and backward passes in one call, and got no labels. Call "
                "model(input_ids=..., labels=...), "
                "then accelerator.backward(output.loss); or use model.eval() and torch.no_grad() for outputs."
            )
        first, rest = self._inputs(args, batch)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        scale = self.loss_scale()
        losses: list[torch.Tensor] = []
        schedule = self._schedule(first, rest)
        target = self._targets(labels, scale)
        try:
            schedule.step(*self._own_inputs(first), target=target, losses=losses, return_outputs=False, **rest)
            self._add_tied()
        finally:
            fresh = [parameter.grad for parameter in parameters]
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        value = self._share(torch.stack(losses).sum().detach() / scale if losses else None)

        def hand_over(factor: torch.Tensor) -> None:
            for parameter, gradient in zip(parameters, fresh, strict=True):
                if gradient is not None:
                    local(gradient).mul_((factor / scale).to(local(gradient).device))
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

        trigger = torch.zeros((), device=self.device, requires_grad=True)
        return PipelineOutput(_Deferred.apply(trigger, value, hand_over), None)

    def _evaluate(self, args: tuple[Any, ...], batch: dict[str, Any], labels: torch.Tensor | None) -> PipelineOutput:
        first, rest = self._inputs(args, batch)
        with torch.no_grad():
            schedule = self._schedule(first, rest, evaluates=True)
            outputs = schedule.eval(*self._own_inputs(first), **rest)
            logits = self._share(outputs)
            if labels is None:
                return PipelineOutput(None, logits)
            target = self._targets(labels, 1.0)
            return PipelineOutput(self._loss(logits, target), logits)

    def _inputs(self, args: tuple[Any, ...], batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        rest = {name: value for name, value in batch.items() if name != "input_ids" and value is not None}
        strange = sorted(set(rest) - _BATCH_ARGUMENTS)
        given = (*args, *([batch["input_ids"]] if "input_ids" in batch else []))
        if strange or len(given) != 1 or not isinstance(given[0], torch.Tensor):
            raise ConfigurationError(
                f"a pipeline was called with {len(given)} inputs and {', '.join(strange) or 'nothing else'}. "
                f"It takes one tensor (input_ids), labels, and {', '.join(sorted(_BATCH_ARGUMENTS))}."
            )
        return given[0], rest

    def _own_inputs(self, first: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (first,) if self.rank == 0 else ()

    def _targets(self, labels: torch.Tensor, scale: float) -> torch.Tensor:
        if self.settings.loss_fn is not None:
            self._items = self.settings.check_batch(labels.shape[0], self.size) / scale
            return labels
        target = shift_labels(labels)
        self._items = (target != IGNORED).sum().clamp(min=1) / scale
        return target

    def _loss(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """What a micro batch adds to the loss of the batch."""
        if self.settings.loss_fn is not None:
            own: torch.Tensor = self.settings.loss_fn(outputs, target) / self._items
            return own
        words, items = self._words, self._items
        loss: torch.Tensor = self._loss_function(
            outputs, target, vocab_size=words, num_items_in_batch=items, shift_labels=target
        )
        return loss

    def _schedule(self, first: torch.Tensor, rest: dict[str, Any], evaluates: bool = False) -> Any:
        """The schedule for batches of this shape: it keeps buffers of that shape."""
        from torch.distributed import pipelining

        parts = self.settings.check_batch(first.shape[0], self.size)
        key = (
            evaluates,
            first.shape,
            first.dtype,
            tuple((name, value.shape) for name, value in rest.items()),
            torch.is_autocast_enabled(),
        )
        if key not in self._schedules:
            if len(self._schedules) == _ENDLESS:
                self._schedules.pop(next(iter(self._schedules)))
            stages = [
                pipelining.PipelineStage(part, number, self.count, self.device, group=self.group)
                for number, part in self.parts.items()
            ]
            kind = getattr(pipelining, SCHEDULES[self.settings.schedule])
            single = self.settings.stages_per_rank == 1
            self._schedules[key] = kind(
                stages[0] if single else stages,
                n_microbatches=parts,
                loss_fn=None if evaluates else self._loss,
                scale_grads=False,
            )
        return self._schedules[key]

    def _share(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """What the last rank has, on every rank."""
        meta: list[Any] = [None if tensor is None else (tensor.shape, tensor.dtype)]
        dist.broadcast_object_list(meta, group_src=self.size - 1, group=self.group)
        shape, dtype = meta[0]
        shared = tensor.contiguous() if tensor is not None else torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(shared, group_src=self.size - 1, group=self.group)
        return shared
