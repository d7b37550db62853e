"""One loss scale for several optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


class SharedGradScaler(torch.amp.GradScaler):
    """torch's GradScaler, made safe for optimizers that do not know of each other.

    torch asks for one ``update()`` after the last of all optimizers has stepped: an earlier one forgets which gradients
    are already unscaled, and the next ``step()`` divides them again. Prepared optimizers each call ``update()`` after
    their own step, so here it takes effect when all of them have stepped, or at the latest when the next loss is
    scaled. Unscaling twice, or without gradients, does nothing.
    """

    def __init__(self, device: str = "cuda", **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self.over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Takes the maximum of a tensor over the ranks that divide gradients among them; None where each rank has all
        of them.
        """
        self._expected: set[int] = set()
        self._stepped: set[int] = set()

    def expect(self, optimizer: Optimizer) -> None:
        """Count this optimizer among those that an update waits for."""
        self._expected.add(id(optimizer))

    def forget(self) -> None:
        """Expect no optimizer any more."""
        self._finish()
        self._expected.clear()

    def scale(self, outputs: Any) -> Any:
        if self._stepped:
            self._finish()
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        if (
            self._enabled
            and not self.is_unscaled(optimizer)
            and (_has_gradients(optimizer) or self.over_ranks is not None)
        ):
            super().unscale_(optimizer)

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)
        if self.over_ranks is not None:
            # A gradient may overflow in the part of one rank alone, and either all of them step or none does.
            mine = [value.detach().float() for value in found.values()]
            worst = self.over_ranks(
                torch.stack([value.to(mine[0].device) for value in mine]).amax(0) if mine else torch.zeros(1)
            )
            for value in found.values():
                value.copy_(worst)
        return found

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's gradients have been divided by the scale already."""
        return bool(self._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if self._enabled and not _has_gradients(optimizer):
            return None  # torch asserts that there is a gradient; without the scaler such a step would change nothing
        self._stepped.add(id(optimizer))
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if new_scale is not None or self._expected <= self._stepped:
            self._finish(new_scale)

    def state_dict(self) -> dict[str, Any]:
        if self._stepped:
            self._finish()
        return super().state_dict()

    def _finish(self, new_scale: float | torch.Tensor | None = None) -> None:
        if self._stepped or new_scale is not None:
            super().update(new_scale)
        self._stepped.clear()


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
