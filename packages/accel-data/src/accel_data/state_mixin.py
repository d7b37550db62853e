"""The state of an iteration that a loader publishes to the GradientState."""

from __future__ import annotations

from accel_state.state import GradientState


class DataLoaderStateMixin:
    """The state of an iteration that a loader publishes to the GradientState.

    Attributes:
        end_of_dataloader: whether the current batch is the last one.
        remainder: samples in the last global step that are not padding; -1 if a gather has nothing to drop.
        ragged: whether batch sizes may differ between ranks in one step; the same on all ranks.
        real_samples: samples of the current batch that are not padding; None if it has no padding.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    ragged: bool = False
    real_samples: int | None = None
    gradient_state: GradientState

    def reset(self) -> None:
        """Clear the state of the latest iteration."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.real_samples = None

    def begin(self) -> None:
        """Register the loader at the start of an iteration."""
        self.reset()
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Unregister the loader when an iteration ended or was abandoned."""
        self.gradient_state._remove_dataloader(self)
