"""Pipeline parallelism in training: loss, gradients of tied weights and names, on the stages of accel_bigmodel."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accel_bigmodel.pipeline import microbatches
from accel_bigmodel.pipeline.runtime import PipelineRuntime
from accel_bigmodel.pipeline.split import PipelineSplit, split_model
from accel_bigmodel.pipeline.stage import Stage, extract
from accel_state.errors import ConfigurationError
from accel_state.operations import send_to_device

from ..core.computed_loss import ComputedLoss
from ..core.local_part import local
from ..core.unwrap import clean_name
from .attention_checks import check_documents
from .axis_settings import SCHEDULES, PipelineParallelConfig
from .late_checks import LateChecks
from .sequence_inputs import IGNORED, shift_labels


def block_ranges(model: nn.Module, stages: int) -> tuple[str, tuple[range, ...]]:
    """The name of the model's list of blocks, and the blocks of each stage: earlier stages get one more if needed."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ConfigurationError(
            f"{type(model).__name__} has an encoder and a decoder, and a pipeline trains causal models. Train it with "
            "pp_size=1."
        )
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(block) for block in module}) == 1:
            sizes[name] = sum(parameter.numel() for parameter in module.parameters())
    if not sizes:
        raise ConfigurationError(
            f"{type(model).__name__} has no nn.ModuleList of blocks of one class, where it could be split into stages. "
            "Train it with pp_size=1."
        )
    path = max(sizes, key=lambda name: sizes[name])
    blocks = len(model.get_submodule(path))  # type: ignore[arg-type]
    if blocks < stages:
        raise ConfigurationError(
            f"{type(model).__name__} has {blocks} blocks ({path}), fewer than the {stages} stages of the pipeline. "
            "Choose a smaller pp_size, or fewer stages_per_rank."
        )
    each, more = divmod(blocks, stages)
    starts = [number * each + min(number, more) for number in range(stages + 1)]
    return path, tuple(range(start, end) for start, end in itertools.pairwise(starts))


@dataclass
class PipelineOutput:
    """The output of a prepared pipeline, on every rank."""

    loss: torch.Tensor | None  # of the whole batch of this replica; None without labels
    logits: torch.Tensor | None  # of the whole batch, in evaluation; None in training, where they stay on the last rank

    def __getitem__(self, key: str) -> torch.Tensor | None:
        value: torch.Tensor | None = getattr(self, key)
        return value


class TrainingPipeline:
    """A model in stages, and the training and evaluation of batches in them.

    A subclass may find :meth:`split_model`, :meth:`outputs_of_example` and :meth:`share` in other ways.

    Attributes:
        stage_class: the stages of torch's schedule; None for ``torch.distributed.pipelining.PipelineStage``.
    """

    stage_class: Callable[..., Any] | None = None

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        settings: PipelineParallelConfig,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.settings, self.device, self.compute_dtype = settings, device, compute_dtype
        self.rank, self.size, self.group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
        self.count = self.size * (settings.stages_per_rank or 1)
        path, ranges = block_ranges(model, self.count)
        self._loss_function: Any = getattr(model, "loss_function", None)
        if settings.loss_fn is None and self._loss_function is None:
            raise ConfigurationError(
                f"{type(model).__name__} has no loss_function, so the last stage cannot compute a loss. Pass one: "
                "PipelineParallelConfig(loss_fn=...)."
            )
        self._vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
        is_transformers = hasattr(model, "config") and hasattr(model, "base_model_prefix")
        self._options = {"use_cache": False} if is_transformers else {}
        example = self._example(model, settings.example)
        points = [f"{path}.{blocks[0]}" for blocks in ranges[1:]]
        block = type(model.get_submodule(f"{path}.0")).__name__
        modes = {module: module.training for module in model.modules()}
        forward = functools.partial(model.eval().forward, **self._options)
        self._signature = inspect.signature(forward)
        self.split = self.split_model(model, forward, points, [block], example)
        self._example_outputs = self.outputs_of_example(model, forward, example)
        for module, mode in modes.items():
            module.training = mode
        self.order = [name for name, _ in model.named_parameters()]
        self.state_names = [clean_name(name) for name in model.state_dict()]
        self.numbers = list(range(self.rank, self.count, self.size))
        parts = [extract(model, self.split, [number], device) for number in range(self.count)]
        self.ties = _find_ties(parts)
        self.parts = {number: parts[number] for number in self.numbers}
        self._stages = [self._make_stage(model, part, number) for number, part in self.parts.items()]
        self._model: nn.Module | None = model
        self._runtime: PipelineRuntime | None = None
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self._items: torch.Tensor | float = 1.0

    def _example(self, model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = next(model.parameters()).device
        if example is None and not self._options:
            raise ConfigurationError(
                f"{type(model).__name__} is not a model of Transformers, so how it is called is not known. Pass a "
                "small batch to record its calls with: PipelineParallelConfig(example=(tokens,))."
            )
        if example is None:
            vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr,operator]
            example = {"input_ids": torch.arange(8, device=device).view(2, 4) % vocabulary}
        args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
        kwargs.pop("labels", None)
        args, kwargs = send_to_device((args, kwargs), device)
        return args, kwargs

    def split_model(
        self, model: nn.Module, forward: Callable[..., Any], points: list[str], units: list[str], example: Any
    ) -> PipelineSplit:
        """The split of the model into stages; ``points`` are the first modules of the second and later ones."""
        return split_model(model, forward, points, units, example, self.count)

    def outputs_of_example(
        self, model: nn.Module, forward: Callable[..., Any], example: tuple[Any, Any]
    ) -> Sequence[Any] | None:
        """The recorded outputs. None where sharding will change their dtypes: the first micro-batch tells them."""
        return self.split.outputs if self.compute_dtype is None else None

    def _make_stage(self, model: nn.Module, part: nn.Module, number: int) -> Stage:
        original = model.__dict__.get("_original_forward", model.forward)
        if getattr(original, "__self__", None) is not model:
            raise ConfigurationError(
                f"{type(model).__name__}.forward was replaced on the object, so its stages cannot use it. Define it "
                "in the class."
            )
        forward: Any = types.MethodType(original.__func__, part)
        wrapper: Any = model.__dict__.get("forward")
        if hasattr(wrapper, "outputs_to_fp32"):  # mixed precision
            wrapper = copy.copy(wrapper)
            wrapper.forward, forward = forward, wrapper
        forward = functools.partial(forward, **self._options)
        stage = Stage(part, forward, self.split, number, self.device, lambda output: getattr(output, "logits", output))
        part.__dict__.pop("_original_forward", None)
        part.forward = stage.run
        stage.submodule = part
        return stage

    def assemble(self) -> nn.Module:
        """A model of the user's class with the modules of this rank, whose forward runs the pipeline."""
        assert self._model is not None
        model = extract(self._model, self.split, self.numbers, self.device)
        modules = dict(model.named_modules())
        for part in self.parts.values():
            for name, module in part.named_modules():
                target = modules.get(name)
                if target is not None and target is not module:
                    target._parameters.update(module._parameters)
                    target._buffers.update(module._buffers)
        self._model = None  # this rank keeps a part of it only
        model.__dict__.pop("_original_forward", None)
        model.forward = functools.partial(self._call, model)
        model.__dict__["_pipeline"] = self
        self._equalise_ties()
        self._runtime = PipelineRuntime(
            self._stages,
            self.split,
            SCHEDULES[self.settings.schedule],
            self.group,
            self._example_outputs,
            self.stage_class,
        )
        return model

    # Weights that the first and the last stage share

    def _tied(self) -> list[nn.Parameter]:
        """This rank's tied parameters, in the same order on the first and the last rank."""
        if self.rank == 0:
            return [self.parts[0].get_parameter(name) for name in self.ties]
        if self.rank == self.size - 1:
            return [self.parts[self.count - 1].get_parameter(name) for name in self.ties.values()]
        return []

    def name_in_model(self, name: str) -> str:
        """The name of a parameter of this rank in the whole model, where a tied one has its first name only."""
        return next((first for first, last in self.ties.items() if last == name), name)

    def saved_names(self) -> dict[str, str]:
        """The parameters whose optimizer state this rank saves, each with its name in the whole model."""
        names = [name for part in self.parts.values() for name, _ in part.named_parameters()]
        copies = set(self.ties.values()) if self.rank == self.size - 1 else set()
        return {clean_name(name): clean_name(name) for name in names if name not in copies}

    def duplicates(self) -> list[nn.Parameter]:
        """Parameters of this rank that the first rank has too, and counts in the gradient norm."""
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

    def _add_tied_gradients(self) -> None:
        """Add the gradients of a tied parameter's uses in the first and the last stage."""
        peer = self.size - 1 - self.rank
        for parameter in self._tied():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local(parameter.grad)
            sent, received = gradient.contiguous(), torch.empty_like(gradient, memory_format=torch.contiguous_format)
            ops = [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=peer),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=peer),
            ]
            for work in dist.batch_isend_irecv(ops if self.rank == 0 else ops[::-1]):
                work.wait()
            gradient.add_(received)

    # Running

    def _call(
        self, model: nn.Module, /, *args: Any, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> PipelineOutput:
        is_training = model.training and torch.is_grad_enabled()
        if is_training and labels is None:
            raise ConfigurationError(
                "a pipeline computes forward and backward passes in one call, and got no labels. Call "
                "model(input_ids=..., labels=...), then accelerator.backward(output.loss); or use model.eval() and "
                "torch.no_grad() for outputs."
            )
        checks = LateChecks()
        check_documents(kwargs, "the recorded stages of a pipeline", checks)
        inputs = args, {name: value for name, value in kwargs.items() if value is not None}
        try:  # on every rank: later only that of the stage concerned would fail
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigurationError(f"the arguments do not fit {type(model).__name__}.forward: {error}") from error
        samples = microbatches.batch_size_of(inputs)
        if samples is None:
            raise ConfigurationError("a pipeline was called without a tensor to split into micro-batches.")
        batches = microbatches.split(inputs, samples, self.settings.check_batch(samples, self.size))
        if is_training:
            assert labels is not None
            output = self._train(model, batches, labels)
        else:
            output = self._evaluate(batches, samples, labels)
        checks.settle()  # when the device has all of its work
        return output

    def _train(self, model: nn.Module, batches: list[Any], labels: torch.Tensor) -> PipelineOutput:
        assert self._runtime is not None
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        accumulated = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        scale = self.loss_scale()
        target = self._targets(labels, len(batches), scale)
        try:
            losses = self._runtime.train(batches, target, self._loss)
            self._add_tied_gradients()
        finally:
            computed = [parameter.grad for parameter in parameters]
            for parameter, gradient in zip(parameters, accumulated, strict=True):
                parameter.grad = gradient
        loss = self.share(torch.stack(losses).sum().detach() / scale if losses else None)

        def add_gradients(factor: torch.Tensor) -> None:
            for parameter, gradient in zip(parameters, computed, strict=True):
                if gradient is not None:
                    local(gradient).mul_((factor / scale).to(local(gradient).device))
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

        trigger = torch.zeros((), device=self.device, requires_grad=True)
        return PipelineOutput(ComputedLoss.apply(trigger, loss, add_gradients), None)

    def _evaluate(self, batches: list[Any], samples: int, labels: torch.Tensor | None) -> PipelineOutput:
        assert self._runtime is not None
        with torch.no_grad():
            outputs = self._runtime.run(batches)
            logits = self.share(microbatches.merge(outputs, samples // len(batches)) if outputs else None)
            if labels is None:
                return PipelineOutput(None, logits)
            return PipelineOutput(self._loss(logits, self._targets(labels, len(batches), 1.0)), logits)

    def _targets(self, labels: torch.Tensor, count: int, scale: float) -> torch.Tensor:
        if self.settings.loss_fn is not None:
            self._items = count / scale
            return labels
        target = shift_labels(labels)
        self._items = (target != IGNORED).sum().clamp(min=1) / scale
        return target

    def _loss(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor
        if self.settings.loss_fn is not None:
            loss = self.settings.loss_fn(outputs, target) / self._items
        else:
            loss = self._loss_function(
                outputs, target, vocab_size=self._vocab_size, num_items_in_batch=self._items, shift_labels=target
            )
        return loss

    def share(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """The tensor of the last rank, on every rank."""
        meta: list[Any] = [None if tensor is None else (tensor.shape, tensor.dtype)]
        dist.broadcast_object_list(meta, group_src=self.size - 1, group=self.group)
        shape, dtype = meta[0]
        shared = tensor.contiguous() if tensor is not None else torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(shared, group_src=self.size - 1, group=self.group)
        return shared


def _find_ties(parts: Sequence[nn.Module]) -> dict[str, str]:
    """Names of parameters of the first stage that the last one has too, with their names there."""
    first = dict(parts[0].named_parameters())
    last = {id(parameter): name for name, parameter in parts[-1].named_parameters()}
    seen = {id(parameter) for parameter in first.values()} | set(last)
    for part in parts[1:-1]:
        for name, parameter in part.named_parameters():
            if id(parameter) in seen:
                raise ConfigurationError(
                    f"{name} is used by several stages. A pipeline can share parameters of its first and last stage "
                    "only, such as an embedding and the head. Train this model with pp_size=1."
                )
            seen.add(id(parameter))
    return {name: last[id(parameter)] for name, parameter in first.items() if id(parameter) in last}
