"""One training step of one rank, without memory: the real wrapping and the real step, on tensors that have shapes only."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel.fsdp.meta_init import allocate, places_of
from accel.parallel.pipeline import PipelineParallelConfig
from accel_bigmodel.estimate.activations import example_inputs
from accel_data import DataLoaderConfiguration
from accel_state.errors import ConfigurationError

from .models import build_model
from .record import Collective, Layout, Recorder, stored
from .stages import Kept, Passed, make_schedule, one_pass, seen, watching
from .world import pretended_rank, without_memory


@dataclass(frozen=True)
class Batch:
    """What a rank gets of the data.

    Attributes:
        ranks: how many ranks get different data.
        rank: which of them this one is.
        global_size: samples of a micro batch on all of them.
        samples: the samples of this rank's first micro batch, by their place in the data, unshuffled.
    """

    ranks: int
    rank: int
    global_size: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """What one rank holds and sends. Bytes, but for ``values`` and ``trained``.

    Attributes:
        values: parameters of the whole model.
        trained: those of them that are trained.
        weights: this rank's parameters, between steps.
        gradients: its gradients, when an optimizer step is taken.
        activations: what is alive from forward to backward, beside parameters.
        largest_unit: of parameters that are gathered together, the most on this rank.
        collectives: what an optimizer step sends.
        stages: of a pipeline, what its schedule keeps on this rank.
    """

    values: int
    trained: int
    weights: int
    gradients: int
    activations: int
    largest_unit: int
    collectives: tuple[Collective, ...]
    stages: Kept | None = None


@dataclass(frozen=True)
class Task:
    """What to trace.

    Attributes:
        config: the configuration of a model of Transformers.
        rank: the rank to be.
        world_size: the number of ranks.
        local_world_size: ranks on each node.
        variables: what the launcher would hand to the process.
        layout: how ranks are laid out.
        batch_size: samples of the loader's batch.
        seq_length: tokens in a sample.
        split_batches: the batch is that of all ranks together.
        trust_remote_code: run model code that comes with the model.
        dtype: the type of the weights, where it is not float32.
        pipeline: how a pipeline works.
        incoming: what a later stage of a pipeline gets from the one before.
    """

    config: Any
    rank: int
    world_size: int
    local_world_size: int
    variables: Mapping[str, str]
    layout: Layout
    batch_size: int
    seq_length: int
    split_batches: bool = False
    trust_remote_code: bool = False
    dtype: str | None = None
    pipeline: PipelineParallelConfig | None = None
    incoming: Passed | None = None


def trace(task: Task) -> tuple[Measured, Batch]:
    """Prepare the model as a script would, and take a step with it.

    Raises:
        ConfigurationError: the configuration cannot train this model on so many ranks, or the model cannot run on
            tensors without values.
    """
    from accel.accelerator import Accelerator

    variables = {**task.variables, **_changed(task.variables)}
    with (
        _quiet(),
        pretended_rank(task.rank, task.world_size, task.local_world_size, variables),
        watching(task.incoming),
    ):
        loaders = DataLoaderConfiguration(split_batches=task.split_batches)
        accelerator = Accelerator(cpu=True, dataloader_config=loaders)
        if task.pipeline is not None:
            accelerator.strategy.parallelism.pp_handler = task.pipeline  # type: ignore[attr-defined]
        try:
            batch = _batch(accelerator, task)
            model = build_model(task.config, task.trust_remote_code)
            if task.dtype is not None:
                model = model.to(getattr(torch, task.dtype))
            parameters = list(model.parameters())
            values, trained = (
                sum(item.numel() for item in parameters if flag or item.requires_grad) for flag in (True, False)
            )
            with without_memory():
                # Module.to_empty would give each place of a tied weight memory of its own.
                places = places_of(model)
                for module in model.modules():
                    allocate(module, torch.device("cpu"), places)
                # It is where it belongs: nowhere.
                model = accelerator.prepare_model(model, device_placement=False)
                measured = _step(accelerator, model, task, len(batch.samples))
        finally:
            accelerator.free_memory()
    return replace(measured, values=values, trained=trained), batch


def _changed(variables: Mapping[str, str]) -> dict[str, str]:
    """Settings that change neither bytes nor shapes, and that tensors without values cannot follow."""
    changed = {name: "no" for name in variables if name == "ACCELERATE_DYNAMO_BACKEND"}
    if variables.get("ACCELERATE_USE_FSDP") == "true":
        # All ranks have the same weights: none.
        changed |= {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
        if variables.get("FSDP_VERSION", "1") == "1":
            # Version 1 finds out by the address of memory whether a parameter has been replaced.
            changed["FSDP_USE_ORIG_PARAMS"] = "false"
    return changed


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*data pointer of FakeTensor.*")
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        yield


def _batch(accelerator: Any, task: Task) -> Batch:
    """Read the first batch as a script would: through a prepared loader."""
    data = range(2 * task.batch_size * task.world_size)
    loader = accelerator.prepare(DataLoader(data, batch_size=task.batch_size))  # type: ignore[arg-type]
    samples = tuple(next(iter(loader)).tolist())
    ranks = _product(task.layout, ("dp", "dp_replicate", "dp_shard"))
    place = 0
    for name, size in task.layout:
        if name in ("dp", "dp_replicate", "dp_shard"):
            place = place * size + accelerator.strategy.axis_rank(name)
    return Batch(ranks, place, len(samples) * ranks, samples)


def _product(layout: Layout, names: tuple[str, ...]) -> int:
    product = 1
    for name, size in layout:
        product *= size if name in names else 1
    return product


def _step(accelerator: Any, model: nn.Module, task: Task, samples: int) -> Measured:
    weights, largest = stored(model.parameters()), _largest_unit(model)
    try:
        passes = list(_passes(accelerator, model, task, samples))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"{type(model).__name__} cannot take a step on tensors without values: "
            f"{' '.join(str(error).split())[:300]}. "
            "`accel estimate-memory` says what its parameters take."
        ) from error
    gradients = stored(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    sent = _added([(times, recorder.collectives) for times, recorder, _ in passes])
    kept = seen() if task.pipeline is not None else None
    return Measured(0, 0, weights, gradients, max(alive for _, _, alive in passes), largest, tuple(sent), kept)


def _passes(accelerator: Any, model: nn.Module, task: Task, samples: int) -> Iterator[tuple[int, Recorder, int]]:
    """The micro batches of a step: how often, what was sent, and what was alive.

    Of those that only accumulate, the first may gather what the others then have.
    """
    early = accelerator.gradient_accumulation_steps - 1
    for times in (min(early, 1), early - 1):
        if times > 0:
            yield times, *_pass(accelerator, model, task, samples, accelerator.no_sync(model))
    yield 1, *_pass(accelerator, model, task, samples, nullcontext())


def _pass(accelerator: Any, model: nn.Module, task: Task, samples: int, synchronisation: Any) -> tuple[Recorder, int]:
    """Forward and backward; what was sent, and what was alive between them."""
    # A script's loader would be read through the same: it gives this rank its part of sequences that are shared by
    # heads.
    inputs = next(iter(accelerator.deepspeed_ulysses_dl_adapter([_inputs(model, task, samples)], model)))
    sequences = [tensor for tensor in inputs.values() if tensor.ndim > 1 and tensor.shape[1] == task.seq_length]
    with ExitStack() as stack:
        stack.enter_context(synchronisation)
        if dict(task.layout).get("cp", 1) > 1:
            dims = [1] * len(sequences)
            stack.enter_context(accelerator.maybe_context_parallel(buffers=sequences, buffer_seq_dims=dims))
        if task.pipeline is not None:
            make_schedule(model, inputs)
        recorder = stack.enter_context(Recorder(task.layout))
        if task.pipeline is not None:
            # Forward and backward passes are one call.
            stack.enter_context(one_pass(model, recorder))
        output = model(**inputs)
        loss = _loss(output)
        activations = recorder.alive(model) if task.pipeline is None else max(seen().alive)
        accelerator.backward(loss)
        del output, loss
    return recorder, activations


def _inputs(model: nn.Module, task: Task, samples: int) -> dict[str, torch.Tensor]:
    inner = _innermost(model)
    inputs = example_inputs(inner, samples, task.seq_length)
    if "input_ids" in inputs and "labels" in inspect.signature(inner.forward).parameters and _predicts_tokens(inner):
        inputs["labels"] = torch.zeros_like(inputs["input_ids"])
    return inputs


def _innermost(model: nn.Module) -> Any:
    from accel.core.unwrap import extract_model_from_parallel

    from .replica import Replica

    inner = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    return inner.module if isinstance(inner, Replica) else inner


def _predicts_tokens(model: nn.Module) -> bool:
    return any(part in type(model).__name__ for part in ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration"))


def _loss(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else [output]
    )
    first = next(value for value in values if isinstance(value, torch.Tensor) and value.requires_grad)
    return first.float().mean()


def _largest_unit(model: nn.Module) -> int:
    """Bytes of the largest set of parameters that is gathered at once, whole; 0 where none are."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    sizes = [0]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            sizes += [sum(_whole_bytes(item) for item in group.fsdp_params) for group in groups if group is not None]
        elif (
            isinstance(module, FullyShardedDataParallel)
            and module._handle is not None
            and module._handle.uses_sharded_strategy
        ):
            flat = module._handle.flat_param
            sizes.append(flat._unpadded_unsharded_size.numel() * flat.element_size())
    return max(sizes)


def _whole_bytes(holder: Any) -> int:
    size: torch.Size = holder._orig_size
    return size.numel() * int(holder.sharded_param.element_size())


def _added(parts: list[tuple[int, list[Collective]]]) -> list[Collective]:
    sums: dict[tuple[str, str, int], list[int]] = {}
    for factor, collectives in parts:
        for one in collectives:
            entry = sums.setdefault((one.kind, one.axis, one.ranks), [0, 0, 0])
            for index, value in enumerate((one.calls, one.payload, one.sent)):
                entry[index] += factor * value
    return [Collective(*key, *values) for key, values in sorted(sums.items())]


def trace_blocks(task: Task, whole: bool = False) -> tuple[Measured, Batch]:
    """The same as :func:`trace`, without taking every one of many equal blocks.

    All numbers of a model grow by the same amount with every further block, so models of two and three blocks say what
    one of eighty needs. The number of parameters that follows is compared with that of the whole model; where it is
    another, the whole model is traced.

    Args:
        task: what to trace.
        whole: take every block.
    """
    blocks = getattr(task.config, "num_hidden_layers", None)
    kinds = set(getattr(task.config, "layer_types", None) or ["all"])
    if whole or not isinstance(blocks, int) or blocks <= TRACED_BLOCKS or len(kinds) > 1:
        return trace(task)
    first, batch = trace(replace(task, config=with_blocks(task.config, TRACED_BLOCKS - 1)))
    second, _ = trace(replace(task, config=with_blocks(task.config, TRACED_BLOCKS)))
    measured = extended(first, second, blocks - TRACED_BLOCKS)
    values = sum(item.numel() for item in build_model(task.config, task.trust_remote_code).parameters())
    return (measured, batch) if measured.values == values else trace(task)


TRACED_BLOCKS = 3
"""So many at most, of many equal ones."""


def with_blocks(config: Any, number: int) -> Any:
    """A configuration with another number of blocks."""
    import copy

    small = copy.deepcopy(config)
    small.num_hidden_layers = number
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:number]
    return small


def extended(first: Measured, second: Measured, more: int) -> Measured:
    """What follows by adding the difference of two traces so many times to the second."""
    numbers = {
        name: getattr(second, name) + more * (getattr(second, name) - getattr(first, name))
        for name in ("values", "trained", "weights", "gradients", "activations")
    }
    grown = _added([(1 + more, list(second.collectives)), (-more, list(first.collectives))])
    return Measured(
        **numbers,
        largest_unit=second.largest_unit,
        collectives=tuple(grown),
        stages=_grown(first.stages, second.stages, more),
    )


def _grown(first: Kept | None, second: Kept | None, more: int) -> Kept | None:
    if first is None or second is None:
        return None
    alive = tuple(two + more * (two - one) for one, two in zip(first.alive, second.alive, strict=True))
    return replace(second, alive=alive, gathered=second.gathered + more * (second.gathered - first.gathered))
