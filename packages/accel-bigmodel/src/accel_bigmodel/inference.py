"""Pipelined inference: each process holds a part of the model, and the chunks of a batch follow each other through
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from accel_state.errors import AccelError, ConfigurationError
from accel_state.operations import (
    get_data_structure,
    initialize_tensors,
    pad_input_tensors,
    recursively_apply,
    send_to_device,
)
from accel_state.operations.nested import leaves, replace_leaves
from accel_state.state import PartialState

from .device_map.infer import infer_auto_device_map
from .device_map.memory import get_balanced_memory
from .pipeline import chunks
from .pipeline.build import agree_on_plan, plan_of
from .pipeline.plan import Plan
from .pipeline.schedule import Schedule
from .pipeline.sharing import receive_object, send_object, start_broadcast
from .pipeline.stage import Stage
from .sizes import calculate_maximum_sizes
from .tensors import Location

# Batch size (None where nothing is cut), batch size after filling up, positional and keyword inputs.
_Inputs: TypeAlias = tuple[int | None, int, Any, Any]


def prepare_pippy(
    model: nn.Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Share a model among all processes of this run, as the stages of a pipeline, for inference.

    The model's forward may be any Python code. It is run once on rank 0, on the example, to see which modules are
    called in which order and which results they exchange. Afterwards every rank keeps the weights of its stage, on its
    device; ``model(...)`` cuts the batch of rank 0 into chunks and sends them through. All ranks must call the model;
    what the others pass is not looked at. Gradients are not computed.

    Args:
        model: the whole model, with its weights, on every rank. It is changed in place: its forward becomes that of the
            pipeline, and weights of other stages are let go.
        split_points: "auto" makes the stages as equal in bytes as the order of the calls allows. A list names the
            modules at which the stages after the first begin, one fewer than there are processes.
        no_split_module_classes: names of classes whose instances stay on one rank. None takes those that a transformers
            model declares, or the classes of repeated layers.
        example_args: positional inputs to try the model with, of the kind that it will be called with.
        example_kwargs: keyword inputs to try it with.
        num_chunks: number of chunks, by default the number of processes. A batch that they do not divide is filled up
            with copies of its last sample, which are dropped again.
        gather_output: give the output to every rank. Otherwise the last one has it, and the others get None.

    Returns:
        The model. Its attribute ``hf_split_points`` names the modules at which the stages begin, ``hf_pipeline`` is the
        :class:`Pipeline`.

    Raises:
        ConfigurationError: the model cannot be split so; the message says why. On every rank.
    """
    count = PartialState().num_processes
    pipeline = build_pipeline(
        model, split_points, example_args or (), example_kwargs or {}, num_chunks or count, no_split_module_classes
    )
    model.hf_split_points = pipeline.split_points  # type: ignore[assignment]
    model.hf_pipeline = pipeline  # type: ignore[assignment]
    forward = functools.partial(pippy_forward, pipeline, num_chunks or count, bool(gather_output))
    model.forward = forward
    return model


class Pipeline:
    """A model that is shared by the processes of this run.

    Args:
        model: the model, whose weights are dealt out.
        forward: the forward of the whole model.
        plan: which calls each stage computes; None in a single process.
        num_chunks: number of chunks of a batch.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any], plan: Plan | None, num_chunks: int) -> None:
        state = PartialState()
        self.num_chunks = num_chunks
        self.plan = plan
        self.split_points: list[str] = [] if plan is None else plan.split_points()
        self._forward = forward
        self._device = state.device
        self._schedule: Schedule | None = None
        if plan is None:
            model.to(state.device)
        else:
            self._schedule = Schedule(
                Stage(model, forward, plan, state.process_index, state.device), state.num_processes
            )

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch that all ranks know, whose size is a multiple of the number of chunks.

        Returns:
            The output on the last rank, None on the others.

        Raises:
            ConfigurationError: the batch cannot be cut, or the outputs cannot be put together.
        """
        args, kwargs = send_to_device((args, kwargs), self._device)
        batch_size = find_pippy_batch_size(args, kwargs)
        pieces = (
            [(args, kwargs)] if self.num_chunks == 1 else chunks.split((args, kwargs), batch_size or 0, self.num_chunks)
        )
        outputs = [self._forward(*a, **k) for a, k in pieces] if self._schedule is None else self._schedule.run(pieces)
        return chunks.merge(outputs, (batch_size or 0) // self.num_chunks) if outputs else None


def build_pipeline(
    model: nn.Module,
    split_points: str | Sequence[str] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    num_chunks: int,
    no_split_module_classes: Sequence[str] | None = None,
) -> Pipeline:
    """Split a model and keep the part of this rank. :func:`prepare_pippy` does this, and makes the model call the
    pipeline.

    Raises:
        ConfigurationError: as :func:`prepare_pippy`.
    """
    state = PartialState()
    if num_chunks < 1:
        raise ConfigurationError(
            f"num_chunks={num_chunks} chunks make no batch. Give at least 1, or leave it out for {state.num_processes}."
        )
    if hasattr(model, "hf_pipeline"):
        raise ConfigurationError("this model is a pipeline already. Make the model anew to split it in another way.")
    _forget_cache(model)
    forward = model.forward
    if state.num_processes == 1:
        return Pipeline(model, forward, None, num_chunks)
    if not args and not kwargs:
        raise ConfigurationError(
            "prepare_pippy needs an example to see what the model calls: pass example_args=(inputs,) or "
            "example_kwargs={'input_ids': inputs}."
        )
    plan = agree_on_plan(
        lambda: plan_of(
            model, forward, split_points, no_split_module_classes, (args, kwargs or {}), state.num_processes
        )
    )
    return Pipeline(model, forward, plan, num_chunks)


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """Call a pipeline with the inputs of rank 0.

    Args:
        forward: what runs a batch, such as a :class:`Pipeline`.
        num_chunks: the batch is filled up to a multiple of it, by copies of the last sample, which are dropped from the
            output.
        gather_output: give the output to every rank.
        *args: positional inputs of the model.
        **kwargs: keyword inputs of the model.

    Returns:
        The output; None on all ranks but the last unless ``gather_output`` is set.

    Raises:
        ConfigurationError: the batch size cannot be found, or the inputs ask for a cache. On every rank.
    """
    if not PartialState().use_distributed:
        return _run(forward, _prepare_inputs(num_chunks, args, kwargs))
    inputs, under_way = _share_inputs(num_chunks, args, kwargs)
    output = _run(forward, inputs)
    for work in under_way:
        work.wait()
    return _give_to_all(output) if gather_output else output


def _run(forward: Callable[..., Any], inputs: _Inputs) -> Any:
    batch_size, padded, args, kwargs = inputs
    output = forward(*args, **kwargs)
    return output if batch_size is None else chunks.take(output, padded, batch_size)


def _share_inputs(num_chunks: int, args: Any, kwargs: Any) -> tuple[_Inputs, list[Any]]:
    """The inputs of rank 0 on every rank; and what must be waited for before they may be let go.

    Rank 0 does not wait until the others have them: these may still be busy with the batch before, and it can begin
    with this one.
    """
    device = PartialState().device
    if PartialState().process_index:
        structure = receive_object(device)
        if isinstance(structure, str):
            raise ConfigurationError(structure)
        inputs = send_to_device(initialize_tensors(structure), device)
        for work in start_broadcast(leaves(inputs)):
            work.wait()
        return inputs, []
    try:
        inputs = send_to_device(_prepare_inputs(num_chunks, args, kwargs), device)
    except AccelError as error:
        for work in send_object(str(error), device):
            work.wait()
        raise
    inputs = replace_leaves(inputs, [tensor.contiguous() for tensor in leaves(inputs)])
    return inputs, [*send_object(get_data_structure(inputs), device), *start_broadcast(leaves(inputs))]


def _prepare_inputs(num_chunks: int, args: Any, kwargs: Any) -> _Inputs:
    """The inputs, filled up to a multiple of the chunks; with the batch sizes before and after."""
    if kwargs.get("use_cache"):
        raise ConfigurationError(
            "use_cache=True: the cache of each layer would live on its own rank. Call the pipeline with "
            "use_cache=False."
        )
    batch_size = find_pippy_batch_size(args, kwargs)
    if num_chunks == 1:
        return None, 0, args, kwargs
    if batch_size is None:
        raise ConfigurationError(
            "no batch size can be found: none of the inputs is a tensor with at least one dimension, so there is "
            "nothing to cut into "
            f"{num_chunks} chunks. Pass the batch on rank 0, or prepare the model with num_chunks=1."
        )
    pad = functools.partial(pad_input_tensors, batch_size=batch_size, num_processes=num_chunks)
    args, kwargs = recursively_apply(pad, (args, kwargs))
    return batch_size, batch_size + -batch_size % num_chunks, args, kwargs


def _give_to_all(output: Any) -> Any:
    collectives = PartialState().collectives
    last = collectives.world_size - 1
    mine = collectives.rank == last
    structure = collectives.broadcast_object(get_data_structure(output) if mine else None, last)
    if not mine:
        output = send_to_device(initialize_tensors(structure), PartialState().device)
    shared = collectives.broadcast_many([tensor.contiguous() for tensor in leaves(output)], last)
    return replace_leaves(output, shared)


def find_pippy_batch_size(args: Any, kwargs: Any) -> int | None:
    """The number of samples of a batch: the first dimension of the first tensor that has one, or None."""
    return next((int(tensor.shape[0]) for tensor in leaves((args or (), kwargs or {})) if tensor.ndim), None)


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
) -> dict[str, Location]:
    """A device map that spreads a model evenly over as many devices as there are processes, in the order of its
    modules.

    Args:
        model: the model, on the meta device too.
        num_processes: number of devices, which are numbered from 0.
        no_split_module_classes: names of classes whose instances stay on one device.
        max_memory: bytes of each device; None shares the model among them.
    """
    whole = list(no_split_module_classes or ())
    limits: Mapping[int | str, int | str]
    if max_memory is not None:
        limits = max_memory
    else:
        size, _ = calculate_maximum_sizes(model)
        limits = get_balanced_memory(model, dict.fromkeys(range(num_processes), size), whole)
    return infer_auto_device_map(model, limits, no_split_module_classes=whole, clean_result=False)


def _forget_cache(model: nn.Module) -> None:
    """Keep models of transformers from returning the keys and values of the last stage alone."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", None):
            config.use_cache = False
