"""One loss scale for several optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from accel_state import PartialState

from .._torch_compat import is_unscaled
from ..core.local_part import local


class SharedGradScaler(torch.amp.GradScaler):
    """torch's GradScaler for several independent optimizers.

    torch expects one ``update()`` after the last of all optimizers has stepped: an earlier call forgets which gradients
    are already unscaled, and the next ``step()`` divides them again. Prepared optimizers each call ``update()`` after
    their own step, so here it takes effect when all of them have stepped, or at the latest when the next loss is
    scaled. Unscaling twice, or without gradients, does nothing. Gradients that another optimizer still accumulates get
    the new scale then.

    Attributes:
        over_ranks: takes the maximum of a tensor over the ranks that shard gradients; None where no rank does.
        scale_gradients: multiplies the gradients of parameters by a factor; where they are sharded, those too that are
            accumulated apart from the parameters.
    """

    def __init__(self, device: str = "cuda", **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self.over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.scale_gradients: Callable[[list[torch.Tensor], torch.Tensor], None] = _scale_gradients
        self._expected: dict[int, Optimizer] = {}
        self._stepped: set[int] = set()

    def share_overflow(self, state: PartialState) -> None:
        """Skip a step on all ranks if the gradients of any rank overflow: each rank has other gradients."""
        self.over_ranks = lambda tensor: state.collectives.all_reduce(tensor.to(state.device), "max").to(tensor.device)

    def expect(self, optimizer: Optimizer) -> None:
        """Count this optimizer among those that an update waits for."""
        self._expected[id(optimizer)] = optimizer

    def forget(self) -> None:
        """Wait for no optimizer any longer."""
        self._finish()
        self._expected.clear()

    def scale(self, outputs: Any) -> Any:
        if self._stepped:
            self._finish()
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        if not self.is_enabled() or self.is_unscaled(optimizer):
            return
        if self.over_ranks is not None or _has_gradients(optimizer):
            super().unscale_(optimizer)

    def _unscale_grads_(self, optimizer: Any, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        if self.over_ranks is None:
            return super()._unscale_grads_(optimizer, *args, **kwargs)
        parts: Any = _LocalParts(optimizer)
        overflows = super()._unscale_grads_(parts, *args, **kwargs)
        # Gradients may overflow on one rank alone; either all ranks step or none does.
        own = [value.detach().float() for value in overflows.values()]
        any_own = torch.stack([value.to(own[0].device) for value in own]).amax(0) if own else torch.zeros(())
        any_rank = self.over_ranks(any_own)
        for value in overflows.values():
            value.copy_(any_rank)
        return overflows or {any_rank.device: any_rank}  # a rank without gradients steps if the others do

    @property
    def is_stepping(self) -> bool:
        """True from the step of an optimizer to the update."""
        return bool(self._stepped)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer's gradients have been divided by the scale already."""
        return is_unscaled(self, optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        knows_others = self.over_ranks is not None and self._scale is not None
        if self.is_enabled() and not knows_others and not _has_gradients(optimizer):
            # torch asserts that there is a gradient. A step without one is taken, as without a scaler: schedules go on.
            return optimizer.step(*args, **kwargs)
        self._stepped.add(id(optimizer))
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if new_scale is not None or self._expected.keys() <= self._stepped:
            self._finish(new_scale)

    def state_dict(self) -> dict[str, Any]:
        if self._stepped:
            self._finish()
        return super().state_dict()

    def _finish(self, new_scale: float | torch.Tensor | None = None) -> None:
        if self._stepped or new_scale is not None:
            waiting = [optimizer for key, optimizer in self._expected.items() if key not in self._stepped]
            unscaled = [item for item in waiting if self.is_unscaled(item) and _has_gradients(item)]
            former = self._scale.clone() if waiting and self._scale is not None else None
            super().update(new_scale)
            if former is not None:
                self._scale_again(waiting, unscaled, former)
        self._stepped.clear()

    def _scale_again(self, waiting: list[Optimizer], unscaled: list[Optimizer], former: torch.Tensor) -> None:
        """Give gradients to which later losses will be added the scale of those losses."""
        scale = self._scale
        assert scale is not None
        for optimizer in waiting:
            factor = scale if optimizer in unscaled else scale / former
            self.scale_gradients([item for group in optimizer.param_groups for item in group["params"]], factor)


def _scale_gradients(parameters: list[torch.Tensor], factor: torch.Tensor) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            gradient.mul_(factor.to(gradient.device))


class _LocalParts:
    """The parameters of an optimizer, with this rank's part in the place of each DTensor.

    torch unscales a list of gradients in one operator, which refuses DTensors together with other tensors, and DTensors
    of several meshes.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.param_groups = [{"params": [_local_part(parameter) for parameter in parameters]}]


def _local_part(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None or not hasattr(parameter, "to_local"):
        return parameter
    gradient = local(parameter.grad)
    part = gradient.detach()  # the same memory: only its gradient is read
    part.grad = gradient
    return part


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
