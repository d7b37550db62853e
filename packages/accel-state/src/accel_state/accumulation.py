"""How gradients are accumulated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigurationError


@dataclass
class GradientAccumulationPlugin:
    """Settings of gradient accumulation.

    Args:
        num_steps: micro batches an optimizer step. None leaves it to the launcher's setting, and 1 without that.
        adjust_scheduler: count the calls of a prepared scheduler that come while gradients accumulate in its
            ``_step_count``. The learning rate does not move in them, either way.
        sync_with_dataloader: end the accumulation window at the end of a data loader, even if it is short.
        sync_each_batch: synchronise gradients in every micro batch: more messages, but no second copy of the gradients,
            which sharded strategies would need while they do not synchronise.

    Raises:
        ConfigurationError: ``num_steps`` is not a positive integer.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None and (
            isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int) or self.num_steps < 1
        ):
            raise ConfigurationError(
                f"gradient accumulation num_steps={self.num_steps!r} is not a positive integer. Use 1 for no "
                "accumulation."
            )

    def to_kwargs(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        default = type(self)()
        return {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)
        }
