"""Settings of gradient accumulation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigurationError


@dataclass
class GradientAccumulationPlugin:
    """Settings of gradient accumulation.

    Args:
        num_steps: micro batches per optimizer step. None uses the launcher's setting, or 1.
        adjust_scheduler: count the calls of a prepared scheduler during accumulation in its ``_step_count``. They do
            not change the learning rate in either case.
        sync_with_dataloader: end the accumulation window at the end of a data loader, even if it is incomplete.
        sync_each_batch: synchronize gradients in every micro batch. This costs communication, but saves the unsharded
            copy of the gradients that sharded strategies need otherwise.

    Raises:
        ConfigurationError: ``num_steps`` is not a positive integer.

    Examples:
        >>> plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
        >>> plugin.num_steps
        4
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        check_steps("GradientAccumulationPlugin.num_steps", self.num_steps)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}


def check_steps(name: str, steps: object) -> None:
    """Raise ConfigurationError for a number of micro batches that is neither None nor a positive integer."""
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ConfigurationError(f"{name}={steps!r} must be a positive integer. Use 1 to turn accumulation off.")
