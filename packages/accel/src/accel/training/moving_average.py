"""Averages of a model's weights over the steps of training, such as exponential moving averages (EMA).

Averaging is elementwise, so each rank averages the parts of the weights that it holds, without communication.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from accel_checkpoint.names import CheckpointError
from accel_state.errors import ConfigurationError

from .._torch_compat import foreach_div_
from ..contract.strategy import Strategy
from ..core.local_part import local
from ..core.types import Layout
from ..core.unwrap import clean_name, innermost_model
from .lomo import fused_optimizers

Average = Callable[[list[torch.Tensor], list[torch.Tensor], int], Any]
"""Updates averages in place: called with the averages, the current weights, and the number of updates so far."""


class Swap:
    """Exchanges the weights of a model with their averages, and keeps its buffers as they were."""

    def __init__(self, average: MovingAverage) -> None:
        self.average = average
        average.synchronise()
        parts = average.parts()
        self._buffers = [
            (module, name, buffer)
            for module in average.model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        averaged = set(map(id, parts.values()))
        others = {id(buffer): buffer for *_, buffer in self._buffers if id(buffer) not in averaged}
        self._held = [*parts.values(), *others.values()]
        self._stash = [average.averages[name].to(part.dtype, copy=True) for name, part in parts.items()]
        self._stash += [buffer.clone() for buffer in others.values()]
        self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the other values into the model: the averages, or the weights that training goes on with."""
        self.average.reshard()
        for module, name, buffer in self._buffers:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)  # a forward pass may have replaced it
        for index, (tensor, other) in enumerate(zip(self._held, self._stash, strict=True)):
            value = tensor.clone()
            tensor.copy_(other)
            self._stash[index] = value
        self.average.written()
        torch.clear_autocast_cache()  # an autocast block around this one has cast the other values


class MovingAverage:
    """An average of a model's weights; :meth:`accel.Accelerator.moving_average` returns it.

    Attributes:
        model: the prepared model.
        num_updates: how many steps of the optimizer are in the average.
        averages: this rank's parts of the averages, by name. A weight that was not trained so far has none.
    """

    def __init__(self, model: nn.Module, prepared: Any, average: Average, use_buffers: bool) -> None:
        self.model = model
        self.num_updates: int = 0
        self.averages: dict[str, torch.Tensor] = {}
        self._prepared = prepared
        self._strategy: Strategy = prepared.strategy
        self._average = average
        self._use_buffers = use_buffers
        self._tracked: dict[int, torch.Tensor] = {}  # parameters of optimizers; kept, so that no other has their id
        self._steps: list[int] = []
        self._differs = False  # between ranks, since each has trained on its own
        self._restart()
        self.count_from_here()

    # -- training ----------------------------------------------------------------------------------------------------

    def update(self) -> bool:
        """Add the current weights to the average; call it after each ``optimizer.step()``.

        It does nothing if no optimizer of the model has stepped since the last call: while gradients accumulate, and
        after a step that fp16 has skipped. The first update copies the weights, as in torch's ``AveragedModel``.

        Inside LocalSGD each rank adds its own weights, without communication. The averages are averaged over the ranks
        when they are used or saved, which gives the average of the weights' mean over the ranks.

        Returns:
            Whether the average was updated.

        Raises:
            ConfigurationError: averages are in the model, no prepared optimizer updates the model, or the ranks of
                LocalSGD skip steps on their own (fp16).
        """
        self._check_not_applied("update()")
        steps = self._all_steps()
        self.reshard()  # then the model has the parameters that the optimizer has
        before = self._steps + [0] * (len(steps) - len(self._steps))
        stepped = [number for number in self._own_optimizers() if steps[number] != before[number]]
        self._steps = steps
        if not stepped:
            return False
        if self._trains_alone() and any(self._prepared.optimizers[number].scaler is not None for number in stepped):
            raise ConfigurationError(
                "update() inside LocalSGD with mixed_precision='fp16', where ranks skip different steps. Use 'bf16', "
                "or call it after the block."
            )
        with torch.no_grad():
            self._add(self.parts())
        self._differs |= self._trains_alone()
        self.num_updates += 1
        return True

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages into the model for the block, to evaluate or to save it.

        ``get_state_dict(model)`` and ``save_model(model, ...)`` give the averages; ``save_state`` saves the training
        as it is outside. Gradients are disabled (``torch.no_grad``), and training is an error. Afterwards the weights
        and buffers are those from before, also after an exception. The block takes the memory of one more copy of the
        averages. Every rank must enter it.

        Raises:
            ConfigurationError: inside, for ``backward``, ``optimizer.step()``, :meth:`update` and ``load_state``.
        """
        swap = Swap(self)
        self._prepared.applied.append(swap)
        try:
            with torch.no_grad():
                yield
        finally:
            self._prepared.applied.remove(swap)
            swap.exchange()

    def reset(self) -> None:
        """Start again from the current weights: :meth:`copy_to_model` puts back the weights as they are now.

        Raises:
            ConfigurationError: averages are in the model.
        """
        self._check_not_applied("reset()")
        self.num_updates = 0
        self._restart()
        self.count_from_here()

    def copy_to_model(self) -> None:
        """Replace the model's weights, and with ``use_buffers`` its buffers, by the averages; training may continue.

        Raises:
            ConfigurationError: averages are in the model.
        """
        self._check_not_applied("copy_to_model()")
        with torch.no_grad():
            self.synchronise()
            for name, part in self.parts().items():
                part.copy_(self.averages[name])
            self.written()

    # -- called by the Accelerator -----------------------------------------------------------------------------------

    def before_step(self, optimizer: Any) -> None:
        """Begin the averages of weights that an optimizer is about to train for the first time."""
        self._check_not_applied("optimizer.step()")
        new = {
            id(parameter): parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and id(parameter) not in self._tracked
        }
        if new:
            self._tracked.update(new)
            self.parts()

    def count_from_here(self) -> None:
        """Leave the steps that optimizers have taken so far out of the next update."""
        self._steps = self._all_steps()

    def reshard(self) -> None:
        """Let the model have its sharded parameters, whose values the next call gathers again."""
        self._strategy.reshard(self.model)

    def written(self) -> None:
        """Let the model have what was written into :meth:`parts`."""
        self._strategy.averages_written(self.model)

    def synchronise(self) -> None:
        """Average the averages over ranks that have trained on their own. Every rank must call it."""
        if not self._differs:
            return
        everyone = self._strategy.state.collectives
        values = [item for item in self.averages.values() if item.is_floating_point() or item.is_complex()]
        everyone.all_reduce_many(values)
        foreach_div_(values, everyone.world_size)
        self._differs = False

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Put the averages into the model for the block, for strategies that save and load them through it."""
        swap = Swap(self)
        try:
            yield
        finally:
            swap.exchange()

    def parts(self) -> dict[str, torch.Tensor]:
        """Return this rank's parts of the weights that are averaged, in their memory, by name.

        Weights that became trainable, and buffers that are new, get an average that begins with their current values.
        """
        self.reshard()
        found = {}
        for name, parameter in self._strategy.averaged_parameters(self.model).items():
            if parameter.requires_grad or name in self.averages:
                found[name] = local(parameter).detach()
        if self._use_buffers:
            from accel_bigmodel import get_non_persistent_buffers

            inner = innermost_model(self.model)
            unsaved = get_non_persistent_buffers(inner, recurse=True, fqns=True)
            found.update({clean_name(name): item for name, item in inner.named_buffers() if name not in unsaved})
        for name, part in found.items():
            if name not in self.averages:
                is_whole = not (part.is_floating_point() or part.is_complex())
                dtype = part.dtype if is_whole else torch.promote_types(part.dtype, torch.float32)
                self.averages[name] = part.to(dtype, copy=True)
        return found

    def plan_load(self, state: dict[str, Any], layout: Layout, num_updates: int, path: Path) -> Callable[[], Any]:
        """Return the call that loads an average, after the weights of the model; every rank must make it."""
        first = {name: names[0] for names in layout.ties for name in names}
        known = {clean_name(name) for name in layout.tensors}
        unknown = sorted(name for name in state if name not in known and name not in layout.elsewhere)
        if unknown:
            raise CheckpointError(
                f"{path} has a moving average of {', '.join(unknown[:5])}, which {type(layout.model).__name__} lacks. "
                "Load it into the model that was saved."
            )
        return partial(self._load, {first.get(name, name): value for name, value in state.items()}, layout, num_updates)

    def _load(self, state: dict[str, Any], layout: Layout, num_updates: int) -> None:
        self._restart()
        self._strategy.load_average(self, state, layout)
        for name, part in self.parts().items():
            self.averages[name] = self.averages[name].to(part.device)  # files are read into the memory of the CPU
        self._differs = False
        self.num_updates = num_updates

    def capture(self) -> dict[str, Any]:
        """Return what :meth:`restore` loads: a copy of this rank's averages, with what has been counted."""
        values = {name: value.clone() for name, value in self.averages.items()}
        return {"averages": values, "num_updates": self.num_updates, "steps": list(self._steps)}

    def restore(self, state: dict[str, Any]) -> None:
        """Load what :meth:`capture` returned on a rank that holds the same parts, after the weights of the model."""
        self._restart()
        for name, part in self.parts().items():
            if name in state["averages"]:
                self.averages[name] = state["averages"][name].to(part.device)
        self.num_updates, self._steps = state["num_updates"], state["steps"]

    # -- details -----------------------------------------------------------------------------------------------------

    def _add(self, parts: dict[str, torch.Tensor]) -> None:
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name, part in parts.items():
            average = self.averages[name]
            if self.num_updates == 0 or not (average.is_floating_point() or average.is_complex()):
                average.copy_(part)
                continue
            averaged, current = groups.setdefault((average.device, average.dtype), ([], []))
            averaged.append(average)
            current.append(part.to(average.dtype))
        for averaged, current in groups.values():
            self._average(averaged, current, self.num_updates)

    def _trains_alone(self) -> bool:
        return hasattr(self._prepared.local_sgd, "local_sgd_steps")

    def _restart(self) -> None:
        self._differs = self._trains_alone()
        self.averages.clear()
        self._tracked.clear()
        self.parts()

    def _all_steps(self) -> list[int]:
        return [optimizer.steps_taken for optimizer in self._prepared.optimizers]

    def _own_optimizers(self) -> list[int]:
        """Return the numbers of the prepared optimizers that update the model."""
        everyone = enumerate(self._prepared.optimizers)
        own = {number: optimizer for number, optimizer in everyone if self._strategy.updates(optimizer, self.model)}
        if not own or fused_optimizers(own.values()):
            first = next(iter(own.values()), None)
            reason = f"{first!r} updates it in the backward pass" if own else "no prepared optimizer updates it"
            raise ConfigurationError(
                f"update() counts the steps of the optimizers of the {type(self.model).__name__}, but {reason}. Pass "
                "an optimizer of its parameters, which has a step(), to prepare()."
            )
        return list(own)

    def _check_not_applied(self, call: str) -> None:
        if self._prepared.applied:
            refuse_applied(self._prepared.applied, call)


def start(
    model: nn.Module,
    prepared: Any,
    fp8_backend: str | None,
    decay: float,
    multi_avg_fn: Average | None,
    use_buffers: bool,
) -> MovingAverage:
    """Start an average; see the Accelerator."""
    strategy = prepared.strategy
    if not any(model is item for item in prepared.models):
        raise ConfigurationError(
            f"moving_average got a {type(model).__name__} that is not prepared. Pass the model that prepare() returned."
        )
    unknown_backend = fp8_backend not in (None, "native")
    if not strategy.averages_weights or unknown_backend:
        where = f"the FP8 backend {fp8_backend!r}" if unknown_backend else type(strategy).__name__
        raise ConfigurationError(
            f"moving averages of weights have not been compared with one process under {where}. They work with the "
            "strategies of accel, in fp32, bf16, fp16, and in fp8 with the backend 'native'."
        )
    average = MovingAverage(model, prepared, multi_avg_fn or get_ema_multi_avg_fn(decay), use_buffers)
    prepared.averages.append(average)
    return average


def refuse_applied(applied: Sequence[Swap], call: str) -> None:
    """Raise the error of a call that belongs to training."""
    raise ConfigurationError(
        f"{call} was called while moving averages are in the {type(applied[-1].average.model).__name__}. Leave the "
        "block of applied() first, and evaluate or save the model in it only."
    )


@contextmanager
def suspended(applied: Sequence[Swap]) -> Iterator[None]:
    """Put the weights of training back into models that have averages, for the block."""
    with ExitStack() as stack:
        for swap in reversed(applied):
            swap.exchange()
            stack.callback(swap.exchange)
        yield


def own_memory(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a state dict without tensors in the memory of the model, which gets other values after the block."""
    held = set(map(_address, chain(model.parameters(), model.buffers())))
    shared = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and _address(value) in held:
            shared[name] = value
    return {**state, **copy.deepcopy(shared)}  # names of the same weight stay so


def _address(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's memory; None on XLA devices, whose tensors have no address."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except RuntimeError:
        return None
