"""Settings of activation checkpointing where a model is not sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from accel_state.arguments import check_number
from accel_state.errors import ConfigurationError
from accel_state.options import CheckpointingOptions

from .base import KwargsHandler

_MODES = ("full", "selective")


@dataclass
class ActivationCheckpointingKwargs(KwargsHandler):
    """Compute the activations of a model's blocks again in the backward pass: in one process, and with DDP.

    With FSDP and on meshes, set the options of :class:`accel.FullyShardedDataParallelPlugin`. ``accel launch
    --activation_checkpointing`` passes the same settings; a handler in the script takes precedence.

    Args:
        block_names: class names of the blocks; by default those that a model of Transformers names itself.
        mode: recompute all of a block ("full"), or all except for matrix products, convolutions and attention
            ("selective").
        every: checkpoint one of so many blocks, beginning with the first.
        offload: keep the inputs of checkpointed blocks in host memory, copied while blocks compute.

    Raises:
        ConfigurationError: an unknown mode, ``every`` below 1, or ``offload`` with the mode "selective".
    """

    block_names: list[str] | None = None
    mode: Literal["full", "selective"] = "full"
    every: int = 1
    offload: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("ActivationCheckpointingKwargs.every", self.every, at_least=1, whole=True)
        if self.mode not in _MODES:
            raise ConfigurationError(
                f"ActivationCheckpointingKwargs(mode={self.mode!r}) is not one of {', '.join(_MODES)}. Choose one."
            )
        if self.offload and self.mode == "selective":
            raise ConfigurationError(
                "ActivationCheckpointingKwargs(offload=True) moves the inputs of blocks to the host, and not the "
                "results that mode='selective' keeps. Leave one of them out."
            )

    names_setting: ClassVar[str] = "block_names of ActivationCheckpointingKwargs (--activation_checkpointing_blocks)"

    @classmethod
    def launched(cls, options: CheckpointingOptions) -> ActivationCheckpointingKwargs:
        """Return the settings that ``accel launch --activation_checkpointing`` has passed."""
        names = [name.strip() for name in (options.activation_checkpointing_blocks or "").split(",")]
        return cls(
            block_names=[name for name in names if name] or None,
            mode=cast(Literal["full", "selective"], options.activation_checkpointing_mode or "full"),
            every=options.activation_checkpointing_every or 1,
            offload=options.activation_checkpointing_offload,
        )

    @property
    def activation_checkpointing_mode(self) -> str:
        """``mode``, as the plugin of FSDP names it."""
        return self.mode

    @property
    def activation_checkpointing_every(self) -> int:
        """``every``, as the plugin of FSDP names it."""
        return self.every

    @property
    def activation_checkpointing_offload(self) -> bool:
        """``offload``, as the plugin of FSDP names it."""
        return self.offload
