"""Connects loaders, models and optimizers to a recorder, through public hooks of torch where there are any."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import IterableDataset, Sampler
from torch.utils.hooks import RemovableHandle

from accel_state.errors import ConfigurationError

from .parts import Part
from .recorder import DRAWN, SAMPLES, SKIPPED, TOKENS, Drawn, Recorder

_DATA, _FORWARD, _BACKWARD, _WAITING = int(Part.DATA), int(Part.FORWARD), int(Part.BACKWARD), int(Part.WAITING)
_OPTIMIZER, _EVALUATION, _OTHER = int(Part.OPTIMIZER), int(Part.EVALUATION), int(Part.OTHER)
_TOKENS = ("input_ids", "tokens")


def size_of(batch: Any) -> tuple[int, int]:
    """Return the samples and tokens of a batch: its first tensor's length, and the elements of its ``input_ids``."""
    if isinstance(batch, Tensor):
        shape = batch.shape
        return (shape[0] if shape else 1), 0
    if isinstance(batch, (list, tuple)):
        for item in batch:
            samples, tokens = size_of(item)
            if samples:
                return samples, tokens
        return 0, 0
    get = getattr(batch, "get", None)
    if get is None:
        return 0, 0
    for name in _TOKENS:
        ids = get(name)
        if isinstance(ids, Tensor):
            return ids.shape[0] if ids.dim() else 1, ids.numel()
    return size_of(list(batch.values()))


_CLASSES = "_accel_monitor_classes"
"""Attribute of the class of a measured object: what its methods need, and the class that the object had."""


def _extend(obj: Any, context: Any, methods: dict[str, Any]) -> None:
    """Give an object a subclass of its class, with further methods. Its copies and pickles are of the class itself.

    Raises:
        TypeError: its class cannot be extended.
    """
    unwatch(obj)
    cls = type(obj)
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    variant = type(cls.__name__, (cls,), {**names, **methods, "__reduce_ex__": _reduce, _CLASSES: (context, cls)})
    object.__setattr__(obj, "__class__", variant)


def unwatch(obj: Any) -> None:
    """Give a measured object its own class again."""
    classes = getattr(type(obj), _CLASSES, None)
    if classes is not None:
        object.__setattr__(obj, "__class__", classes[1])


def _reduce(obj: Any, protocol: Any) -> Any:
    """Pickle and copy a measured object as it was: worker processes measure nothing."""
    variant = type(obj)
    unwatch(obj)
    try:
        make, arguments, *rest = obj.__reduce_ex__(protocol)
    finally:
        object.__setattr__(obj, "__class__", variant)
    # The pickler compares the class given to __newobj__ with that of the object.
    return (_new if make.__name__ == "__newobj__" else make, arguments, *rest)


def _new(cls: type, *arguments: Any) -> Any:
    return cls.__new__(cls, *arguments)


class _Loading:
    """What the methods of a measured loader need.

    Attributes:
        drawn: the indices of the batches of this iteration; None if its sampler does not tell.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.drawn: Drawn | None = None


def _drawing(sampler: Any) -> Iterator[Any]:
    """Return the batches of indices of a measured sampler.

    No generator itself: what the sampler does where its iteration begins must happen there, and not with the first
    batch. A prepared loader reads what is left of the epoch in between.
    """
    loading, cls = getattr(type(sampler), _CLASSES)
    loading.drawn = Drawn()
    # The batches, each of which stays in the dictionary until it was handed out, without a line of Python for each.
    return map(loading.drawn.batches.setdefault, itertools.count(), cls.__iter__(sampler))


def _measured(loader: Any) -> Iterator[Any]:
    """Yield the batches of a measured loader."""
    loading, cls = getattr(type(loader), _CLASSES)
    recorder: Recorder = loading.recorder
    loading.drawn = None
    batches = cls.__iter__(loader)
    models, mark, append, also, now = recorder.models, recorder.mark, recorder.append, recorder.also, perf_counter
    try:
        while True:
            evaluating = bool(models) and not models[0].training
            begins = _EVALUATION if evaluating else _DATA
            append(begins)
            append(now())
            if also is not None:
                also(begins)
            try:
                batch = next(batches)
            except BaseException as error:
                mark(_EVALUATION if evaluating else recorder.idle)
                if isinstance(error, StopIteration):
                    return
                raise
            drawn = loading.drawn
            if evaluating:
                mark(_EVALUATION)
                if drawn is not None:
                    recorder.note(SKIPPED, drawn)
                recorder.bound()
            else:
                begins = recorder.after_batch
                append(begins)
                append(now())
                if also is not None:
                    also(begins)
                if drawn is not None:
                    append(DRAWN)
                    append(drawn)
                first = batch[0] if type(batch) is list and batch else None
                if type(first) is Tensor and (shape := first.shape) and shape[0]:
                    append(SAMPLES)
                    append(shape)  # the usual case, without a call
                else:
                    samples, tokens = size_of(batch)
                    recorder.note(SAMPLES, samples)
                    recorder.note(TOKENS, tokens)
                recorder.idle, recorder.is_new_batch = _OTHER, True
                if recorder.flops is not None:
                    recorder.flops.begin_batch()
            yield batch
    finally:
        if recorder.flops is not None:
            recorder.flops.abandon()
        if hasattr(batches, "close"):
            batches.close()


def watch_loader(loader: Any, recorder: Recorder) -> Callable[[], None]:
    """Measure every later iteration of a loader. The object stays the same; its class becomes a subclass of its own.

    Returns:
        A function that ends the measurement.

    Raises:
        ConfigurationError: the object cannot be iterated over, or its class cannot be extended.
    """
    cls = getattr(type(loader), _CLASSES, (None, type(loader)))[1]
    if not hasattr(cls, "__iter__"):
        raise ConfigurationError(
            f"loader={cls.__name__} object cannot be iterated over. Pass the DataLoader that the training loop uses."
        )
    loading = _Loading(recorder)
    try:
        _extend(loader, loading, {"__iter__": _measured})
    except TypeError as error:
        raise ConfigurationError(
            f"loader={cls.__name__} object cannot be measured ({error}). Pass a DataLoader, or an object of a class "
            "with an __iter__."
        ) from None
    # Not by their truth: some samplers have a length that cannot be asked for.
    samplers = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    sampler = next((item for item in samplers if item is not None), None)
    has_indices = not isinstance(getattr(loader, "dataset", None), IterableDataset)
    if has_indices and isinstance(sampler, Sampler):
        # A class that cannot be extended costs the indices of bad steps and nothing else.
        with contextlib.suppress(TypeError):
            _extend(sampler, loading, {"__iter__": _drawing})

    def remove() -> None:
        for obj in (loader, sampler):
            unwatch(obj)

    return remove


class ModelHooks:
    """The hooks of one model: forward, evaluation, and the end of this rank's backward pass.

    With DistributedDataParallel, what its forward does before that of the model (synchronising buffers) counts as
    waiting, and so does the backward pass after the last gradient of this rank: DistributedDataParallel then waits for
    the sums. Other wrappers communicate in the middle of their passes, where the time cannot be divided.

    With ``marks_backward``, the backward pass begins where the forward pass ends, so that it includes the loss.

    A hook of the forward pass costs more than everything else, because torch then calls modules by its slow path. Where
    the backward pass is reported (``marks_backward=False``) by a model without communication, hooks are installed only
    when a batch has a second backward pass: the forward pass lasts from the batch to the backward pass.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, marks_backward: bool) -> None:
        self.recorder = recorder
        self.separates_waiting: bool = isinstance(model, DistributedDataParallel)
        self._model, self._marks_backward = model, marks_backward
        self._last: nn.Parameter | None = None
        self._handles: list[RemovableHandle] = []
        self._parameter_hooks: list[RemovableHandle] = []
        if marks_backward or self.separates_waiting:
            self.install()
        else:
            recorder.after_batch = _FORWARD

    def install(self) -> None:
        """Install the hooks of the forward pass, unless they are there."""
        if self._handles:
            return
        self.recorder.after_batch = _OTHER
        model = self._model
        self._handles.append(model.register_forward_pre_hook(self._before, prepend=True))
        if isinstance(model, DistributedDataParallel):
            inner: nn.Module = model.module
            self._handles.append(inner.register_forward_pre_hook(self._inside, prepend=True))
            for parameter in model.parameters():
                if parameter.requires_grad:
                    self._parameter_hooks.append(parameter.register_post_accumulate_grad_hook(self._remember))
        if self._marks_backward:
            self._handles.append(model.register_forward_hook(self._after))

    def _before(self, module: nn.Module, arguments: Any) -> None:
        recorder = self.recorder
        if self._parameter_hooks and self._last is not None:
            # Keep the hook of the parameter whose gradient came last: the order is the same in later backward passes.
            for handle in self._parameter_hooks:
                handle.remove()
            self._parameter_hooks = []
            self._handles.append(self._last.register_post_accumulate_grad_hook(recorder.marker(_WAITING)))
        if module.training and torch.is_grad_enabled():
            recorder.evaluating = False
            recorder.mark(_WAITING if self.separates_waiting else _FORWARD)
        else:
            recorder.evaluating = True
            recorder.mark(_EVALUATION)

    def _inside(self, module: nn.Module, arguments: Any) -> None:
        if not self.recorder.evaluating:
            self.recorder.mark(_FORWARD)

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        # A hook of the output would tell when the backward pass begins, and cost as much as all other hooks together.
        if not self.recorder.evaluating:
            self.recorder.mark(_BACKWARD)

    def _remember(self, parameter: nn.Parameter) -> None:
        self._last = parameter

    def remove(self) -> None:
        """End the measurement."""
        for handle in (*self._handles, *self._parameter_hooks):
            handle.remove()


def watch_optimizer(optimizer: Optimizer, recorder: Recorder, counts: bool) -> Callable[[], None]:
    """Measure every later step of an optimizer; the steps of the run are those of one that ``counts``.

    Returns:
        A function that ends the measurement.
    """

    def after(*_: Any) -> None:
        recorder.mark(recorder.idle)

    handles = (
        optimizer.register_step_pre_hook(recorder.marker(_OPTIMIZER)),
        optimizer.register_step_post_hook(recorder.step_done if counts else after),
    )

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove
