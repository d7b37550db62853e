"""Pipelines in a plan: torch's own schedule runs the stages of one rank, and what the other ranks would send has a
shape and no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel.parallel.pipeline import Pipeline

from .record import Recorder, local, storages_in


@dataclass(frozen=True)
class Passed:
    """What a stage passes on, of one micro batch.

    Attributes:
        shape: of the tensor.
        dtype: its type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Kept:
    """What the stages of one rank keep while a schedule runs them, in bytes.

    Attributes:
        alive: activations, at most, by the number of micro batches in flight, from 1.
        gathered: whole parameters, and their whole gradients where these are divided after the last micro batch.
        passed: what the first stage passes on; None on ranks that have another.
    """

    alive: tuple[int, ...]
    gathered: int
    passed: Passed | None


@dataclass
class Watch:
    """What is seen of the stages of one rank while a schedule runs them.

    Attributes:
        incoming: what a stage gets from the one before; the first stage needs none.
        outgoing: what the first stage passes on; None on ranks that have another.
        recorder: of the pass that is running.
        model: the prepared model.
        example: a micro batch, as the first stage and all stages get it.
        flying: micro batches whose forward pass is done and whose backward pass is not, of all stages of the rank.
        alive: bytes of activations before a backward pass, at most, by that number.
        gathered: bytes of whole parameters and their whole gradients, at most.
    """

    incoming: Passed | None = None
    outgoing: Passed | None = None
    recorder: Recorder | None = None
    model: nn.Module | None = None
    example: tuple[torch.Tensor, dict[str, torch.Tensor]] = None  # type: ignore[assignment]
    flying: int = 0
    alive: dict[int, int] = field(default_factory=dict)
    gathered: int = 0

    def look(self, before: bool) -> None:
        """Note what is in memory before or after a backward pass."""
        if self.recorder is None or self.model is None:
            return
        whole = {storage._cdata: storage.nbytes() for storage in whole_memory(self.model)}
        self.gathered = max(self.gathered, sum(whole.values()))
        if not before:
            return
        apart = {**storages_in(self.model), **whole}
        apart.update(
            {local(item.grad).untyped_storage()._cdata: 0 for item in self.model.parameters() if item.grad is not None}
        )
        activations = sum(size for key, size in self.recorder.storages().items() if key not in apart)
        self.alive[self.flying] = max(self.alive.get(self.flying, 0), activations)


_WATCH: ContextVar[Watch] = ContextVar("_WATCH")


@contextmanager
def watching(incoming: Passed | None) -> Iterator[Watch]:
    """A block in which the stages of this rank are watched."""
    watch = Watch(incoming)
    token = _WATCH.set(watch)
    try:
        yield watch
    finally:
        _WATCH.reset(token)


def seen() -> Kept:
    """What has been seen in the block of :func:`watching` so far."""
    watch = _WATCH.get()
    alive = tuple(watch.alive.get(number, 0) for number in range(1, max(watch.alive, default=0) + 1))
    return Kept(alive, watch.gathered, watch.outgoing)


@contextmanager
def one_pass(model: nn.Module, recorder: Recorder) -> Iterator[Watch]:
    """A block with one forward and backward pass of a pipeline."""
    watch = _WATCH.get()
    watch.recorder, watch.model, watch.flying = recorder, model, 0
    recorder.unmarked = "tied gradients"
    try:
        yield watch
    finally:
        watch.recorder = watch.model = None


def make_schedule(model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    """Have the schedule for such inputs made before a pass, since finding out the shapes takes a forward pass of its
    own.
    """
    pipeline: Pipeline = model.__dict__["_pipeline"]
    first, rest = pipeline._inputs((), {name: value for name, value in inputs.items() if name != "labels"})
    size = first.shape[0] // pipeline.settings.check_batch(first.shape[0], pipeline.size)
    _WATCH.get().example = first[:size], {name: value[:size] for name, value in rest.items()}
    pipeline._schedule(first, rest)


class _Agreed:
    """What the ranks of a pipeline agree on: shapes are known and need not be exchanged."""

    def item(self) -> int:
        return 1


class Watched:
    """What makes torch's PipelineStage ask no other rank for shapes, and note what is alive before and after its
    backward passes.
    """

    def __init__(
        self, submodule: nn.Module, stage_index: int, num_stages: int, device: torch.device, group: Any = None
    ) -> None:
        watch = _WATCH.get()
        first, batch = watch.example
        incoming = first
        if stage_index > 0:
            assert watch.incoming is not None  # a rank that has the first stage is traced before
            incoming = torch.empty(watch.incoming.shape, dtype=watch.incoming.dtype, device=device, requires_grad=True)
        with torch.no_grad():
            outgoing = submodule(incoming, **batch)
        for module in submodule.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if stage_index == 0:
            watch.incoming = watch.outgoing = Passed(tuple(outgoing.shape), outgoing.dtype)
        outgoing = torch.empty_like(outgoing, requires_grad=True)
        stage: Any = super()
        stage.__init__(
            submodule, stage_index, num_stages, device, input_args=incoming, output_args=outgoing, group=group
        )

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        return _Agreed()

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        return _Agreed()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        stage: Any = super()
        output = stage.forward_one_chunk(*args, **kwargs)
        _WATCH.get().flying += 1
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        watch = _WATCH.get()
        stage: Any = super()
        watch.look(before=True)
        result = stage.backward_one_chunk(*args, **kwargs)
        watch.flying -= 1
        watch.look(before=False)
        return result

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        stage: Any = super()
        return _marked(stage.get_fwd_send_ops(fwd_chunk_id), "activations")

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        stage: Any = super()
        return _marked(stage.get_bwd_send_ops(bwd_chunk_id), "gradients")


def _marked(ops: list[dist.P2POp], what: str) -> list[dist.P2POp]:
    recorder = _WATCH.get().recorder
    for op in ops:
        if recorder is not None:
            recorder.mark(op.tensor, what)
    return ops


def watched_stage() -> type:
    """The PipelineStage of torch, watched. Importing it changes the environment, so it is imported where a plan is
    made.
    """
    from torch.distributed.pipelining import PipelineStage

    return type("WatchedStage", (Watched, PipelineStage), {})


def share_loss(pipeline: Pipeline, tensor: torch.Tensor | None) -> torch.Tensor:
    """What the last rank has, on every rank, where it is a loss: nobody is asked for its shape."""
    shared = torch.zeros((), device=pipeline.device) if tensor is None else tensor.contiguous()
    dist.broadcast(shared, group_src=pipeline.size - 1, group=pipeline.group)
    return shared


def whole_memory(model: nn.Module) -> Iterator[torch.UntypedStorage]:
    """The memory of parameters that fully_shard has gathered, and of gradients that it has not divided yet."""
    # What fully_shard knows of a stage's outermost module is on the part, of which the prepared model has the modules
    # only.
    parts: dict[int, nn.Module] = model.__dict__["_pipeline"].parts
    for module in (module for part in parts.values() for module in part.modules()):
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            for holder in group.fsdp_params if group is not None else ():
                whole = getattr(holder, "_unsharded_param", None)
                for tensor in (
                    whole,
                    None if whole is None else whole.grad,
                    getattr(holder, "unsharded_accumulated_grad", None),
                ):
                    if tensor is not None:
                        yield local(tensor).untyped_storage()
