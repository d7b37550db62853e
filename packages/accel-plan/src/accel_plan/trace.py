"""Traces one training step of one rank: the real wrapping and step, on tensors with shapes only."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel.fsdp.meta_init import allocate, owners_of
from accel.parallel.axis_settings import PipelineParallelConfig
from accel_bigmodel.estimate.activations import example_inputs
from accel_data import DataLoaderConfiguration
from accel_state.errors import ConfigurationError

from ._torch_compat import fsdp1_unit_bytes, fsdp2_units, fsdp2_unsharded_bytes
from .memory import BACKWARD, FORWARD, WHOLE_MODEL, MemoryTracker, StepMemory
from .models import build_model
from .operations import Passes, more_operations
from .peak import more_blocks
from .record import Axes, Recorder, Traffic, add_traffic, storage_bytes
from .stages import SharedSplit, SimulatedPipeline, StageMemory, StageMonitor, recording_pass
from .step import ShardOptimizer, categorize_unreduced, follow_steps, implementation_for
from .world import ReplicatedModel, attention_of_gpus, simulated_rank, without_memory

DATA_AXES = ("dp", "dp_replicate", "dp_shard")
TRACED_BLOCKS = 3
"""Number of equal blocks that a model, or a stage of it, is reduced to. It is traced with one block less, too."""


@dataclass(frozen=True)
class RankBatch:
    """The samples of a rank."""

    ranks: int  # number of ranks with different samples
    rank: int  # the index of this one among them
    global_size: int  # samples in a micro batch of all ranks
    samples: tuple[int, ...]  # this rank's first micro batch, as indices into the unshuffled data set


@dataclass(frozen=True)
class RankTrace:
    """What one rank holds and sends, in bytes except for ``values`` and ``trained``."""

    values: int  # number of parameter elements in the full model
    trained: int  # those of them that are trained
    weights: int
    gradients: int
    activations: int  # alive between forward and backward, except parameters
    largest_unit: int  # the largest set of parameters that is gathered at once
    traffic: tuple[Traffic, ...]  # of an optimizer step
    stages: StageMemory | None = None  # with a pipeline
    step: StepMemory | None = None  # None if the memory of a step was not followed
    implementation: str = ""  # of the optimizer in that step
    operations: Passes = ()  # of that step


@dataclass(frozen=True)
class TraceTask:
    """What to trace."""

    config: Any  # the Transformers configuration of the model
    rank: int
    world_size: int
    local_world_size: int
    variables: Mapping[str, str]  # the environment variables that the launcher would set
    axes: Axes
    batch_size: int  # of the loader
    seq_length: int
    split_batches: bool = False
    trust_remote_code: bool = False
    dtype: str | None = None  # of the weights, if not float32
    pipeline: PipelineParallelConfig | None = None
    optimizer: str = "adamw"
    implementation: str | None = None  # of the optimizer; None: the default on accelerators
    on_cpu: bool = False
    follow: bool = True  # the memory of a step
    timed: bool = False  # the operations of a step


def trace(task: TraceTask, shared: SharedSplit | None = None) -> tuple[RankTrace, RankBatch]:
    """Prepare the model as a script would, and take a step.

    Args:
        task: what to trace.
        shared: of a pipeline, to trace several of its ranks: the same object for all of them.

    Raises:
        ConfigurationError: the configuration cannot train this model on these ranks, or the model cannot run on
            tensors without values.
    """
    from accel.accelerator import Accelerator

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*data pointer of FakeTensor.*")
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        variables = {**task.variables, **_variable_overrides(task.variables)}
        stack.enter_context(simulated_rank(task.rank, task.world_size, task.local_world_size, variables))
        monitor = StageMonitor(shared=shared or SharedSplit())
        loaders = DataLoaderConfiguration(split_batches=task.split_batches)
        accelerator: Any = Accelerator(cpu=True, dataloader_config=loaders)
        accelerator.startup_checks = None  # they look for mistakes of training loops, and the plan has its own
        # Only strategies of this kind read it.
        accelerator.strategy.wrapper_class = ReplicatedModel
        accelerator.strategy.pipeline_class = functools.partial(SimulatedPipeline, monitor)
        stack.callback(accelerator.free_memory)
        batch = _first_batch(accelerator, task)
        model = build_model(task.config, task.trust_remote_code)
        if task.dtype is not None:
            model = model.to(getattr(torch, task.dtype))
        values = sum(parameter.numel() for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        stack.enter_context(without_memory())
        if not task.on_cpu:
            stack.enter_context(attention_of_gpus())
        tracker: MemoryTracker | None = None
        if task.follow or task.timed:
            tracker = stack.enter_context(MemoryTracker(task.axes, task.timed, task.on_cpu).watching())
        _allocate(model)
        if tracker is not None:
            tracker.categorize((*model.parameters(), *model.buffers()), WHOLE_MODEL)
        if task.pipeline is not None:
            handler = _recording_microbatch(task, task.pipeline, model, len(batch.samples))
            accelerator.strategy.parallelism.pp_handler = handler
        monitor.tracker = tracker
        model = accelerator.prepare_model(model, device_placement=False)
        step = _Step(accelerator, model, monitor, tracker, task, len(batch.samples))
        return step.trace(values, trained), batch


def _allocate(model: nn.Module) -> None:
    """Move a model from the meta device. Module.to_empty would untie tied weights."""
    owners = owners_of(model)
    for module in model.modules():
        allocate(module, torch.device("cpu"), owners)


def _variable_overrides(variables: Mapping[str, str]) -> dict[str, str]:
    """Return overrides for settings that need values and do not change the number of bytes."""
    overrides = {}
    if "ACCELERATE_DYNAMO_BACKEND" in variables:
        overrides["ACCELERATE_DYNAMO_BACKEND"] = "no"
    if variables.get("ACCELERATE_USE_FSDP") == "true":
        overrides |= {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
        if variables.get("FSDP_VERSION", "1") == "1":
            # FSDP 1 compares data pointers to find out whether an original parameter was replaced.
            overrides["FSDP_USE_ORIG_PARAMS"] = "false"
    return overrides


def _first_batch(accelerator: Any, task: TraceTask) -> RankBatch:
    data = range(2 * task.batch_size * task.world_size)
    loader = accelerator.prepare(DataLoader(data, batch_size=task.batch_size))  # type: ignore[arg-type]
    samples = tuple(next(iter(loader)).tolist())
    ranks, data_rank = 1, 0
    for name, size in task.axes.items():
        if name in DATA_AXES:
            ranks, data_rank = ranks * size, data_rank * size + accelerator.strategy.axis_rank(name)
    return RankBatch(ranks, data_rank, len(samples) * ranks, samples)


@dataclass
class _Step:
    """A step of a prepared model."""

    accelerator: Any
    model: nn.Module
    monitor: StageMonitor
    tracker: MemoryTracker | None
    task: TraceTask
    samples: int
    traffic: list[tuple[int, tuple[Traffic, ...]]] = field(default_factory=list)
    activations: int = 0

    def trace(self, values: int, trained: int) -> RankTrace:
        """Take the step. ``values`` and ``trained`` are those of the result."""
        model, monitor, tracker, task = self.model, self.monitor, self.tracker, self.task
        weights, largest_unit = storage_bytes(model.parameters()), _largest_unit(model)
        step: StepMemory | None = None
        operations: Passes = ()
        implementation = ""
        try:
            if tracker is None:
                self._run_passes()
            else:
                tracker.name_modules(model)
                for part in monitor.pipeline.parts.values() if monitor.pipeline is not None else ():
                    tracker.name_modules(part)
                implementation = implementation_for(task.implementation, model.parameters())
                optimizer = ShardOptimizer(task.optimizer, implementation, model.parameters())
                step = follow_steps(self.accelerator, model, optimizer, tracker, self._run_passes)
                operations = tracker.operations()
        except ConfigurationError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigurationError(
                f"{type(model).__name__} cannot take a step on tensors without values: {reason}. `accel "
                "estimate-memory` estimates the memory of its parameters."
            ) from error
        stages = monitor.result() if task.pipeline is not None else None
        sizes = (weights, self.gradients, self.activations, largest_unit)
        step, traffic = step if task.follow else None, add_traffic(self.traffic)
        return RankTrace(values, trained, *sizes, traffic, stages, step, implementation, operations)

    def _run_passes(self) -> None:
        """Run each kind of pass once, and record its traffic."""
        # Of the micro batches that only accumulate, the first may gather parameters that the next ones reuse.
        accumulating = self.accelerator.gradient_accumulation_steps - 1
        for times, synchronises in [(min(accumulating, 1), False), (accumulating - 1, False), (1, True)]:
            if times > 0:
                recorder = Recorder(self.task.axes)
                if self.tracker is not None:
                    self.tracker.begin_pass(times)
                self._run_one(synchronises, recorder)
                self.traffic.append((times, recorder.traffic))
                if self.tracker is not None:
                    categorize_unreduced(self.model, self.tracker)
        gradients = (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
        self.gradients: int = storage_bytes(gradients)

    def _run_one(self, synchronises: bool, recorder: Recorder) -> None:
        """Run one forward and backward pass, and measure the bytes that are alive between them."""
        accelerator, model, task = self.accelerator, self.model, self.task
        self.monitor.enter(FORWARD)
        # The adapter gives this rank its part of the sequences if they are split over attention heads.
        inputs = next(iter(accelerator.deepspeed_ulysses_dl_adapter([_model_inputs(model, task, self.samples)], model)))
        with ExitStack() as stack:
            stack.enter_context(nullcontext() if synchronises else accelerator.no_sync(model))
            if task.axes.get("cp", 1) > 1:
                sequences = [item for item in inputs.values() if item.ndim > 1 and item.shape[1] == task.seq_length]
                dims = [1] * len(sequences)
                stack.enter_context(accelerator.maybe_context_parallel(buffers=sequences, buffer_seq_dims=dims))
            stack.enter_context(recorder)
            if task.pipeline is not None:
                # The forward of a pipeline also runs its backward passes.
                stack.enter_context(recording_pass(self.monitor, model, recorder))
            loss = _loss_of(model(**inputs))
            pipeline = task.pipeline is not None
            live = max(self.monitor.result().activations) if pipeline else recorder.live_bytes(model)
            self.activations = max(self.activations, live)
            self.monitor.enter(BACKWARD)
            accelerator.backward(loss)
            del loss


def _recording_microbatch(
    task: TraceTask, settings: PipelineParallelConfig, model: nn.Module, samples: int
) -> PipelineParallelConfig:
    """Return the settings with a micro-batch as the example, so that stages know their shapes without other ranks."""
    size = samples // settings.check_batch(samples, task.axes["pp"])
    inputs = _model_inputs(model, task, samples)
    example: dict[str, Any] = {name: item[:size] for name, item in inputs.items() if name != "labels"}
    parts = task.axes.get("cp", 1) * task.axes.get("sp", 1)
    if parts > 1:
        # Split sequences come with positions and a mask, and without a cache.
        example = {name: item[:, : task.seq_length // parts] for name, item in example.items()}
        added = {"position_ids": example["input_ids"], "attention_mask": example["input_ids"], "use_cache": False}
        taken = inspect.signature(model.forward).parameters
        example |= {name: value for name, value in added.items() if name in taken}
    return replace(settings, example=example)


def _model_inputs(model: nn.Module, task: TraceTask, samples: int) -> dict[str, torch.Tensor]:
    from accel.core.unwrap import extract_model_from_parallel

    inner: Any = extract_model_from_parallel(model)
    inner = inner.module if isinstance(inner, ReplicatedModel) else inner
    inputs = example_inputs(inner, samples, task.seq_length)
    heads = ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration")
    predicts_tokens = any(head in type(inner).__name__ for head in heads)
    if predicts_tokens and "input_ids" in inputs and "labels" in inspect.signature(inner.forward).parameters:
        inputs["labels"] = torch.zeros_like(inputs["input_ids"])
    return inputs


def _loss_of(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    values = list(output.values()) if isinstance(output, Mapping) else output
    values = values if isinstance(values, (tuple, list)) else [values]
    first = next(value for value in values if isinstance(value, torch.Tensor) and value.requires_grad)
    return first.float().mean()


def _largest_unit(model: nn.Module) -> int:
    """Return bytes of the largest set of parameters that is gathered at once; 0 if none are."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    sizes = [0]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            sizes += [sum(map(fsdp2_unsharded_bytes, unit)) for unit in fsdp2_units(module)]
        elif isinstance(module, FullyShardedDataParallel):
            sizes.append(fsdp1_unit_bytes(module))
    return max(sizes)


def trace_blocks(task: TraceTask, all_blocks: bool = False) -> tuple[RankTrace, RankBatch]:
    """Like :func:`trace`, but trace few of many equal blocks.

    All figures grow by the same amount with each block, so models of two and three blocks give those of any number: the
    block in the middle is repeated. If the resulting number of parameters is not that of the full model, or the traces
    differ by more than that block, the full model is traced.
    """
    blocks = getattr(task.config, "num_hidden_layers", None)
    kinds = set(getattr(task.config, "layer_types", None) or ["all"])
    # The first blocks of DeepSeek-V3 have no experts: those with experts are the equal ones.
    traced = TRACED_BLOCKS + (getattr(task.config, "first_k_dense_replace", 0) or 0)
    if all_blocks or not isinstance(blocks, int) or blocks <= traced or len(kinds) > 1:
        return trace(task)
    smaller, batch = trace(replace(task, config=with_blocks(task.config, traced - 1)))
    larger, _ = trace(replace(task, config=with_blocks(task.config, traced)))
    result = extrapolate(smaller, larger, blocks - traced, traced)
    if result is not None:
        model = build_model(task.config, task.trust_remote_code)
        if result.values == sum(parameter.numel() for parameter in model.parameters()):
            return result, batch
    return trace(task)


def with_blocks(config: Any, number: int) -> Any:
    """Return a copy of a configuration with another number of blocks."""
    changed = copy.deepcopy(config)
    changed.num_hidden_layers = number
    if getattr(changed, "layer_types", None):
        changed.layer_types = changed.layer_types[:number]
    return changed


def extrapolate(smaller: RankTrace, larger: RankTrace, steps: int, blocks: int = TRACED_BLOCKS) -> RankTrace | None:
    """Return the larger trace plus ``steps`` times its difference to the smaller one; None if blocks are not alike."""
    step = None
    if smaller.step is not None and larger.step is not None:
        step = more_blocks(smaller.step, larger.step, blocks, steps)
        if step is None:
            return None
    operations = more_operations(smaller.operations, larger.operations, blocks, steps)
    if operations is None:
        return None

    def extend(first: int, second: int) -> int:
        return second + steps * (second - first)

    names = ("values", "trained", "weights", "gradients", "activations")
    numbers: dict[str, Any] = {name: extend(getattr(smaller, name), getattr(larger, name)) for name in names}
    stages = larger.stages
    if smaller.stages is not None and stages is not None:
        pairs = zip(smaller.stages.activations, stages.activations, strict=True)
        gathered = extend(smaller.stages.gathered, stages.gathered)
        stages = replace(stages, activations=tuple(extend(*pair) for pair in pairs), gathered=gathered)
    traffic = add_traffic([(1 + steps, larger.traffic), (-steps, smaller.traffic)])
    return replace(larger, **numbers, traffic=traffic, stages=stages, step=step, operations=operations)


def data_ranks(axes: Axes) -> int:
    """Return the number of ranks that get different samples."""
    return math.prod(size for name, size in axes.items() if name in DATA_AXES)
