"""One stage of a pipeline: runs the model's forward, computes its own calls, and skips those of other stages."""

from __future__ import annotations

import copy
import functools
import itertools
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError
from accel_state.operations import TensorInformation, get_data_structure, is_tensor_information, recursively_apply
from accel_state.operations.nested import leaves

from .._torch_compat import FakeTensor, children_of
from .recording import Value
from .split import PipelineSplit
from .stand_ins import StandIns, fake_mode


class _StageDone(BaseException):
    """Leaves the forward after the last call of a stage. Not an Exception, so that models do not catch it."""


class SkippedModule(nn.Module):
    """Stands for a module of another stage: same attributes, no weights; ``tensor`` replaces its tensors."""

    def __init__(
        self, module: nn.Module, name: str, tensor: Callable[[torch.Tensor], tuple[torch.Tensor, bool]]
    ) -> None:
        super().__init__()
        self.__dict__.update({k: v for k, v in vars(module).items() if k not in self.__dict__ and k != "forward"})
        self.training: bool = module.training
        _replace_tensors(self, module, tensor)
        for child_name, child in module.named_children():
            stand_in = SkippedModule(child, f"{name}.{child_name}", tensor)
            # Only what holds weights is registered: other stand-ins must not show up in named_modules.
            slots: Any = children_of(self) if any(True for _ in stand_in.parameters()) else self.__dict__
            slots[child_name] = stand_in
        self._name = name
        self._skip: Callable[[str], Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._skip is None:
            raise RuntimeError(f"the module {self._name} belongs to another stage of the pipeline")
        return self._skip(self._name)


def _replace_tensors(
    target: nn.Module, source: nn.Module, tensor: Callable[[torch.Tensor], tuple[torch.Tensor, bool]]
) -> None:
    """Set ``target``'s own tensors: those that are kept are registered, the rest become plain attributes."""
    for kind in ("_parameters", "_buffers"):
        for name, value in list(vars(source)[kind].items()):
            if value is None:
                vars(target)[kind][name] = None
                continue
            new, is_kept = tensor(value)
            vars(target)[kind].pop(name, None)
            (vars(target)[kind] if is_kept else target.__dict__)[name] = new


def extract(
    model: nn.Module, split: PipelineSplit, stages: Collection[int], device: torch.device, in_place: bool = False
) -> nn.Module:
    """Return the model with the modules and weights of some stages, under their names in the whole model."""
    names = {id(model.get_submodule(name)): name for name in split.units}
    own = set().union(*(split.modules_of(stage) for stage in stages))
    kept_names = frozenset().union(*(split.kept[stage] for stage in stages))
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    kept = {id(tensor) for name, tensor in named if name in kept_names}
    touched = {id(tensor) for name, tensor in named if name in split.touched}
    fakes = fake_mode()

    def tensor(value: torch.Tensor) -> tuple[torch.Tensor, bool]:
        if id(value) in kept:
            return value, True
        if id(value) in touched:
            # Code outside the units uses it, for results that nothing on this rank reads.
            with fakes:
                return torch.empty(value.shape, dtype=value.dtype, device=device), False
        return torch.empty_like(value, device="meta"), False

    visited: dict[int, nn.Module] = {}

    def visit(module: nn.Module, name: str) -> nn.Module:
        if id(module) in visited:
            return visited[id(module)]
        unit = names.get(id(module))
        if unit is not None:
            visited[id(module)] = module if unit in own else SkippedModule(module, unit, tensor)
            return visited[id(module)]
        target = module
        if not in_place:
            target = copy.copy(module)
            for attribute, value in vars(module).items():
                if isinstance(value, dict) and attribute.startswith("_"):
                    target.__dict__[attribute] = copy.copy(value)
        visited[id(module)] = target
        _replace_tensors(target, module, tensor)
        for child_name, child in list(children_of(module).items()):
            if child is not None:
                children_of(target)[child_name] = visit(child, f"{name}.{child_name}" if name else child_name)
        return target

    return visit(model, "")


class _JoinGraph(torch.autograd.Function):
    """Passes tensors on such that all of them require gradients, and all received ones get one.

    PipelineStage expects a gradient for each tensor that is sent, also for those that are constants or unused.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.received = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors[count:]]
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.received]
        return None, *gradients, *zeros


class _Runner(nn.Module):
    """What PipelineStage calls where the stage's module itself is called by the user."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = forward


class Stage:
    """A stage of a pipeline on its rank.

    Code outside the units runs on every rank, up to the first call of the next stage. A result of an earlier stage that
    nothing here reads is a fake tensor: it has a shape and uses neither memory nor time.

    Args:
        module: the model as :func:`extract` returns it.
        forward: the model's forward, bound to ``module``.
        split: how the model is split.
        index: number of the stage.
        device: where it computes.
        select: takes what is wanted from the model's output, on the last stage.

    Attributes:
        submodule: what PipelineStage calls, with the received tensors.
        outputs: of the micro-batches that the last stage has run without gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        split: PipelineSplit,
        index: int,
        device: torch.device,
        select: Callable[[Any], Any] = lambda output: output,
    ) -> None:
        self.module: nn.Module = module
        self.split: PipelineSplit = split
        self.index: int = index
        self.device: torch.device = device
        self._forward, self._select = forward, select
        self._first, self._end = split.starts[index], split.end(index)
        self.is_last: bool = index == len(split) - 1
        self.received: tuple[Value, ...] = split.carries[index - 1] if index else ()
        self.sent: tuple[Value, ...] = () if self.is_last else split.carries[index]
        self.stand_ins: StandIns = StandIns(device)
        self._running = False
        self._active: nn.Module | None = None
        self._skipped_call: int | None = None
        self._call = 0
        self._values: dict[Value, torch.Tensor] = {}
        self._batches: Iterator[tuple[Any, Any]] = iter(())
        self._expected: dict[int, Any] | None = None
        self.templates: dict[int, Any] = {}
        self.outputs: list[Any] = []
        self.submodule: nn.Module = _Runner(self.run)

    def intercept(self) -> None:
        """Follow the calls of the units. Call it after the units have been wrapped, so that its hooks run last."""
        modules = dict(self.module.named_modules(remove_duplicate=False))
        for name in self.split.units:
            unit = modules.get(name)
            if isinstance(unit, SkippedModule):
                unit._skip = self._skip
            elif unit is not None:
                before = functools.partial(self._before_call, name)
                unit.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
                unit.register_forward_hook(self._after_call)
                if name in self.split.calls[: self._first]:
                    unit.forward = functools.partial(self._skip_or_call, unit.forward)

    def begin(self, batches: Sequence[tuple[Any, Any]], templates: dict[int, Any], known: bool) -> None:
        """Set the inputs of the next micro-batches.

        Args:
            batches: positional and keyword inputs of the model.
            templates: for every call of an earlier stage, its output with a TensorInformation for each tensor; where
                they are known, those of this stage too.
            known: whether the outputs of this stage must be as ``templates`` says.
        """
        self._batches, self.outputs = iter(batches), []
        self.templates, self._expected = dict(templates), dict(templates) if known else None

    def run(self, *received: torch.Tensor) -> Any:
        """Run the next micro-batch.

        Returns:
            The tensors for the next stage, in the order of ``sent``. On the last stage, the model's output with
            gradients; without them a placeholder, and the output is appended to ``outputs``.
        """
        args, kwargs = next(self._batches)
        self._running, self._active, self._call = True, None, 0
        self._values = dict(zip(self.received, received, strict=True))
        try:
            output = self._forward(*args, **kwargs)
        except _StageDone as done:
            output = None
            # Frees activations now: reference cycles in the frames would keep them until the garbage collector runs.
            traceback.clear_frames(done.__traceback__)
        finally:
            self._running = False
            values, self._values = self._values, {}
        if not self.is_last:
            if self._call < self._end:
                raise self._other_path(f"the forward ended after {self._call} calls, not {len(self.split.calls)}")
            self._check_templates()
            tensors = tuple(values[value].contiguous() for value in self.sent)
            return self._join(tensors, received) if torch.is_grad_enabled() else tensors
        if self._call != len(self.split.calls):
            raise self._other_path(f"the forward ended after {self._call} calls, not {len(self.split.calls)}")
        self._check_present(output, "the output")
        output = self._select(output)
        if torch.is_grad_enabled():
            return self._join((output,), received)[0]
        # The receive buffers are reused for the next batch; an output must not share their memory.
        buffers = {tensor.untyped_storage().data_ptr() for tensor in received}
        self.outputs.append(
            recursively_apply(
                lambda tensor: tensor.clone() if tensor.untyped_storage().data_ptr() in buffers else tensor, output
            )
        )
        return torch.zeros(1, device=self.device)

    def _join(self, tensors: tuple[torch.Tensor, ...], received: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if any(not tensor.is_floating_point() for tensor in tensors):
            raise ConfigurationError(
                f"stage {self.index} of the pipeline sends integers to the next one, which cannot be trained through. "
                "Compute them from the inputs outside the blocks, or train with pp_size=1."
            )
        if len(tensors) + len(received) > 2:
            return _JoinGraph.apply(len(tensors), *tensors, *received)
        return tuple(tensor if tensor.requires_grad else tensor.detach().requires_grad_() for tensor in tensors)

    def _before_call(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._running or self._active is not None:
            return
        call = self._check_order(name)
        if call < self._first:
            self._skipped_call = call
            return
        self._check_present((args, kwargs), f"the module {name}")
        self._active = unit

    def _skip_or_call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the forward of a unit that an earlier stage calls too."""
        call, self._skipped_call = self._skipped_call, None
        return forward(*args, **kwargs) if call is None else self._earlier_output(call)

    def _check_order(self, name: str) -> int:
        call = self._call
        if call >= len(self.split.calls) or self.split.calls[call] != name:
            raise self._other_path(f"call {call} was of {name!r}")
        if call == self._end:
            raise _StageDone
        self._call += 1
        return call

    def _after_call(self, unit: nn.Module, args: Any, output: Any) -> None:
        if self._active is not unit:
            return
        self._active = None
        if self.is_last:
            return
        call = self._call - 1
        self.templates[call] = get_data_structure(output)
        for number, tensor in enumerate(leaves(output)):
            value = (call, number)
            if value in self.sent:
                # Every stage runs the code outside the units, so what that modifies must be sent unmodified.
                self._values[value] = tensor.clone() if value in self.split.rewritten else tensor

    def _skip(self, name: str) -> Any:
        if self._active is not None or not self._running:
            raise RuntimeError(f"the module {name} belongs to another stage of the pipeline")
        return self._earlier_output(self._check_order(name))

    def _earlier_output(self, call: int) -> Any:
        """Return the output of a call of an earlier stage: the tensors that were received, and fake ones."""
        numbers = itertools.count()

        def earlier(info: TensorInformation) -> torch.Tensor:
            value = (call, next(numbers))
            tensor = self._values.get(value)
            if tensor is not None:
                return tensor.clone() if value in self.split.rewritten and tensor.requires_grad else tensor
            return self.stand_ins.get(value, info.shape, info.dtype)

        return recursively_apply(earlier, self.templates[call], test_type=is_tensor_information)

    def _check_templates(self) -> None:
        # Between the blocks of a stage, results may have other shapes than recorded: each rank's part of a sequence.
        sent = {call for call, _ in self.sent if call >= self._first}
        if self._expected is not None and any(self._expected.get(call) != self.templates[call] for call in sent):
            raise ConfigurationError(
                f"stage {self.index} of the pipeline: the shapes of its results depend on the values of the inputs, "
                "not only on their shapes. Such a model cannot run in a pipeline; put the code that makes them into "
                "one module, and name its class in no_split_module_classes."
            )

    def _check_present(self, data: Any, reader: str) -> None:
        for tensor in leaves(data):
            # In a FakeTensorMode of the caller every tensor is fake.
            if isinstance(tensor, FakeTensor) and not isinstance(torch.empty(0), FakeTensor):
                raise self._other_path(f"{reader} needs a result of an earlier stage that it did not need then")

    def _other_path(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"stage {self.index} of the pipeline: with these inputs the forward takes another path than with the "
            f"example that the model was prepared with: {what}. Give an example of the kind that you run."
        )
