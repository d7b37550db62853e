"""Gradients that DDP's reducer leaves alone, and their average.

The reducer averages the gradients of the parameters that were trainable when the model was wrapped, in a backward pass
whose forward went through the wrapper. All others would differ between ranks: those of parameters that were frozen then
or did not exist, and those of a loss that was computed with the user's own model. They are averaged after the backward
pass instead, so that any mixture of both trains as in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError
from accel_state.logging import warn_once

from .._torch_compat import check_reducer, foreach_div_, tensor_version

Mark = tuple[nn.Parameter, torch.Tensor | None, int]  # a parameter, its gradient, and the version of that


class _Registrations:
    """Counts the modules and parameters that any model of this process gets, so that a search can wait for one."""

    def __init__(self) -> None:
        self.count = 0
        self._is_counting = False

    def start(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            register_module_module_registration_hook(self._add)
            register_module_parameter_registration_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


registrations = _Registrations()


class Before(NamedTuple):
    """The gradients before a backward pass."""

    is_armed: bool  # the reducer averages those that it knows
    witnesses: list[Mark]  # of parameters of which one changes if the reducer has averaged
    others: list[Mark]  # of parameters that the reducer leaves alone in this pass


class UnreducedGradients:
    """Follows one model on all ranks, which call the same methods in the same order.

    Args:
        model: what ``prepare`` returns: the DDP wrapper, or the model itself if nothing in it was trainable.
        collectives: of the ranks over which gradients are averaged.

    Attributes:
        sync: whether backward passes of a model without a wrapper synchronise gradients.
        refuses: what makes it impossible to average gradients at the moment, for an error; empty if nothing does.
    """

    def __init__(self, model: nn.Module, collectives: Collectives) -> None:
        registrations.start()
        self.sync = True
        self.refuses = ""
        self.is_armed = False  # the last forward prepared the reducer, and no backward pass has used that yet
        self._has_been_armed = False
        self._is_left_out = False  # the reducer cannot be used any more
        self._is_pending = False  # there may be gradients of backward passes that did not synchronise
        self._collectives = collectives
        inner = _inner(model)
        self._ignored = frozenset(getattr(inner, "_ddp_params_and_buffers_to_ignore", ()))
        named = self._named(inner)
        is_wrapped = inner is not model
        self._reduced = {name: item for name, item in named.items() if is_wrapped and item.requires_grad}
        self._parameters = list(self._reduced.values())
        self._others = {name: item for name, item in named.items() if name not in self._reduced}
        self._is_incomplete = False  # the model has lost a parameter that the reducer waits for
        self._agreed: tuple[str, ...] = ()
        self._seen = registrations.count

    def _named(self, inner: nn.Module) -> dict[str, nn.Parameter]:
        return {name: item for name, item in inner.named_parameters() if name not in self._ignored}

    def arms(self, model: TorchDDP) -> bool:
        """Return whether a forward shall prepare the reducer; called before each one that computes gradients.

        Raises:
            ConfigurationError: other parameters are trained than those of the static graph.
        """
        if self._seen != registrations.count:
            self._look_again(model, before_use=True)
        if self._is_left_out or not (model.require_backward_grad_sync or self.must_record(model)):
            return False
        if self._is_incomplete or False in [parameter.requires_grad for parameter in self._parameters]:
            # The reducer would wait for gradients that will not come.
            self._refuse_static_graph(model)
            if not model.find_unused_parameters:
                return False
        self.is_armed = self._has_been_armed = True
        return True

    def must_record(self, model: nn.Module) -> bool:
        """Return whether the reducer has to see the next backward pass: the first one of a static graph."""
        return getattr(model, "static_graph", False) and not self._has_been_armed

    def before(self, model: nn.Module) -> Before | None:
        """Note the gradients before a backward pass; None if it does not synchronise them.

        Raises:
            ConfigurationError: ranks train different parameters.
        """
        if self._seen != registrations.count:
            self._look_again(model, before_use=False)
        is_armed = self.is_armed
        if not (getattr(model, "require_backward_grad_sync", self.sync) or is_armed or self.must_record(model)):
            self._is_pending = True
            return None
        late = self._late(model) if self._others else []
        if not is_armed:
            return Before(False, [], _marks([*self._parameters, *late]))
        # A backward pass reaches all parameters, unless some may be unused.
        some = getattr(model, "find_unused_parameters", False) or getattr(model, "static_graph", False)
        witnesses = self._parameters if some else self._parameters[:1]
        return Before(True, _marks(witnesses), _marks(late))

    def after(self, model: nn.Module, before: Before) -> None:
        """Average what the reducer has left alone in a backward pass."""
        if before.is_armed:
            if not any(_has_changed(*mark) for mark in before.witnesses):
                return  # a pass through another model, such as the discriminator's
            assert isinstance(model, TorchDDP)
            try:
                check_reducer(model)
            except RuntimeError:
                return  # one of several passes, which reach all parameters together
            self.is_armed = False
        others = [parameter for parameter, _, _ in before.others]
        used = [_has_changed(*mark) for mark in before.others]
        if self.must_record(model) and True in used:
            raise ConfigurationError(
                "with static_graph=True the first backward pass has to go through the model that prepare() returned, "
                "which records the graph. Call that model, or leave static_graph out of DistributedDataParallelKwargs."
            )
        if self._is_pending:
            used = [parameter.grad is not None for parameter in others]
        if True in used or (self._agreed and others):
            self._average(model, others, used)
            # Of a search for unused parameters, the reducer would expect the same gradients in its next pass.
            self._is_left_out |= not before.is_armed and getattr(model, "find_unused_parameters", False)
        self._is_pending = False

    def _late(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that are trained now and that the reducer does not know."""
        late = [(name, item) for name, item in self._others.items() if item.requires_grad]
        names = tuple(name for name, _ in late)
        items = [item for _, item in late]
        if names == self._agreed:
            return items
        self._refuse_static_graph(model)
        for rank, others in enumerate(self._collectives.all_gather_object(names)):
            if others != names:
                differing = sorted(set(names) ^ set(others))
                raise ConfigurationError(
                    f"rank {self._collectives.rank} and rank {rank} train different parameters since prepare(): "
                    f"{', '.join(differing[:3])}. Freeze, unfreeze and add parameters on all ranks alike."
                )
        if names:
            warn_once(
                __name__,
                f"{names[0]}, one of {len(names)} parameters that are trained now, was frozen or absent in prepare(): "
                "their gradients are averaged after the backward pass, not during it. To overlap both, prepare the "
                "model again with these parameters trainable.",
            )
        self._agreed = names
        return items

    def _refuse_static_graph(self, model: nn.Module) -> None:
        if getattr(model, "static_graph", False):
            raise ConfigurationError(
                "other parameters are trained than when the model was prepared, and static_graph=True promises that "
                "they stay the same. Leave static_graph out of DistributedDataParallelKwargs."
            )

    def _look_again(self, model: nn.Module, before_use: bool) -> None:
        """Find parameters that the model has got or lost; new ones start with the values of rank 0."""
        self._seen = registrations.count
        named = self._named(_inner(model))
        present, known = set(map(id, named.values())), set(map(id, self._parameters))
        self._is_incomplete = not present >= known
        former = set(map(id, self._others.values()))
        self._others = {name: item for name, item in named.items() if id(item) not in known}
        new = {name: item for name, item in self._others.items() if id(item) not in former}
        if not new:
            return
        values = [parameter.detach() for parameter in new.values()]
        own = [] if before_use else [value.clone() for value in values]
        self._collectives.broadcast_many(values)
        differs = torch.tensor(float(not all(map(torch.equal, own, values))), device=values[0].device)
        if not before_use and self._collectives.all_reduce(differs, "max"):
            raise ConfigurationError(
                f"{next(iter(new))} was added to the model after prepare(), with other values on each rank, and was "
                "used before they could be made the same. Call the model that prepare() returned, or build the module "
                "with the same seed on all ranks: accel.utils.set_seed(seed)."
            )

    def _average(self, model: nn.Module, parameters: Sequence[nn.Parameter], used: Iterable[bool]) -> None:
        """Average the gradients of parameters that a rank has used; the others keep what they have."""
        if self.refuses:
            raise ConfigurationError(self.refuses)
        flags = torch.tensor([float(flag) for flag in used], device=parameters[0].device)
        self._collectives.all_reduce(flags, "max")
        reached = [item for item, flag in zip(parameters, flags.tolist(), strict=True) if flag]
        self._refuse_hook(model, reached)
        gradients = []
        for parameter in reached:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.layout is not torch.strided:
                raise ConfigurationError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which DDP averages only "
                    "if the parameter was trainable in prepare(), and the loss is computed with the prepared model. "
                    "Use sparse=False, or prepare the model with it, and call what prepare() returned."
                )
            gradients.append(parameter.grad)
        with torch.no_grad():
            self._collectives.all_reduce_many(gradients)
            if gradients:
                foreach_div_(gradients, self._collectives.world_size)

    def _refuse_hook(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse to average gradients without the communication hook, which sees those of the reducer only."""
        hook = getattr(model, "comm_hook_name", "")
        if not hook or not parameters:
            return
        name = next(name for name, item in _inner(model).named_parameters() if item is parameters[0])
        raise ConfigurationError(
            f"the gradient of {name} would be averaged without the communication hook {hook}: other parameters are "
            "trained than in prepare(), or the loss was not computed with the prepared model. Freeze and unfreeze "
            "before prepare(), set find_unused_parameters=True in DistributedDataParallelKwargs to freeze later (with "
            "the hooks fp16 and bf16), or leave the hook out."
        )


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, TorchDDP) else model


def _marks(parameters: Iterable[nn.Parameter]) -> list[Mark]:
    return [(item, item.grad, 0 if item.grad is None else tensor_version(item.grad)) for item in parameters]


def _has_changed(parameter: nn.Parameter, gradient: torch.Tensor | None, version: int) -> bool:
    """Return whether a backward pass has set a gradient, or added to it in place."""
    return parameter.grad is not gradient or (gradient is not None and tensor_version(gradient) != version)
