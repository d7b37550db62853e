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
from .sequence_inputs import IGNORED, SequenceCalls, shift_labels


def block_ranges(model: nn.Module, stages: int) -> tuple[str, tuple[range, ...]]:
    """Return the name of the model's list of blocks, and each stage's blocks: earlier stages get one more if needed."""
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


_LOSS_ARGUMENTS = ("shift_labels", "num_items_in_batch")  # that models of Transformers pass on to their loss


@dataclass
class Labels:
    """What the loss of a call is computed from."""

    given: torch.Tensor
    shifted: torch.Tensor | None  # by one position, where the caller has done that
    items: torch.Tensor | float | None  # that the loss is divided by; None for the number of labels


@dataclass
class PipelineOutput:
    """The output of a prepared pipeline, on every rank."""

    loss: torch.Tensor | None  # of the whole batch of this replica; None without labels
    logits: torch.Tensor | None  # of the whole batch, in evaluation; None in training, where they stay on the last rank

    def __getitem__(self, key: str | int) -> torch.Tensor | None:
        """Return a value by name; or by number, of those that are not None."""
        values = vars(self)
        return values[key] if isinstance(key, str) else [value for value in values.values() if value is not None][key]

    def __contains__(self, name: object) -> bool:
        return vars(self).get(str(name)) is not None


def is_transformers_model(model: nn.Module) -> bool:
    """Return True if a model is a ``PreTrainedModel``, without importing Transformers."""
    return hasattr(model, "config") and hasattr(model, "base_model_prefix")


def check_auxiliary_loss(router_logits: bool | None) -> None:
    """Refuse a loss of which the last stage knows a part only."""
    if router_logits:
        raise ConfigurationError(
            "a pipeline does not support output_router_logits=True: the auxiliary loss needs the routers of all "
            "stages. Set it to False in the model's config, or pp_size=1."
        )


class TrainingPipeline:
    """A model in stages, and the training and evaluation of batches in them.

    A subclass may find :meth:`split_model`, :meth:`outputs_of_example` and :meth:`share` in other ways.

    Attributes:
        stage_class: the stages of torch's schedule; None for ``torch.distributed.pipelining.PipelineStage``.
        calls: what gives a call the positions and labels of its part of each sequence; None if sequences are whole.
    """

    stage_class: Callable[..., Any] | None = None
    calls: SequenceCalls | None = None

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        settings: PipelineParallelConfig,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.settings: PipelineParallelConfig = settings
        self.device: torch.device = device
        self.compute_dtype: torch.dtype | None = compute_dtype
        self.rank: int = mesh.get_local_rank()
        self.size: int = mesh.size()
        self.group: dist.ProcessGroup = mesh.get_group()
        self.count: int = self.size * (settings.stages_per_rank or 1)
        path, ranges = block_ranges(model, self.count)
        self._loss_function: Any = getattr(model, "loss_function", None)
        if settings.loss_fn is None and self._loss_function is None:
            raise ConfigurationError(
                f"{type(model).__name__} has no loss_function, so the last stage cannot compute a loss. Pass one: "
                "PipelineParallelConfig(loss_fn=...)."
            )
        self._shifts = settings.loss_fn is None  # the loss of causal language models, on shifted labels
        self._vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
        self._options = {"use_cache": False} if is_transformers_model(model) else {}
        example = self._example(model, settings.example)
        points = [f"{path}.{blocks[0]}" for blocks in ranges[1:]]
        block = type(model.get_submodule(f"{path}.0")).__name__
        modes = {module: module.training for module in model.modules()}
        forward = functools.partial(model.eval().forward, **self._options)
        self._signature = inspect.signature(forward)
        self.split: PipelineSplit = self.split_model(model, forward, points, [block], example)
        self._example_outputs = self.outputs_of_example(model, forward, example)
        for module, mode in modes.items():
            module.training = mode
        self.order: list[str] = [name for name, _ in model.named_parameters()]
        self.state_names: list[str] = [clean_name(name) for name in model.state_dict()]
        places = {number: rank for rank in range(self.size) for number in settings.stages_of(rank, self.size)}
        self.places: list[int] = [places[number] for number in range(self.count)]
        self.numbers: list[int] = settings.stages_of(self.rank, self.size)
        parts = [extract(model, self.split, [number], device) for number in range(self.count)]
        self.ties: dict[str, str] = _find_ties(parts)
        self.parts: dict[int, nn.Module] = {number: parts[number] for number in self.numbers}
        self._stages = [self._make_stage(model, part, number) for number, part in self.parts.items()]
        self._model: nn.Module | None = model
        self._runtime: PipelineRuntime | None = None
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.check_factor: Callable[[torch.Tensor], None] | None = None  # called with what multiplies a loss
        self._items: torch.Tensor | float = 1.0
        self._loss_dtypes: dict[bool, torch.dtype] = {}  # by whether autocast is on

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
        """Return the split of the model into stages; ``points`` are the first modules of the second and later ones."""
        return split_model(model, forward, points, units, example, self.count)

    def outputs_of_example(
        self, model: nn.Module, forward: Callable[..., Any], example: tuple[Any, Any]
    ) -> Sequence[Any] | None:
        """Return the recorded outputs.

        None where sharding will change their dtypes: the first micro-batch tells them.
        """
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
        """Return a model of the user's class with the modules of this rank, whose forward runs the pipeline."""
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
        model.forward.__signature__ = self._signature  # type: ignore[attr-defined]  # for who looks for arguments
        model.__dict__["_pipeline"] = self
        if hasattr(model, "generate"):
            model.__dict__["generate"] = _refuse_to_generate
        self._equalise_ties()
        self._runtime = PipelineRuntime(
            self._stages,
            self.split,
            SCHEDULES[self.settings.schedule],
            self.group,
            self._example_outputs,
            self.stage_class,
            self.places,
        )
        return model

    # Weights that the first and the last stage share

    def _tied(self) -> list[nn.Parameter]:
        """Return this rank's copies of tied parameters, in one order on the ranks of the first and the last stage."""
        first, last = self.places[0], self.places[-1]
        if first == last:  # they are the same objects there
            return []
        if self.rank == first:
            return [self.parts[0].get_parameter(name) for name in self.ties]
        if self.rank == last:
            return [self.parts[self.count - 1].get_parameter(name) for name in self.ties.values()]
        return []

    def name_in_model(self, name: str) -> str:
        """Return the name of a parameter of this rank in the whole model, where a tied one has its first name only."""
        return next((first for first, last in self.ties.items() if last == name), name)

    def saved_names(self) -> dict[str, str]:
        """Return the parameters whose optimizer state this rank saves, each with its name in the whole model."""
        names = [name for part in self.parts.values() for name, _ in part.named_parameters()]
        copies = set(self.ties.values()) if self.rank == self.places[-1] else set()
        return {clean_name(name): clean_name(name) for name in names if name not in copies}

    def duplicates(self) -> list[nn.Parameter]:
        """Parameters of this rank that the first rank has too, and counts in the gradient norm."""
        return self._tied() if self.rank == self.places[-1] else []

    def _equalise_ties(self) -> None:
        for parameter in self._tied():
            values = local(parameter.data)
            if self.rank == 0:
                dist.send(values.contiguous(), group_dst=self.size - 1, group=self.group)
            else:
                received = torch.empty_like(values, memory_format=torch.contiguous_format)
                dist.recv(received, group_src=0, group=self.group)
                values.copy_(received)

    def _add_tied_gradients(self, checks: LateChecks) -> None:
        """Add the gradients of a tied parameter's uses in the first and the last stage."""
        peer = self.size - 1 - self.rank
        for parameter, names in zip(self._tied(), self.ties.items(), strict=False):  # none in the stages between
            is_trained = parameter.requires_grad
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            own = local(gradient)
            flag = own.new_full((1,), float(is_trained))
            # What the other one of the first and the last rank sends in exchange.
            received = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (own, flag)]
            sends = [
                dist.P2POp(dist.isend, tensor.contiguous(), group=self.group, group_peer=peer) for tensor in (own, flag)
            ]
            receives = [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer) for tensor in received]
            for work in dist.batch_isend_irecv([*sends, *receives] if self.rank == 0 else [*receives, *sends]):
                work.wait()
            gradient_there, its_flag = received
            checks.refuse_if((its_flag != flag).any(), functools.partial(_frozen_in_part, *names))
            if is_trained:
                own.add_(gradient_there)
                parameter.grad = gradient

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
        check_auxiliary_loss(kwargs.get("output_router_logits"))
        checks = LateChecks()
        check_documents(kwargs, "the recorded stages of a pipeline", checks)
        if self.calls is not None and self.calls.packed:
            raise ConfigurationError(
                "position_ids or boundaries mark several documents packed into a sequence, and micro-batches of split "
                "sequences do not keep them apart. Pad documents instead of packing them, or train with pp_size=1."
            )
        shifted, items = (kwargs.pop(name, None) if self._shifts else None for name in _LOSS_ARGUMENTS)
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
            output = self._train(model, batches, Labels(labels, shifted, items), checks)
        else:
            output = self._evaluate(model, batches, samples, None if labels is None else Labels(labels, shifted, items))
        checks.settle()  # when the device has all of its work
        return output

    def _train(self, model: nn.Module, batches: list[Any], labels: Labels, checks: LateChecks) -> PipelineOutput:
        assert self._runtime is not None
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        accumulated = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        scale = self.loss_scale()
        target = self._targets(labels, len(batches), scale)
        try:
            losses = self._runtime.train(batches, target, self._loss)
            self._add_tied_gradients(checks)
        finally:
            computed = [parameter.grad for parameter in parameters]
            for parameter, gradient in zip(parameters, accumulated, strict=True):
                parameter.grad = gradient
        loss = self._share_loss(torch.stack(losses).sum().detach() / scale if losses else None)

        def add_gradients(factor: torch.Tensor) -> None:
            if self.check_factor is not None:
                self.check_factor(factor)
            ratio = factor / scale
            for parameter, gradient in zip(parameters, computed, strict=True):
                if gradient is not None:
                    own = local(gradient)
                    own.mul_(ratio.to(own.device))
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

        trigger = torch.zeros((), device=self.device, requires_grad=True)
        return PipelineOutput(ComputedLoss.apply(trigger, loss, add_gradients), None)

    def _evaluate(self, model: nn.Module, batches: list[Any], samples: int, labels: Labels | None) -> PipelineOutput:
        assert self._runtime is not None
        accumulated = [(parameter, parameter.grad) for parameter in model.parameters()]
        with torch.no_grad():
            outputs = self._runtime.run(batches)
            for parameter, gradient in accumulated:
                parameter.grad = gradient  # torch clears those of sharded stages when it meets new shapes
            logits = self.share(microbatches.merge(outputs, samples // len(batches)) if outputs else None)
            if labels is None:
                return PipelineOutput(None, logits)
            return PipelineOutput(self._loss(logits, self._targets(labels, len(batches), 1.0)), logits)

    def _targets(self, labels: Labels, count: int, scale: float) -> torch.Tensor:
        if not self._shifts:
            self._items = count / scale
            return labels.given
        target = shift_labels(labels.given) if labels.shifted is None else labels.shifted
        items = (target != IGNORED).sum().clamp(min=1) if labels.items is None else labels.items
        self._items = items / scale
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

    def _share_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Return the loss of the last stage, on every rank: in one message, after the first one has told its dtype.

        It is sent whether or not it is read: a script may read it on some ranks only, which must not wait for others.
        """
        kind = torch.is_autocast_enabled(self.device.type)
        if kind not in self._loss_dtypes:
            shared = self.share(loss)
            self._loss_dtypes[kind] = shared.dtype
            return shared
        dtype = self._loss_dtypes[kind]
        shared = torch.empty((), dtype=dtype, device=self.device) if loss is None else loss.to(dtype)
        dist.broadcast(shared, group_src=self.places[-1], group=self.group)
        return shared

    def share(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor of the rank of the last stage, on every rank."""
        source = self.places[-1]
        meta: list[Any] = [None if tensor is None else (tensor.shape, tensor.dtype)]
        dist.broadcast_object_list(meta, group_src=source, group=self.group)
        shape, dtype = meta[0]
        shared = tensor.contiguous() if tensor is not None else torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(shared, group_src=source, group=self.group)
        return shared


def _frozen_in_part(first: str, last: str) -> ConfigurationError:
    return ConfigurationError(
        f"{last} is tied to {first}, and one of them is frozen and the other one is trained: they are on different "
        "ranks of the pipeline. Set requires_grad of both to the same value."
    )


def _refuse_to_generate(*_: Any, **__: Any) -> None:
    raise ConfigurationError(
        "a pipeline does not generate: its stages keep no keys and values of earlier tokens. Save the model "
        "(accelerator.save_model), and generate with pp_size=1."
    )


def _find_ties(parts: Sequence[nn.Module]) -> dict[str, str]:
    """Return the names of parameters of the first stage that the last one has too, with their names there."""
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
