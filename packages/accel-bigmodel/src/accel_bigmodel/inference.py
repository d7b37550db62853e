"""Pipelined inference: each process holds one stage of the model, and micro-batches pass through the stages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from accel_state.errors import AccelError, ConfigurationError
from accel_state.operations import (
    TensorInformation,
    get_data_structure,
    initialize_tensors,
    is_tensor_information,
    pad_input_tensors,
    recursively_apply,
    send_to_device,
)
from accel_state.operations.nested import leaves, replace_leaves
from accel_state.state import PartialState

from .device_map.infer import infer_auto_device_map
from .device_map.memory import MaxMemory, get_balanced_memory
from .pipeline import microbatches
from .pipeline.broadcast import receive_object, send_object, start_broadcast, wait_for
from .pipeline.runtime import PipelineRuntime
from .pipeline.split import PipelineSplit, kind_of, split_model
from .pipeline.stage import Stage, extract
from .pipeline.stand_ins import StandIns
from .sizes import calculate_maximum_sizes
from .tensors import Location

# Batch size (None where nothing is split), batch size with padding, positional and keyword inputs.
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
    """Split a model into pipeline stages, one for each process of this run, for inference.

    The model's forward may be any Python code. It runs once on rank 0, on the example, to record which modules are
    called in which order and which results they exchange. Afterwards every rank keeps the weights of its stage, on its
    device; ``model(...)`` splits the batch of rank 0 into micro-batches and sends them through the stages. All ranks
    must call the model; only the arguments of rank 0 are used. Gradients are not computed.

    Args:
        model: the whole model, with its weights, on every rank. It is changed in place: its forward becomes that of the
            pipeline, and weights of other stages are freed.
        split_points: "auto" makes the stages as equal in bytes as the order of the calls allows. A list names the
            modules at which the stages after the first begin, one fewer than there are processes.
        no_split_module_classes: names of classes whose instances stay on one rank. None takes those that a transformers
            model declares, or the classes of repeated layers.
        example_args: positional inputs to record the model with, of the kind that it will be called with.
        example_kwargs: keyword inputs to record it with.
        num_chunks: number of micro-batches, by default the number of processes. A batch that is not a multiple of it is
            padded with copies of its last sample, which are dropped from the output.
        gather_output: return the output on every rank. Otherwise the last rank returns it, and the others None.

    Returns:
        The model. Its attribute ``hf_split_points`` names the modules at which the stages begin, ``hf_pipeline`` is the
        :class:`Pipeline`.

    Raises:
        ConfigurationError: the model cannot be split this way; the message says why. On every rank.
    """
    count = PartialState().num_processes
    pipeline = build_pipeline(
        model, split_points, example_args or (), example_kwargs or {}, num_chunks or count, no_split_module_classes
    )
    model.hf_split_points = pipeline.split_points  # type: ignore[assignment]
    model.hf_pipeline = pipeline  # type: ignore[assignment]
    model.forward = functools.partial(pippy_forward, pipeline, num_chunks or count, bool(gather_output))
    return model


class Pipeline:
    """A model split over the processes of this run.

    Args:
        model: the model, of which this rank keeps one stage.
        forward: the forward of the whole model.
        split: how the model is split; None in a single process.
        num_chunks: number of micro-batches of a batch.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], split: PipelineSplit | None, num_chunks: int
    ) -> None:
        state = PartialState()
        self.num_chunks = num_chunks
        self.split = split
        self.split_points: list[str] = [] if split is None else split.split_points()
        self._forward = forward
        self._device = state.device
        self._runtime: PipelineRuntime | None = None
        self.stand_ins: StandIns = StandIns(state.device)
        if split is not None:
            extract(model, split, [state.process_index], state.device, in_place=True)
            stage = Stage(model, forward, split, state.process_index, state.device)
            self._runtime = PipelineRuntime([stage], split, example_outputs=split.outputs)
            model.requires_grad_(False)
        model.to(state.device)

    def unread_inputs(self, inputs: tuple[Any, Any]) -> frozenset[int]:
        """Return the numbers of inputs, among their tensors, that only the first stage reads.

        Only floating-point ones, where all but the batch size is as in the example: integers are small, and code may
        take another path for other sizes.
        """
        if self.split is None or kind_of(inputs) != self.split.kind:
            return frozenset()
        floats = {number for number, tensor in enumerate(leaves(inputs)) if tensor.is_floating_point()}
        return frozenset(floats - self.split.inputs)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch that is the same on all ranks and whose size is a multiple of the number of micro-batches.

        Returns:
            The output on the last rank, None on the others.

        Raises:
            ConfigurationError: the batch cannot be split, or the outputs cannot be merged.
        """
        args, kwargs = send_to_device((args, kwargs), self._device)
        batch_size = microbatches.batch_size_of((args, kwargs)) or 0
        batches = [(args, kwargs)]
        if self.num_chunks > 1:
            batches = microbatches.split((args, kwargs), batch_size, self.num_chunks, self.stand_ins.narrow)
        outputs = [self._forward(*a, **k) for a, k in batches] if self._runtime is None else self._runtime.run(batches)
        return microbatches.merge(outputs, batch_size // self.num_chunks) if outputs else None


def build_pipeline(
    model: nn.Module,
    split_points: str | Sequence[str] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    num_chunks: int,
    no_split_module_classes: Sequence[str] | None = None,
) -> Pipeline:
    """Split a model and keep the stage of this rank, as :func:`prepare_pippy` does before it replaces the forward.

    Raises:
        ConfigurationError: as :func:`prepare_pippy`.
    """
    state = PartialState()
    if num_chunks < 1:
        raise ConfigurationError(
            f"num_chunks={num_chunks} must be at least 1. Leave it out for {state.num_processes}, the number of "
            "processes."
        )
    if hasattr(model, "hf_pipeline"):
        raise ConfigurationError("this model is already a pipeline. Create the model again to split it differently.")
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            # Otherwise Transformers would return the keys and values of the last stage alone.
            config.use_cache = False
    forward = model.forward
    if state.num_processes == 1:
        return Pipeline(model, forward, None, num_chunks)
    if not args and not kwargs:
        raise ConfigurationError(
            "prepare_pippy needs an example to record what the model calls: pass example_args=(inputs,) or "
            "example_kwargs={'input_ids': inputs}."
        )

    def make() -> PipelineSplit:
        empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
        if empty:
            raise ConfigurationError(
                f"{len(empty)} tensors of the model have no values: they are on the meta device "
                f"({', '.join(empty[:3])}, ...). Load the weights before the model is split, with "
                "load_checkpoint_in_model for example."
            )
        example = (args, kwargs or {})
        return split_model(model, forward, split_points, no_split_module_classes, example, state.num_processes)

    return Pipeline(model, forward, _from_rank_0(make), num_chunks)


def _from_rank_0(make: Callable[[], PipelineSplit]) -> PipelineSplit:
    """Call ``make`` on rank 0 and send its result, or its error, to all ranks."""
    collectives = PartialState().collectives
    if collectives.rank:
        message: Any = collectives.broadcast_object(None)
        if isinstance(message, str):
            raise ConfigurationError(message)
        split: PipelineSplit = message
        return split
    try:
        split = make()
    except Exception as error:  # the other ranks wait for an answer, whatever it is
        text = str(error) if isinstance(error, AccelError) else f"{type(error).__name__}: {error}"
        prefix = "" if isinstance(error, AccelError) else "rank 0 could not split the model: "
        collectives.broadcast_object(f"{prefix}{text}")
        raise
    collectives.broadcast_object(split)
    return split


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """Call a pipeline with the inputs of rank 0.

    Args:
        forward: runs a batch, such as a :class:`Pipeline`.
        num_chunks: the batch is padded to a multiple of it with copies of the last sample, which are dropped from the
            output.
        gather_output: return the output on every rank.
        *args: positional inputs of the model.
        **kwargs: keyword inputs of the model.

    Returns:
        The output; None on all ranks but the last unless ``gather_output`` is set.

    Raises:
        ConfigurationError: the batch size cannot be found, or the inputs ask for a cache. On every rank.
    """
    if not PartialState().use_distributed:
        return _run(forward, _prepare_inputs(num_chunks, args, kwargs))
    inputs, pending = _share_inputs(forward, num_chunks, args, kwargs)
    output = _run(forward, inputs)
    wait_for(pending)
    return _share_output(output) if gather_output else output


def _run(forward: Callable[..., Any], inputs: _Inputs) -> Any:
    batch_size, padded, args, kwargs = inputs
    output = forward(*args, **kwargs)
    return output if batch_size is None else microbatches.drop_padding(output, padded, batch_size)


def _share_inputs(forward: Callable[..., Any], num_chunks: int, args: Any, kwargs: Any) -> tuple[_Inputs, list[Any]]:
    """Return the inputs of rank 0 on every rank, and the sends to wait for before they may be freed.

    Rank 0 does not wait until the other ranks have received them: these may still run the previous batch.
    """
    device = PartialState().device
    if PartialState().process_index:
        return _receive_inputs(forward, device), []
    try:
        inputs = send_to_device(_prepare_inputs(num_chunks, args, kwargs), device)
    except AccelError as error:
        wait_for(send_object(str(error), device))
        raise
    inputs = replace_leaves(inputs, [tensor.contiguous() for tensor in leaves(inputs)])
    unread = forward.unread_inputs(inputs[2:]) if isinstance(forward, Pipeline) else frozenset[int]()
    sent = [tensor for number, tensor in enumerate(leaves(inputs)) if number not in unread]
    return inputs, [*send_object((get_data_structure(inputs), unread), device), *start_broadcast(sent)]


def _receive_inputs(forward: Callable[..., Any], device: torch.device) -> _Inputs:
    """Return the inputs that rank 0 sends, and fake tensors, whose values are an error to read, for others."""
    message = receive_object(device)
    if isinstance(message, str):
        raise ConfigurationError(message)
    structure, unread = message
    numbers = itertools.count()
    sent: list[torch.Tensor] = []

    def make(info: TensorInformation) -> torch.Tensor:
        number = next(numbers)
        if number in unread and isinstance(forward, Pipeline):
            return forward.stand_ins.get(number, info.shape, info.dtype)
        sent.append(torch.empty(info.shape, dtype=info.dtype, device=device))
        return sent[-1]

    inputs: _Inputs = recursively_apply(make, structure, test_type=is_tensor_information)
    wait_for(start_broadcast(sent))
    return inputs


def _prepare_inputs(num_chunks: int, args: Any, kwargs: Any) -> _Inputs:
    """Return the inputs padded to a multiple of the number of micro-batches, with the batch sizes before and after."""
    if kwargs.get("use_cache"):
        raise ConfigurationError(
            "use_cache=True: the cache of each layer would stay on its own rank. Call the pipeline with "
            "use_cache=False."
        )
    batch_size = find_pippy_batch_size(args, kwargs)
    if num_chunks == 1:
        return None, 0, args, kwargs
    if batch_size is None:
        raise ConfigurationError(
            "no batch size can be found: none of the inputs is a tensor with at least one dimension, so nothing can "
            f"be split into {num_chunks} micro-batches. Pass the batch on rank 0, or prepare the model with "
            "num_chunks=1."
        )
    pad = functools.partial(pad_input_tensors, batch_size=batch_size, num_processes=num_chunks)
    args, kwargs = recursively_apply(pad, (args, kwargs))
    return batch_size, batch_size + -batch_size % num_chunks, args, kwargs


def _share_output(output: Any) -> Any:
    collectives = PartialState().collectives
    last = collectives.world_size - 1
    is_last = collectives.rank == last
    structure = collectives.broadcast_object(get_data_structure(output) if is_last else None, last)
    if not is_last:
        output = send_to_device(initialize_tensors(structure), PartialState().device)
    shared = collectives.broadcast_many([tensor.contiguous() for tensor in leaves(output)], last)
    return replace_leaves(output, shared)


def find_pippy_batch_size(args: Any, kwargs: Any) -> int | None:
    """Return the number of samples of a batch: the first dimension of the first tensor that has one, or None."""
    return microbatches.batch_size_of((args or (), kwargs or {}))


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: MaxMemory | None = None,
) -> dict[str, Location]:
    """Return a device map that distributes a model evenly over ``num_processes`` devices, in the order of its modules.

    Args:
        model: the model; the meta device is allowed.
        num_processes: number of devices, which are numbered from 0.
        no_split_module_classes: names of classes whose instances stay on one device.
        max_memory: bytes of each device; None divides the model's size by the number of devices.
    """
    no_split = list(no_split_module_classes or ())
    limits: MaxMemory
    if max_memory is not None:
        limits = max_memory
    else:
        size, _ = calculate_maximum_sizes(model)
        limits = get_balanced_memory(model, dict.fromkeys(range(num_processes), size), no_split)
    return infer_auto_device_map(model, limits, no_split_module_classes=no_split, clean_result=False)
