"""One stage: runs the model's forward, computes its own calls, and skips or leaves the rest."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from accel_state.errors import ConfigurationError
from accel_state.operations import TensorInformation, get_data_structure, is_tensor_information, recursively_apply
from accel_state.operations.nested import leaves

from .plan import Plan
from .recording import Value


class _StageDone(BaseException):
    """Leaves the forward after the last call of a stage; no ``except Exception`` of a model may hold it up."""


class Stage:
    """A rank's share of a model.

    The code between the units runs on every rank, up to its last call. A result of an earlier stage that nothing here
    reads is a fake tensor: it has a shape, and costs nothing.

    Args:
        model: the model; its units are intercepted from here on.
        forward: the forward of the whole model.
        plan: how it is shared.
        index: which stage this is.
        device: where it computes.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], plan: Plan, index: int, device: torch.device
    ) -> None:
        self.plan, self.index, self.device = plan, index, device
        self._forward = forward
        self._first, self._last = plan.starts[index], plan.last_call(index)
        self._is_last = index == len(plan.starts) - 1
        self._sent = set(plan.carries[index]) if not self._is_last else set()
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._running = False
        self._inside = False
        self._call = 0
        self._values: dict[Value, torch.Tensor] = {}
        self.templates: dict[int, Any] = {}
        for name in plan.units:
            unit = model.get_submodule(name)
            unit.forward = functools.partial(self._called, name, unit.forward)
        self._place(model)

    @property
    def received(self) -> tuple[Value, ...]:
        """The results that come from the stage before."""
        return self.plan.carries[self.index - 1] if self.index else ()

    @property
    def sent(self) -> tuple[Value, ...]:
        """The results that go to the next stage."""
        return () if self._is_last else self.plan.carries[self.index]

    def run(self, args: Any, kwargs: Any, received: Mapping[Value, torch.Tensor], templates: Mapping[int, Any]) -> Any:
        """Run one chunk.

        Args:
            args: positional inputs of the model.
            kwargs: keyword inputs of the model.
            received: results of earlier stages.
            templates: for every call of earlier stages, its output with a TensorInformation for each tensor.

        Returns:
            The model's output on the last stage; on the others, the tensors for the next stage in the order of
            ``sent``.
        """
        self._running, self._inside, self._call = True, False, 0
        self._values, self.templates = dict(received), dict(templates)
        try:
            output = self._forward(*args, **kwargs)
        except _StageDone:
            return [self._values[value].contiguous() for value in self.sent]
        finally:
            self._running = False
            values, self._values = self._values, {}
        return self._finish(output, values)

    def _finish(self, output: Any, values: Mapping[Value, torch.Tensor]) -> Any:
        if not self._is_last or self._call != len(self.plan.calls):
            raise self._other_path(f"the forward ended after {self._call} calls, not {len(self.plan.calls)}")
        self._check_present(output, "the output")
        # Buffers that receive results are used again for the next batch; an output must not be one of them.
        received = {tensor.untyped_storage().data_ptr() for value, tensor in values.items() if value in self.received}
        return recursively_apply(
            lambda tensor: tensor.clone() if tensor.untyped_storage().data_ptr() in received else tensor, output
        )

    def _called(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._running or self._inside:
            return forward(*args, **kwargs)
        call = self._call
        if call >= len(self.plan.calls) or self.plan.calls[call] != name:
            raise self._other_path(f"call {call} was of {name!r}")
        self._call += 1
        return self._skip(call) if call < self._first else self._compute(call, name, forward, args, kwargs)

    def _skip(self, call: int) -> Any:
        numbers = itertools.count()
        template = self.templates[call]
        return recursively_apply(
            lambda info: self._earlier((call, next(numbers)), info), template, test_type=is_tensor_information
        )

    def _earlier(self, value: Value, info: TensorInformation) -> torch.Tensor:
        tensor = self._values.get(value)
        if tensor is not None:
            return tensor
        with self._fakes:
            return torch.empty(info.shape, dtype=info.dtype, device=self.device)

    def _compute(self, call: int, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._check_present((args, kwargs), f"the module {name}")
        self._inside = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self._inside = False
        if not self._is_last:
            self._keep(call, output)
        if call == self._last and not self._is_last:
            raise _StageDone
        return output

    def _keep(self, call: int, output: Any) -> None:
        self.templates[call] = get_data_structure(output)
        for number, tensor in enumerate(leaves(output)):
            value = (call, number)
            if value in self._sent:
                # Every stage runs the code between the units, so what it changes must travel as it was before.
                self._values[value] = tensor.clone() if value in self.plan.rewritten else tensor

    def _check_present(self, data: Any, reader: str) -> None:
        if any(isinstance(tensor, FakeTensor) for tensor in leaves(data)):
            raise self._other_path(f"{reader} needs a result of an earlier stage that it did not need then")

    def _other_path(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"stage {self.index} of the pipeline: with these inputs the forward takes another path than with the "
            "example that the model "
            f"was prepared with: {what}. Call prepare_pippy with example_args and example_kwargs of the kind that you "
            "run."
        )

    def _place(self, model: nn.Module) -> None:
        """Keep the weights that this stage uses, on its device, and let all others go."""
        called = self.plan.calls[self._first : self._last + 1]
        kept = {id(tensor) for name in set(called) for tensor in _tensors_of(model.get_submodule(name))}
        wanted = self.plan.kept[self.index]
        kept |= {id(tensor) for name, tensor in _named_tensors(model) if name in wanted}
        moved: dict[int, torch.Tensor] = {}
        touched = {id(tensor) for name, tensor in _named_tensors(model) if name in self.plan.touched}
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = moved.setdefault(
                            id(tensor), self._placed(tensor, id(tensor) in kept, id(tensor) in touched)
                        )  # type: ignore[assignment]

    def _placed(self, tensor: torch.Tensor, kept: bool, touched: bool) -> torch.Tensor:
        if kept:
            new = tensor.detach().to(self.device)
        elif touched:
            # The code between the units uses it, for results that nobody reads on this rank.
            with self._fakes:
                new = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        else:
            new = torch.empty_like(tensor, device="meta")
        return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
