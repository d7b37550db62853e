"""What a loader tells the GradientState about its iteration."""

from __future__ import annotations

from accel_state.state import GradientState


class DataLoaderStateMixin:
    """What a loader tells the GradientState about its iteration.

    Attributes:
        end_of_dataloader: whether the batch handed out last is the last one.
        remainder: samples in the last global step that are no padding; -1 where there is nothing to leave out after a
            gather.
        ragged: whether batch sizes may differ between ranks in one step; the same on all ranks.
        real_samples: samples of the batch handed out last that are no padding; None if it holds none.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    ragged: bool = False
    real_samples: int | None = None
    gradient_state: GradientState

    def reset(self) -> None:
        """Forget about the latest iteration."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.real_samples = None

    def begin(self) -> None:
        """An iteration begins."""
        self.reset()
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """An iteration ended or was abandoned."""
        self.gradient_state._remove_dataloader(self)
